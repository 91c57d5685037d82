"""Looking at checkpoints: what is listed, and that a changed bit, a missing array or another configuration is told."""

import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.distributed import Start
from moex import trainer
from moex.checkpoint import open_step
from moex.checkpoint.__main__ import main
from moex.checkpoint.checksum import checksum, checksums
from moex.checkpoint.look import verify
from moex.cli import parse

ARGUMENTS = [
    "tiny", "--model.d-model=32", "--model.num-layers=1", "--model.expert-width=16", "--train.steps=2",
    "--train.seq-len=32", "--optimizer.warmup-steps=1", "--checkpoint.every-steps=1", "--observe.eval-every=0",
    "--observe.sample-tokens=0", "--observe.trackers", "--optimizer.ema-decay=0.9",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "two"
    config = parse([*ARGUMENTS, f"--folder={folder}"]).config
    assert trainer.run(config, Start("one process", None, 1, 0)) == 0
    return folder


@pytest.fixture
def copied(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def plain_checksum(x: np.ndarray) -> int:
    """Element by element in Python's whole numbers."""
    bits = np.ascontiguousarray(x).view(f"uint{8 * x.dtype.itemsize}").reshape(-1)
    return sum(int(b) * (2 * place + 1) for place, b in enumerate(bits)) % 2**32


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16", "int32", "uint32", "float8_e4m3fn"]),
    seed=st.integers(0, 100),
)
def test_checksum_is_the_sum_that_it_says(shape, dtype, seed):
    raw = np.random.default_rng(seed).bytes(max(1, int(np.prod(shape))) * jnp.dtype(dtype).itemsize)
    x = np.frombuffer(raw, jnp.dtype(dtype)).reshape(shape)
    assert int(checksum(jnp.asarray(x))) == plain_checksum(x)


def test_a_changed_bit_or_place_changes_the_checksum_and_a_split_does_not(devices):
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    spec = jax.sharding.PartitionSpec("x")
    split = jax.device_put(x, jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",)), spec))
    assert checksums({"a": {"b": split}}) == checksums({"a": {"b": x}}) == {"a.b": plain_checksum(x)}
    for bit in (0, 7, 22, 31):
        other = x.copy()
        other.view(np.uint32)[5, 3] ^= np.uint32(1) << np.uint32(bit)
        assert checksums({"": other}) != checksums({"": x})
    assert checksums({"": x[::-1]}) != checksums({"": x})


def test_ls_and_show(run, capsys):
    assert main(["ls", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1", "2"]
    assert all("1 processes, 8 x cpu, dense pp=1 dp=8" in line for line in lines)
    assert main(["show", str(run), "--step", "1"]) == 0
    out = capsys.readouterr().out
    assert "params.moe_layers.moe.experts.down" in out and "[1, 8, 16, 32]" in out
    assert "optimizer" in out.splitlines()[-1] and "ema" in out.splitlines()[-1]


def test_a_whole_checkpoint_is_verified(run, capsys):
    assert main(["verify", str(run), "--step", "1"]) == 0
    assert "every array is what was saved" in capsys.readouterr().out


def test_a_changed_byte_is_told(copied, capsys):
    """At places drawn from all over the largest file, which holds the arrays."""
    path = max((copied / "checkpoints" / "2").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    whole, rng = path.read_bytes(), random.Random(1)
    for _ in range(4):
        at = rng.randrange(len(whole) // 10, 9 * len(whole) // 10)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert main(["verify", str(copied)]) == 1, at
        assert "is not what was saved" in (told := capsys.readouterr().out) or "cannot be read" in told


def test_another_configuration_is_told(copied):
    config = copied / "config.json"
    text = config.read_text()
    config.write_text(
        text.replace('"expert_width": 16', '"expert_width": 24').replace('"batch_size": 8', '"batch_size": 16')
    )
    told = list(verify(copied))
    assert any(
        "experts.down is ((1, 8, 16, 32), 'float32'), config.json makes it ((1, 8, 24, 32)" in line for line in told
    )
    assert "it has seen 16 samples; by the batch sizes of config.json it would be 32" in told
    (copied / "checkpoints" / "2").rename(copied / "checkpoints" / "5")
    config.write_text(text)
    assert "its step is 2, its folder says 5" in list(verify(copied))


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_what_is_no_run_is_named(tmp_path, capsys, command):
    assert main([command, str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_a_step_that_was_not_saved_is_named(run, capsys):
    assert main(["verify", str(run), "--step", "7"]) == 2
    assert "no checkpoint of step 7; it has [1, 2]" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")  # orbax warns of what it misses
def test_a_damaged_file_is_told_and_nothing_else_is_touched(copied, capsys):
    """Every file of the newest checkpoint gone, and cut in half; and folders that are none."""
    files = [path for path in (copied / "checkpoints" / "2").rglob("*") if path.is_file()]
    there = lambda: sorted(path.relative_to(copied) for path in (copied / "checkpoints").rglob("*"))
    before = there()
    for path in files:
        whole = path.read_bytes()
        for damaged in (None, whole[: len(whole) // 2]):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            codes = [main([command, str(copied)]) for command in ("ls", "show")]
            assert set(codes) <= {0, 2}, path
            path.write_bytes(whole)
    assert there() == before
    (copied / "checkpoints" / "7").mkdir()
    (copied / "checkpoints" / "8.orbax-checkpoint-tmp-1").mkdir()
    before = there()
    for command in ("ls", "show", "verify"):
        assert main([command, str(copied)]) in (0, 1, 2)
    with pytest.raises(ValueError, match=r"step 7 cannot be read|has lost its list|holds no"):
        open_step(copied, 7)
    assert there() == before
    capsys.readouterr()
    metadata = copied / "checkpoints" / "2" / "state" / "_METADATA"
    metadata.write_bytes(b"{")
    with pytest.raises(ValueError, match=r"step 2 cannot be read|step 2 has lost"):
        open_step(copied, 2)
