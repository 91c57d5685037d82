"""What one GPU holds: by formula from the configuration, and by the compiler's list of the arrays that live at the peak.

B rows of a device in a micro-batch, S its part of a sequence between layers, T = B S tokens, D width, R expert rows.
"""

import collections
import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesh import Fold, abstract_mesh
from moex.config import ModelConfig, OptimizerConfig, ParallelConfig, RunConfig
from moex.layers import param
from moex.models.decoder import Decoder
from moex.pipeline.schedules import one_f_one_b
from moex.plan.collectives import scope_of
from moex.plan.compiled import CompiledStep
from moex.plan.residuals import kept_bytes
from moex.plan.sizes import Sizes, sizes
from moex.train.optim import optimizer
from moex.train.state import abstract_state

_LINE = re.compile(r"^([\s│]*)[├└]── (.*) \([\d.]+%, total: .*?current: ([\d ]+) bytes")


class Part(NamedTuple):
    """One line of a break-down.  about: what it is and how it was computed."""

    name: str
    num_bytes: float
    about: str


class State(NamedTuple):
    """Bytes of a device's part of weights and optimizer; `whole`: numbers of its parameters as compute sees them, split by
    model parallelism only, by part of the model.
    """

    weights: float
    moments: float
    whole: dict[str, float]


@functools.lru_cache(maxsize=4096)
def _state(model: ModelConfig, parallel: ParallelConfig, chosen: OptimizerConfig, fold: Fold) -> State:
    """Of a configuration; recompute and rows at a time don't change it."""
    decoder = Decoder(model, parallel)
    tx = optimizer(chosen, decoder.declarations)
    state = abstract_state(RunConfig(model=model), decoder, tx, fold, abstract_mesh(fold))
    declarations = decoder.declarations
    places = param.placements(declarations, fold)
    local = lambda d, place: math.prod(d.full_shape) / math.prod(fold.size(axes) for axes in place.dims)
    held = lambda tree: float(sum(x.dtype.itemsize * _part(x) for x in jax.tree.leaves(tree)))
    whole = {n: sum(jax.tree.leaves(param.tree_map(local, declarations[n], places[n]))) for n in declarations}
    return State(held(state.params), held(state.optimizer), whole)


def moments_bytes(config: RunConfig, fold: Fold) -> float:
    """Of a device's part of the optimizer's moments, wherever they are."""
    return _state(config.model, config.parallel, config.optimizer, fold).moments


def by_formula(config: RunConfig, fold: Fold) -> list[Part]:
    """The parts that a person would add up. What the compiler needs beyond them is the difference to its peak."""
    model, parallel, train = config.model, config.parallel, config.train
    width = jnp.dtype(config.precision.compute_dtype).itemsize
    state = _state(model, parallel, config.optimizer, fold)
    pp, staged = parallel.pp, parallel.pp > 1 or parallel.overlap
    once, n = parallel.zero == 1, sizes(config, fold)
    of_rank = {name: number if name == "mtp" else number / pp for name, number in state.whole.items()}
    every = sum(of_rank.values())
    layers = {"moe_layers": model.num_moe_layers, "dense_layers": model.num_dense_layers}
    one_layer = max((state.whole.get(name, 0.0) / number for name, number in layers.items() if number), default=0.0)
    gathered = every if once else one_layer + of_rank.get("ends", 0.0)
    gradients = 4.0 * every if once else state.weights
    micro = (width * every if once else gradients) if train.accumulation > 1 and not staged else 0.0
    kept, kept_about = _kept(config, fold, n, width)
    if staged:
        schedule = one_f_one_b(pp, parallel.virtual_pp, train.accumulation, delay=int(parallel.overlap))
        kept *= schedule.num_slots / (pp * parallel.virtual_pp)
        kept_about = f"{kept_about}, of {schedule.num_slots} units of one of {pp * parallel.virtual_pp} stages"
    chunk = min(train.loss_chunk_tokens, n.tokens * fold.size(fold.dense.tp))
    vocab = model.padded_vocab_size // fold.size(fold.dense.tp + fold.dense.pp)
    batch = 21.0 * n.tokens * fold.size(fold.dense.tp) * train.accumulation  # five int32 and a bool a token
    moments = 0.0 if config.memory.optimizer == "host" else state.moments
    parts = [
        Part("master weights", state.weights, "float32, split over all devices that would repeat them"),
        Part("moments", moments, f"{config.optimizer.name}, {config.optimizer.moments}, split like the weights"),
        Part("weights as computed with", width * gathered, "all layers (ZeRO-1)" if once else "a layer, ends (ZeRO-3)"),
        Part("gradients", gradients, "float32, as gathered (ZeRO-1)" if once else "float32, split (ZeRO-3)"),
        Part("gradients of one micro-batch", micro, "before they are added to the others"),
        Part("kept for the backward pass", kept, kept_about),
        Part("on its way to and from the host", _under_way(config, fold), "of two layers"),
        Part("one layer at work: attention", _attention(config, fold, n, width), "norm, queries, keys, values, result"),
        Part("one layer at work: experts", _experts(config, fold, n, width), "rows, gate and up, hidden rows, results"),
        Part("dispatch buffers", 2.0 * n.slots * model.expert_in_width * width, f"{n.slots:,} rows out and as many in"),
        Part("loss", 4.0 * vocab * (3 * chunk + model.d_model), f"logits of {chunk:,} tokens thrice, gradient of the head"),
        Part("batch", batch, "token ids, labels, masks, positions"),
    ]  # fmt: skip
    return [p for p in parts if p.num_bytes]


def _part(x) -> int:
    return math.prod(x.sharding.shard_shape(x.shape))


def _kept(config: RunConfig, fold: Fold, n: Sizes, width: int) -> tuple[float, str]:
    """What all layers keep from forward to backward."""
    model, memory = config.model, config.memory
    staged = config.parallel.pp > 1 or config.parallel.overlap
    if memory.recompute == ("layer",) and not memory.offload:
        return kept_bytes(config, fold), f"the input of each of {model.num_layers + model.mtp_depth} layers"
    if memory.recompute or memory.offload or (config.parallel.zero == 3 and not staged):
        return kept_bytes(config, fold), "inputs, and by name what isn't computed again, of every layer"
    inputs = float(n.tokens * model.d_model * width)
    attention, experts = _attention(config, fold, n, width), _experts(config, fold, n, width)
    dense = n.tokens * 2.0 * model.dense_width / fold.size(fold.dense.tp) * width
    kept = model.num_layers * (attention + 2 * inputs) + model.num_moe_layers * experts + model.num_dense_layers * dense
    return kept, "inputs and all that autodiff keeps of every layer"


def _under_way(config: RunConfig, fold: Fold) -> float:
    """Buffers of one layer's results that leave or come, and of the next one's."""
    return 2 * kept_bytes(config, fold, on_host=True) / (config.model.num_layers + config.model.mtp_depth)


def _attention(config: RunConfig, fold: Fold, n: Sizes, width: int) -> float:
    """Queries, keys, values, result and its statistics of one layer."""
    a, tp = config.model.attention, fold.size(fold.dense.tp)
    tokens = n.tokens * tp  # heads are split over tp, the sequence isn't there
    if a.kind == "gqa":
        numbers = (2 * a.num_heads + 2 * max(a.num_kv_heads // tp * tp, a.num_kv_heads)) * a.head_dim / tp
    else:
        numbers = a.num_heads / tp * (2 * (a.head_dim + a.rope_dim) + 2 * a.value_dim)
    return tokens * (numbers * width + 4.0 * a.num_heads / tp)


def _experts(config: RunConfig, fold: Fold, n: Sizes, width: int) -> float:
    """Rows in, gate and up, hidden rows, rows out of one layer."""
    inner = config.model.expert_width / fold.size(fold.expert.etp)
    return n.rows * (2 * config.model.expert_in_width + 3 * inner) * width


def at_peak(step: CompiledStep) -> list[Part]:
    """The compiler's arrays that are alive when most memory is, added up by what they are for, largest first.

    Raises ValueError when the compiler's list can't be read.
    """
    found: collections.Counter[str] = collections.Counter()
    path: list[tuple[int, str]] = []
    for line in step.live.splitlines():
        if (match := _LINE.match(line)) is None:
            continue
        depth, name = len(match[1]), match[2]
        path = [*(above for above in path if above[0] < depth), (depth, name)]
        found[_purpose([above for _, above in path])] += int(match[3].replace(" ", ""))
    found["moments"] -= step.host_argument_bytes  # which are listed wherever they are
    if not +found:
        raise ValueError("the compiler's list of live arrays is empty: has its format changed?")
    parts = [Part(name, float(size), "alive at the peak") for name, size in (+found).most_common()]
    if (gap := step.peak_bytes - sum(p.num_bytes for p in parts)) > 0:
        parts.append(Part("gaps", gap, "the compiler's peak less the arrays that it lists: buffers packed with holes"))
    return parts


def _purpose(path: list[str]) -> str:
    """What an array is for, from JAX's names of it and of what it stands in."""
    name = path[-1]
    if "params" in path or name.startswith("state.params"):
        return "master weights"
    if name.startswith("state"):
        return "moments" if "optimizer" in name else "other state"
    if name.startswith("batch"):
        return "batch"
    if re.match(r"(wrapped_)?(transpose|copy)", name):
        return "copies in another layout"
    if not name.startswith("jit("):
        return "carried by loops (gradients, sums)"
    scope = scope_of(name)
    if re.search(r"dynamic_update_slice|dynamic_update_index_in_dim", name) and "/while/" in name:
        return "gradients of stacked layers" if "transpose(" in name else "kept for the backward pass"
    if scope == "parameters":
        return "weights gathered, gradients on their way"
    return "gradients and other work of the step" if scope == "step" else scope
