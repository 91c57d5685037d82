"""Looking at a run's checkpoints: which there are, what is in one, and whether it still is what was saved."""

import dataclasses
import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mesh import abstract_mesh, fold
from moex import cli
from moex.checkpoint import about, open_step, reading
from moex.checkpoint.checksum import checksums, name_of
from moex.config import ParallelConfig, RunConfig
from moex.data import ramp_of
from moex.train.program import build
from moex.train.state import counted


class Listed(NamedTuple):
    """A checkpoint: steps done, when it was finished (UTC), bytes on disk, and the facts saved beside it."""

    step: int
    saved: str
    num_bytes: int
    facts: dict[str, Any]


def listed(run: Path) -> list[Listed]:
    """The finished checkpoints of a run, oldest first.  Raises ValueError when there is none."""
    with reading(run) as checkpointer:
        return [_listed(run, c.step, about(checkpointer, c.step)) for c in checkpointer.checkpoints]


def _listed(run: Path, step: int, metadata: Any) -> Listed:
    nanoseconds = metadata.commit_timestamp_nsecs or metadata.init_timestamp_nsecs or 0
    saved = dt.datetime.fromtimestamp(nanoseconds / 1e9, dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
    files = (run / "checkpoints" / str(step)).rglob("*")
    known = metadata.custom_metadata if isinstance(metadata.custom_metadata, dict) else {}
    facts = {name: value for name, value in known.items() if name != "checksums"}
    return Listed(step, saved, sum(f.stat().st_size for f in files if f.is_file()), facts)


class Entry(NamedTuple):
    """An array of a checkpoint, whole."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


def entries(run: Path, step: int | None = None) -> list[Entry]:
    """The arrays of a checkpoint (None: the newest); none is read.  Raises ValueError without it."""
    with reading(run) as checkpointer:
        leaves = jax.tree.leaves_with_path(about(checkpointer, step).metadata)
    size = lambda leaf: int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize
    return [Entry(name_of(path), tuple(x.shape), str(np.dtype(x.dtype)), size(x)) for path, x in leaves]


def verify(run: Path, step: int | None = None) -> Iterator[str]:
    """Reads a whole checkpoint (None: the newest) and yields a sentence for everything that is wrong with it.

    Compared are: every array's checksum with that of the values saved; names, shapes and dtypes with those of the state
    that the run's configuration makes; the step inside with the folder's name; the samples seen with the batch sizes; and
    that all parameters are finite.  Raises ValueError when there is no such checkpoint or no config.json.
    """
    config_path = run / "config.json"
    if not config_path.is_file():
        raise ValueError(f"{run} is no run folder: it has no config.json")
    with reading(run) as checkpointer:
        metadata = about(checkpointer, step)
        step = max(c.step for c in checkpointer.checkpoints) if step is None else step
    try:
        tree = open_step(run, step)
    except ValueError as error:
        yield str(error)
        return
    yield from _against_checksums(tree, (metadata.custom_metadata or {}).get("checksums"))
    yield from _against_config(tree, cli.load(config_path), step)
    for path, values in jax.tree.leaves_with_path(tree["params"]):
        if not np.isfinite(values).all():
            yield f"params.{name_of(path)} has {int((~np.isfinite(values)).sum())} values that are not finite"


def _against_checksums(tree: dict[str, Any], saved: dict[str, int] | None) -> Iterator[str]:
    if saved is None:
        yield "no checksums were saved with it, so a changed value cannot be seen"
        return
    found = checksums(tree)
    for name in sorted(found.keys() ^ saved.keys()):
        yield f"{name} {'is missing' if name in saved else 'was not saved with the others'}"
    for name in sorted(found.keys() & saved.keys()):
        if found[name] != saved[name]:
            yield f"{name} is not what was saved: its checksum is {found[name]:08x}, was {saved[name]:08x}"


def _against_config(tree: dict[str, Any], config: RunConfig, step: int) -> Iterator[str]:
    one = fold({}, {})
    program = build(dataclasses.replace(config, parallel=ParallelConfig()), one, mesh=abstract_mesh(one))
    shape = lambda x: (tuple(x.shape), str(np.dtype(x.dtype)))
    weights_alone = "step" not in tree  # what a run begins from: the rest of its state doesn't exist yet
    state: Any = dict(params=program.state.params, router_bias=program.state.router_bias)
    wanted = {
        name_of(path): shape(x) for path, x in jax.tree.leaves_with_path(state if weights_alone else program.state)
    }
    found = {name_of(path): shape(x) for path, x in jax.tree.leaves_with_path(tree)}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            yield f"{name} is {found.get(name, 'absent')}, config.json makes it {wanted.get(name, 'absent')}"
    if weights_alone:
        return
    if int(tree["step"]) != step:
        yield f"its step is {int(tree['step'])}, its folder says {step}"
    samples, expected = counted(tree["samples"]), ramp_of(config.train).samples_before(step)
    if samples != expected:
        yield f"it has seen {samples} samples; by the batch sizes of config.json it would be {expected}"
