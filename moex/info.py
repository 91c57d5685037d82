"""What runs on this machine's back end: `python -m moex.info [--json]`."""

import argparse
import importlib
import itertools
import json
import pkgutil
import platform
import sys
import typing
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import jax

import pallas_kernels
from mesh import fold
from mesh.axes import DENSE_AXES, EXPERT_AXES
from mesh.topology import peak_flops
from moex import cli
from moex.config import OptimizerConfig, ParallelConfig, PrecisionConfig, RouterConfig
from moex.dispatch import TRANSPORTS, unavailable
from moex.memory.residuals import MODULES, RESIDUALS
from moex.models.decoder import Decoder
from moex.models.flops import num_parameters
from moex.precision.products import missing_hardware
from moex.precision.recipes import RECIPES

FOLDING_RULE = (
    "dp x cp x tp = edp x ep x etp = devices; "
    "each of tp and cp x tp divides, or is divided by, each of etp and ep x etp"
)
_MOST_MESHES_LISTED = 64
"""Devices up to which every mesh is listed."""


def collect() -> dict[str, Any]:
    """Everything that the command tells, as JSON values. A reason of "" means that the thing runs here."""
    backend, devices = jax.default_backend(), jax.devices()
    return dict(
        versions=dict(python=platform.python_version())
        | {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")},
        backend=backend,
        devices=[dict(id=d.id, kind=d.device_kind, process=d.process_index) for d in devices],
        peak_bf16_flops=peak_flops(devices[0].device_kind),
        folding_rule=FOLDING_RULE,
        meshes=meshes(len(devices)) if len(devices) <= _MOST_MESHES_LISTED else None,
        zero=_choices(ParallelConfig, "zero"),
        context_parallelism=_choices(ParallelConfig, "context"),
        routers=dict(
            score_functions=_choices(RouterConfig, "score_function"),
            selections=_choices(RouterConfig, "selection"),
            capacity_policies=_choices(RouterConfig, "capacity_policy"),
            balancing=dict(
                aux_coefficient="balance loss of a micro-batch",
                sequence_coefficient="balance loss of each document by itself",
                global_coefficient="balance loss over the step's micro-batches so far",
                z_coefficient="z-loss on the logits",
                bias_rate="bias of the choice, without a loss",
                num_groups="choice within the best top_groups groups",
                capacity_factor="dropping beyond a capacity",
                forced="random logits, for benchmarks",
            ),
        ),
        transports={name: unavailable(name, backend) for name in TRANSPORTS},
        kernels=kernels(),
        compute_dtypes=_choices(PrecisionConfig, "compute_dtype"),
        recipes=_recipes(jax.devices()[0].device_kind),
        recompute=[*MODULES, *(name for name in RESIDUALS if name != "layer_input")],
        offload=list(RESIDUALS),
        stash=["experts"],
        optimizers=_choices(OptimizerConfig, "name"),
        presets={name: _preset(name) for name in cli.PRESETS},
    )


def meshes(num_devices: int) -> list[dict[str, int]]:
    """Every pair of factorisations of `num_devices` that folds, without pipeline stages: sizes by view axis."""
    found = []
    triples = list(_triples(num_devices))
    for dense, expert in itertools.product(triples, triples):
        sizes = dict(zip(DENSE_AXES[1:], dense, strict=True)), dict(zip(EXPERT_AXES[1:], expert, strict=True))
        try:
            fold(*sizes)
        except ValueError:
            continue
        found.append(sizes[0] | sizes[1])
    return found


def kernels() -> dict[str, dict[str, str]]:
    """Implementations of every op of `pallas_kernels`, in the order in which they are tried, with reasons."""
    ops = [m.name for m in pkgutil.iter_modules(pallas_kernels.__path__) if m.ispkg]
    return {name: importlib.import_module(f"pallas_kernels.{name}").implementations() for name in ops}


def _triples(number: int):
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return ((a, b, number // (a * b)) for a in divisors for b in divisors if number % (a * b) == 0)


def _choices(section: type, field: str) -> list:
    """The values that a field's type allows."""
    return list(typing.get_args(typing.get_type_hints(section)[field]))


def _recipes(kind: str) -> dict[str, str]:
    """Recipes of precision, for dense products and for experts', with the reason where this device lacks the hardware."""
    ways = ((name, recipe, grouped) for name, recipe in RECIPES.items() for grouped in (False, True))
    return {
        name + ", experts" * grouped: missing_hardware(recipe, kind, grouped=grouped) for name, recipe, grouped in ways
    }


def _preset(name: str) -> dict[str, Any]:
    make = cli.PRESETS[name]
    model = make().model
    total, active = num_parameters(Decoder(model).declarations, model)
    about = (make.__doc__ or "").strip().partition("\n")[0]
    return dict(parameters=total, active_parameters=active, about=about)


def text(facts: Mapping[str, Any]) -> str:
    """The same for a person to read, one fact a line."""
    f, devices = facts, facts["devices"]
    kinds = {d["kind"]: sum(e["kind"] == d["kind"] for e in devices) for d in devices}
    peak = f["peak_bf16_flops"]
    folds = f["meshes"]
    lines = [
        ("versions", "  ".join(f"{name} {version}" for name, version in f["versions"].items())),
        ("devices", f"{f['backend']}: " + ", ".join(f"{count} x {kind}" for kind, count in kinds.items())),
        ("peak", f"{peak / 1e12:,.0f} TFLOP/s in BF16 a device" if peak else "none listed, so no MFU is told"),
        ("meshes", f["folding_rule"]),
        ("", f"ways to fold the devices here: {len(folds) if folds else 'too many to list'}"),
        ("ZeRO", " or ".join(map(str, f["zero"]))),
        ("context", ", ".join(f["context_parallelism"])),
        ("routers", "scores by " + " or ".join(f["routers"]["score_functions"])),
        *(("", f"model.router.{field}: {about}") for field, about in f["routers"]["balancing"].items()),
        *_with_reasons("transports", f["transports"]),
    ]
    for op, implementations in f["kernels"].items():
        lines += _with_reasons(op, implementations)
    lines += [
        ("compute", ", ".join(f["compute_dtypes"])),
        *_with_reasons("recipes", f["recipes"]),
        ("recompute", ", ".join(f["recompute"])),
        ("offload", ", ".join(f["offload"])),
        ("stash", ", ".join(f["stash"])),
        ("optimizers", ", ".join(f["optimizers"])),
    ]
    longest = max(map(len, f["presets"]))
    for i, (name, p) in enumerate(f["presets"].items()):
        size = f"{p['parameters'] / 1e6:>10,.1f}M {p['active_parameters'] / 1e6:>9,.1f}M a token"
        lines.append(("" if i else "presets", f"{name:<{longest}}  {size}  {p['about']}"))
    return "\n".join(f"{name:>16}  {line}" for name, line in lines) + "\n"


def _with_reasons(title: str, reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    width = max(16, *(len(name) + 2 for name in reasons))
    line = lambda name, reason: f"{name:<{width}}" + (f"not here: {reason}" if reason else "runs here")
    return [("" if i else title, line(*item)) for i, item in enumerate(reasons.items())]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m moex.info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    facts = collect()
    print(json.dumps(facts, indent=2) + "\n" if options.json else text(facts), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
