"""Public folders that were made up to break an import, and imports that end in the middle."""

import contextlib
import json
import os
import signal

import pytest

from moex.hf import storage
from moex.hf.__main__ import main
from moex.hf.run import export_run, import_run
from tests.odd import changed

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.mark.parametrize(
    "change, tells",
    [
        (dict(num_local_experts=10**9), "num_local_experts=1000000000, but the folder holds"),
        (dict(num_hidden_layers=10**12), "num_hidden_layers=1000000000000, but the folder holds"),
    ],
)
def test_counts_that_no_folder_holds_are_told_at_once(public, capsys, change, tells):
    folder = public.folder("mixtral", **change)
    assert main(["import", str(folder), str(public.tmp_path / "run")]) == 2
    assert tells in capsys.readouterr().err


def test_every_wrong_field_of_a_header_is_refused(public):
    """Of each tensor's entry, and of a tensor's name; and JSON that is nested too deeply."""
    folder = public.folder("mixtral")
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    small = dict(list(header.items())[:2])
    for path, new in changed(small):
        if path[0] == "__metadata__":
            continue
        text = json.dumps(header | new if len(path) > 1 or path[0] in new else {}).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
        with contextlib.suppress(ValueError):
            storage.contents(file)
            assert json.loads(text) == header, path
    for text in (b"[" * 100_000, b"[]", b"{", b"\xff", b'{"a": NaN}'):
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            storage.contents(file)


def test_an_import_that_fails_or_is_ended_leaves_nothing(public, monkeypatch):
    """In the middle of its reading: by an error, and by SIGTERM."""
    folder, run = public.folder("mixtral"), public.tmp_path / "run"

    def fails(*_):
        raise ValueError("no more")

    def ended(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    for action, outcome in ((fails, ValueError), (ended, SystemExit)):
        with pytest.raises(outcome):
            import_run(folder, run, [], action)
        assert not run.exists()
    run.mkdir()
    with pytest.raises(ValueError, match="no more"):
        import_run(folder, run, [], fails)
    assert run.is_dir() and not list(run.iterdir())
    exported = public.tmp_path / "out"
    source = public.imported(folder, name="whole")
    with pytest.raises(ValueError, match="no more"):
        export_run(source, exported, fails)
    assert not exported.exists()


def test_help_is_no_error(capsys):
    assert main(["--help"]) == 0 and "usage: python -m moex.hf import" in capsys.readouterr().out
