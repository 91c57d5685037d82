"""Public folders to spoil, and the commands run in this process."""

import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mesh.distributed import Start
from moex.hf.__main__ import main

GOLDENS = Path(__file__).parents[1] / "goldens" / "hf"


class Public:
    """The commands, and the goldens with changed tensors or configuration."""

    def __init__(self, tmp_path: Path):
        self.tmp_path = tmp_path

    def folder(
        self, name: str, change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None, **config
    ) -> Path:
        """A copy of a golden checkpoint; `config`: fields of config.json to set, or to leave out where None is given."""
        import json

        folder = self.tmp_path / f"public_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(GOLDENS / name, folder, ignore=shutil.ignore_patterns("expected*"))
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        values = json.loads((folder / "config.json").read_text()) | config
        values = {k: v for k, v in values.items() if not (k in config and v is None)}
        (folder / "config.json").write_text(json.dumps(values))
        return folder

    def imported(self, folder: Path, *flags: str, name: str = "run") -> Path:
        run = self.tmp_path / name
        shutil.rmtree(run, ignore_errors=True)
        assert main(["import", str(folder), str(run), *flags]) == 0
        return run

    def exported(self, run: Path, *flags: str, name: str = "out") -> Path:
        out = self.tmp_path / name
        shutil.rmtree(out, ignore_errors=True)
        assert main(["export", str(run), str(out), *flags]) == 0
        return out

    @staticmethod
    def bits(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        """Format, shape and bytes of every tensor of all files."""
        found = {}
        for file in sorted(folder.glob("model*.safetensors")):
            found |= {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in load_file(file).items()}
        return found


@pytest.fixture
def public(tmp_path, monkeypatch) -> Public:
    # `jax.distributed` cannot start in a process that has used devices.
    monkeypatch.setattr("mesh.distributed.initialise", lambda: Start("one process", None, 1, 0))
    return Public(tmp_path)


@pytest.fixture
def one_device(monkeypatch):
    """A machine with one device, as far as the commands know."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "devices", lambda *_: first)
