"""Loads exported folders by the reference library, unmodified, and compares logits: needs torch and transformers.

`python tests/hf/check_export.py FOLDER EXPECTED ...`: pairs of an exported folder and an `expected.safetensors`. Exit code 1
when a tensor is missing, unexpected or of another shape, or logits differ by more than 1e-4.
"""

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file


def difference(folder: Path, expected: Path) -> float:
    """Largest difference of logits.  Raises ValueError for tensors that don't fit."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if odd := {what: found for what, found in info.items() if found and what != "error_msgs"}:
        raise ValueError(f"{folder}: {odd}")
    want = load_file(expected)
    with torch.no_grad():
        logits = model.eval()(want["input_ids"].long()).logits
    return float((logits - want["logits"]).abs().max())


def main(arguments: list[str]) -> int:
    worst = 0.0
    for folder, expected in zip(arguments[::2], arguments[1::2], strict=True):
        found = difference(Path(folder), Path(expected))
        worst = max(worst, found)
        print(f"{folder}: logits within {found:.1e}")
    return int(worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
