"""What runs on this back end: `python -m moex.info` for a person, `--json` for a program.

Everything is asked of the code that would run it, so a transport or a kernel added there is listed here.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, get_args, get_type_hints

import jax

from mesh.axes import DENSE_AXES, EXPERT_AXES
from moex import dispatch
from moex.config import ParallelConfig, RouterConfig
from pallas_kernels import grouped_matmul

KERNELS = dict(grouped_matmul=grouped_matmul.implementations)
"""Each operation of `pallas_kernels`, with the function that says which of its implementations run here."""

BALANCING = dict(
    auxiliary_loss="model.router.aux_coefficient",
    bias="model.router.bias_rate",
    z_loss="model.router.z_coefficient",
)
"""Ways of keeping experts evenly used (and logits small), by the setting that turns each on; they add up freely."""


def info() -> dict[str, Any]:
    """Plain values, ready for JSON. Where a name maps to a text, the text is why it doesn't run here, "" where it does."""
    platform, devices = jax.default_backend(), jax.devices()
    return dict(
        versions={name: metadata.version(name) for name in ("jax", "jaxlib", "flax")},
        platform=platform,
        devices=[device.device_kind for device in devices],
        processes=jax.process_count(),
        meshes=(
            f"{' x '.join(DENSE_AXES)} = {' x '.join(EXPERT_AXES)} = {len(devices)} devices, outer to inner; of every two "
            "inner products that meet, one must divide the other"
        ),
        router=dict(score_functions=_choices(RouterConfig, "score_function"), balancing=BALANCING),
        context_parallel=_choices(ParallelConfig, "context"),
        zero=_choices(ParallelConfig, "zero"),
        transports={name: dispatch.unavailable(name, platform) for name in dispatch.TRANSPORTS},
        kernels={name: implementations() for name, implementations in KERNELS.items()},
    )


def describe(found: Mapping[str, Any]) -> str:
    """The same for a person, one subject a line."""
    kinds = {kind: found["devices"].count(kind) for kind in found["devices"]}
    lines = [
        ("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
        ("devices", ", ".join(f"{n} x {kind}" for kind, n in kinds.items()) + f" ({found['platform']})"),
        ("processes", str(found["processes"])),
        ("meshes", found["meshes"]),
        ("router scores", ", ".join(found["router"]["score_functions"])),
        ("balancing", ", ".join(f"{name} (--{field})" for name, field in found["router"]["balancing"].items())),
        ("context", ", ".join(found["context_parallel"])),
        ("ZeRO", ", ".join(map(str, found["zero"]))),
        ("transports", _with_reasons(found["transports"])),
        *((f"{name}", _with_reasons(reasons)) for name, reasons in found["kernels"].items()),
        ("presets", "train.py --help lists them"),
    ]
    return "\n".join(f"{name:>16}  {text}" for name, text in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m moex.info", description="Says what runs on this back end.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    found = info()
    print(json.dumps(found, indent=2) if options.json else describe(found))
    return 0


def _choices(config: type, field: str) -> list:
    """The values that a field of a configuration may take."""
    return list(get_args(get_type_hints(config)[field]))


def _with_reasons(reasons: Mapping[str, str]) -> str:
    return ", ".join(f"{name} (not here: {reason})" if reason else name for name, reason in reasons.items())


if __name__ == "__main__":
    sys.exit(main())
