"""Host memory of importing a synthetic checkpoint in several files: `python benchmarks/import_memory.py [GB] [FOLDER]`.

Writes a Mixtral-like checkpoint of so many GB in float32 (4), imports it in a process of its own on one CPU device, prints
that process's largest memory less the model's own arrays, and less what the process has before anything is read.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from moex.hf import storage
from moex.hf.load import public_shapes
from moex.hf.names import pieces
from moex.hf.save import deal
from moex.models.families import from_public

CHILD = """
import sys
from moex.hf.__main__ import main, peak_bytes
import moex.hf.run
before = peak_bytes()
code = main(["import", sys.argv[1], sys.argv[2]])
print("PEAK", before, peak_bytes())
sys.exit(code)
"""


def make(folder: Path, layers: int, width: int) -> int:
    """Writes a checkpoint of experts 2.5 times as wide as the model; returns its bytes."""
    public = dict(
        architectures=["MixtralForCausalLM"], model_type="mixtral", vocab_size=1024, hidden_size=width,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4, intermediate_size=width * 5 // 2,
        num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=1e6, dtype="float32",
    )  # fmt: skip
    model = from_public(public)
    shapes = public_shapes(model, pieces(model, "mixtral"))
    (folder / "config.json").write_text(json.dumps(public))
    places = deal(folder, shapes, dict.fromkeys(shapes, np.dtype(np.float32)), 1_000_000_000)
    values = np.random.default_rng(0).normal(size=max(int(np.prod(s)) for s in shapes.values())).astype(np.float32)
    for name, shape in shapes.items():
        storage.write(places[name], values[: int(np.prod(shape))].reshape(shape))
    names = {name: place.file.name for name, place in places.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=names)))
    return sum(place.num_bytes for place in places.values())


def main(gigabytes: float, where: str | None) -> int:
    folder = Path(tempfile.mkdtemp(dir=where))
    try:
        size = make(folder, layers=max(1, round(gigabytes * 4)), width=1024)  # 0.26 GB a layer
        files = len(list(folder.glob("*.safetensors")))
        ran = subprocess.run(
            [sys.executable, "-c", CHILD, str(folder), str(folder / "run")],
            capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1],
        )  # fmt: skip
        if ran.returncode:
            print(ran.stdout[-2000:], ran.stderr[-4000:])
            return 1
        _, before, peak = (int(x) if x.isdigit() else 0 for x in ran.stdout.strip().splitlines()[-1].split())
        read = [line for line in ran.stdout.splitlines() if line.startswith("read")][-1]
        above = (peak - before - size) / 1e9
        print(read)
        print(f"{size / 1e9:.2f} GB in {files} files: {above:.2f} GB of host memory above the model's arrays")
        return 0
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gigabytes", nargs="?", type=float, default=4.0)
    parser.add_argument(
        "folder", nargs="?", help="where the checkpoint is written; the system's temporary folder otherwise"
    )
    given = parser.parse_args()
    sys.exit(main(given.gigabytes, given.folder))
