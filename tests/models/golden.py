"""A tiny public checkpoint with the reference library's results, and the same quantities by moex on any folding.

B rows, S tokens, V vocabulary. See `tests/hf/make_goldens.py` for what the files hold.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from mesh import collectives, sharded
from moex.config import OptimizerConfig, ParallelConfig, PrecisionConfig, RunConfig, TrainConfig
from moex.hf.folder import Folder
from moex.hf.load import check_tensors, load
from moex.hf.names import LAYOUTS, ROUTER_BIAS, Piece
from moex.hf.params import nested, targets
from moex.layers.tokens import Tokens
from moex.models.families import family_name, from_public
from moex.train.loss import logits
from moex.train.placing import place_batch
from moex.train.program import Program, build
from moex.train.step import batch_specs, entered, entering, hidden, loss_and_gradients
from moex.validate import check_on, resolve_fold
from moex.validate.model import model_problems
from tests.quick import quick_jit

FOLDER = Path(__file__).parents[1] / "goldens" / "hf"
NAMES = sorted(path.name for path in FOLDER.iterdir() if (path / "config.json").is_file())
FOLDINGS = dict(
    one=ParallelConfig(),
    ring=ParallelConfig(dp=2, cp=2, tp=2, edp=1, ep=4, etp=2, transport="alltoall", context="ring", zero=3),
    gather=ParallelConfig(dp=1, cp=2, tp=4, edp=2, ep=4, transport="allgather"),
    ulysses=ParallelConfig(dp=2, cp=2, tp=1, edp=2, ep=2, transport="alltoall", context="ulysses"),
)
DEVICES = dict(one=1, ring=8, gather=8, ulysses=4)


class Golden(NamedTuple):
    """folder: as read.  config: of a run that trains it without auxiliary losses.  expected: the reference's results."""

    name: str
    folder: Folder
    family: str
    config: RunConfig
    pieces: list[Piece]
    expected: dict[str, np.ndarray]

    @property
    def gradients(self) -> dict[str, np.ndarray]:
        """The reference's, by public name."""
        return {k.removeprefix("grad."): v for k, v in self.expected.items() if k.startswith("grad.")}


class Results(NamedTuple):
    """logits [B, S, V], mean loss, gradients by public name, statistics of the layers."""

    logits: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]
    sums: Any


@functools.cache
def golden(name: str) -> Golden:
    folder = Folder(FOLDER / name)
    model, family = from_public(folder.config), family_name(folder.config)
    router = dataclasses.replace(model.router, aux_coefficient=0.0, sequence_coefficient=0.0, bias_rate=0.0)
    further = any(tensor.startswith(f"model.layers.{model.num_layers}.") for tensor in folder.tensors)
    expected = load_file(FOLDER / name / "expected.safetensors")
    rows, seq_len = expected["input_ids"].shape
    config = RunConfig(
        model=dataclasses.replace(model, router=router, mtp_depth=int(further)),
        train=TrainConfig(batch_size=rows, seq_len=seq_len, loss_chunk_tokens=16),
        optimizer=OptimizerConfig(name="sgd", weight_decay=0, clip_norm=0, warmup_steps=0, schedule="constant"),
        precision=PrecisionConfig(compute_dtype="float32"),
    )
    return Golden(name, folder, family, config, check_tensors(folder, config.model, family), expected)


def program_on(config: RunConfig, folding: str) -> Program:
    config = dataclasses.replace(config, parallel=FOLDINGS[folding])
    assert not model_problems(config)
    fold = resolve_fold(config.parallel, DEVICES[folding])
    check_on(config, fold)
    return build(config, fold, jax.devices()[: DEVICES[folding]])


def loaded(g: Golden, program: Program) -> dict[str, jax.Array]:
    """The checkpoint's parameters by name, as the import places them."""
    return load(g.folder, g.pieces, targets(program.state), lambda *_: None)


def batch_of(g: Golden, program: Program):
    ids = g.expected["input_ids"]
    rows = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    arrays = dict(
        tokens=ids,
        labels=np.roll(ids, -1, axis=1),
        mask=rows < ids.shape[1] - 1,
        segments=np.ones_like(ids),
        positions=rows,
    )
    return place_batch(lambda some: {name: x[None, some] for name, x in arrays.items()}, 0, program.batch)


@functools.cache
def results(name: str, folding: str) -> Results:
    """One program a model and folding: the training step's own loss and gradients, and logits beside them."""
    g = golden(name)
    program = program_on(g.config, folding)
    values, batch = loaded(g, program), batch_of(g, program)
    config, fold, decoder = program.config, program.fold, program.decoder
    gradients, enter = loss_and_gradients(config, decoder, fold), entering(config, decoder, fold)

    def run(shards, bias_LE, batch):
        params, micro = entered(enter, shards, decoder), jax.tree.map(lambda x: x[0], batch._replace(step=None))
        tokens = Tokens(micro.segments, micro.positions, micro.index)
        x_BSD, _ = hidden(config, decoder, fold, params, bias_LE, micro.ids, tokens)
        x_BSD = collectives.all_gather(x_BSD, fold.dense.tp, dim=1)  # a device has a part of the vocabulary
        scores = logits(
            x_BSD.reshape(-1, config.model.d_model), decoder.head(params), fold, vocab_size=config.model.vocab_size
        )
        return *gradients(shards, bias_LE, batch)[:3], scores.reshape(*x_BSD.shape[:2], -1), micro.index

    specs = jax.tree.map(lambda x: x.sharding.spec, program.state.params)
    dp, cp, tp = fold.dense.dp, fold.dense.cp, fold.dense.tp
    out = (specs, P(), P(), P(dp, cp, tp), P(dp, cp))
    function = quick_jit(sharded(run, program.mesh, (specs, P(), batch_specs(fold)), out))
    grads, loss, sums, scores, index = jax.device_get(function(nested(values), values[ROUTER_BIAS], batch))
    return Results(scores[:, np.argsort(index[0])], float(loss), public(g, grads), sums)


def public(g: Golden, tree) -> dict[str, np.ndarray]:
    """A tree like the parameters by public names; of a tensor in several pieces all of them, stacked."""
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="."): x
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    found: dict[str, list] = {}
    for piece in g.pieces:
        if piece.param != ROUTER_BIAS:
            found.setdefault(piece.tensor, []).append(
                LAYOUTS[piece.how].public(np.asarray(flat[piece.param])[piece.at])
            )
    stacked = {piece.tensor for piece in g.pieces if piece.index}
    return {name: np.stack(parts) if name in stacked else parts[0] for name, parts in found.items()}
