"""What would make a step smaller: the first changes of a configuration that apply, each measured by compiling it."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from moex.config import RunConfig
from moex.plan.cache import compiled_for
from moex.plan.compiled import CompileError
from moex.plan.target import KINDS, Target
from moex.precision.recipes import resolve
from moex.validate import ConfigError, check, check_on, resolve_fold


class Remedy(NamedTuple):
    """flags: for the command line.  peak_bytes: of the compiled step; None where compiling failed, `error` says why."""

    flags: str
    about: str
    config: RunConfig
    peak_bytes: int | None = None
    error: str = ""


def applicable(config: RunConfig, target: Target) -> list[Remedy]:
    """Changes that this configuration allows, cheapest in time first; none is compiled yet."""
    return [remedy for remedy in _candidates(config) if _allowed(remedy.config, target)]


def measured(
    config: RunConfig, target: Target, *, number: int = 3, tell: Callable[[str], None] = lambda _: None
) -> list[Remedy]:
    """The first `number` of them with the peak that the compiler gives them."""
    found = []
    for remedy in applicable(config, target)[:number]:
        tell(f"remedy {remedy.flags}")
        try:
            step = compiled_for(remedy.config, target, tell=tell)
            found.append(remedy._replace(peak_bytes=step.peak_bytes))
        except CompileError as error:
            found.append(remedy._replace(error=str(error).strip().splitlines()[-1][:300]))
    return found


def _allowed(config: RunConfig, target: Target) -> bool:
    try:
        check(config)
        check_on(config, resolve_fold(config.parallel, target.num_gpus), device_kind=KINDS[target.name])
    except ConfigError:
        return False
    return True


def _candidates(config: RunConfig) -> Iterator[Remedy]:
    parallel, train = config.parallel, config.train
    if not parallel.bounded and parallel.transport == "alltoall":
        factors = dict(cell_factor=1.0, spill_factor=0.35, row_factor=1.25)
        flags = " ".join(f"--parallel.{name} {value}" for name, value in factors.items())
        yield Remedy(
            flags,
            "buffers for what is used, with retries, in place of the worst case",
            replaced(config, parallel=factors),
        )
    yield from _of_memory(config)
    if parallel.zero == 1:
        yield _one(config, "parallel", "zero", 3, "gather weights in each layer in place of once a step")
    yield _one(config, "train", "accumulation", 2 * train.accumulation, "half the rows at a time")
    if train.loss_chunk_tokens > 512:
        yield _one(config, "train", "loss_chunk_tokens", 512, "fewer logits at a time")
    yield _one(config, "parallel", "tp", 2 * parallel.tp, "tokens and heads over twice as many GPUs")
    if parallel.ep > 1:
        yield _one(config, "parallel", "ep", 2 * parallel.ep, "half the experts a GPU")
    if resolve(config.precision).experts is None:
        yield _one(config, "precision", "experts", "fp8_block", "experts' rows kept in one byte a number")


def _of_memory(config: RunConfig) -> Iterator[Remedy]:
    memory = config.memory
    if not memory.recompute and not memory.offload and not memory.stash:
        about = "norms and all that is elementwise are computed again"
        yield _one(config, "memory", "recompute", ("attn_norm", "mlp_norm"), about)
    if memory.optimizer == "device":
        yield _one(config, "memory", "optimizer", "host", "the optimizer's moments are on the host between steps")
    if "layer" not in memory.recompute and not memory.offload and not memory.stash:
        yield _one(config, "memory", "recompute", ("layer",), "keep only the inputs of layers")
    if not memory.offload:
        least = dict(recompute=("layer",), offload=("layer_input",))
        flags = " ".join(f"--memory.{name} {value[0]}" for name, value in least.items())
        about = "inputs of layers go to the host, all else is computed again"
        yield Remedy(flags, about, replaced(config, memory=least))


def _one(config: RunConfig, section: str, field: str, value, about: str) -> Remedy:
    shown = " ".join(value) if isinstance(value, tuple) else str(value)
    return Remedy(f"--{section}.{field} {shown}", about, replaced(config, **{section: {field: value}}))


def replaced(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """The configuration with fields of sections changed: `replaced(config, parallel=dict(tp=2))`."""
    changed = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
    return dataclasses.replace(config, **changed)
