"""Looks for a faster layout of a run on given GPUs: formulas prune, the compiler decides among the best few.

The batch, the sequence and the model stay; what changes is tp, cp, ep, etp, ZeRO, recompute, rows at a time, and the recipe
of products where several may be chosen.
"""

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from moex.config import RunConfig
from moex.config.compute import Recipe
from moex.models.flops import train_flops_per_token
from moex.plan.collectives import Groups, traffic
from moex.plan.compiled import CompileError
from moex.plan.memory import Part, by_formula, sizes
from moex.plan.plan import Plan, make_plan
from moex.plan.rates import DEFAULT, Shares
from moex.plan.remedies import replaced
from moex.plan.target import KINDS, Target
from moex.validate import ConfigError, check, check_on, resolve_fold

_MARGIN, _SELECTIVE_MARGIN = 1.15, 1.35
"""The compiler needs up to so many times the formula's memory; the second where only some modules are computed again."""
_RECOMPUTES = ((), ("experts",), ("attention", "moe"), ("layer",))


class Candidate(NamedTuple):
    """seconds, num_bytes: of a step and of a GPU's memory, by formula."""

    config: RunConfig
    seconds: float
    num_bytes: float

    @property
    def family(self) -> str:
        p, recipe = self.config.parallel, self.config.precision.recipe
        quantised = "" if recipe == "compute" else f", {recipe}"
        return f"tp {p.tp}, cp {p.cp}, ep {p.ep}, etp {p.etp}, ZeRO-{p.zero}{quantised}"


class Found(NamedTuple):
    """plans: the compiled ones, fastest that fits first.  rejected: (family, reason), one a family.  tried: candidates."""

    plans: list[Plan]
    rejected: list[tuple[str, str]]
    tried: int


def search(
    config: RunConfig, target: Target, *, number: int = 3, recipes: Sequence[Recipe] = (), shares: Shares = DEFAULT,
    tell: Callable[[str], None] = lambda _: None,
) -> Found:  # fmt: skip
    """Compiles the `number` best candidates by formula, and the configuration as it stands.

    recipes: of products that may be chosen; the configuration's own where none is named.

    Raises ConfigError when nothing divides over the GPUs.
    """
    known, rejected = candidates(config, target, shares, recipes)
    if not known and not rejected:
        raise ConfigError(f"no layout of {config.name} divides over {target.num_gpus} GPUs")
    chosen = _various(sorted(known, key=lambda c: c.seconds), number)
    plans = []
    for one in [config, *(c.config for c in chosen)]:
        try:
            plans.append(make_plan(one, target, shares=shares, tell=tell))
        except (CompileError, ConfigError) as error:
            rejected[_family(one)] = str(error).strip().splitlines()[-1][:200]
    for family in {c.family for c in known} - {c.family for c in chosen}:
        best = min((c for c in known if c.family == family), key=lambda c: c.seconds)
        rejected.setdefault(family, f"{best.seconds:.1f} s by formula, more than the best {number}")
    plans.sort(key=lambda p: (not p.fits, p.estimate.step_s))
    return Found(plans, sorted(rejected.items()), len(known))


def _family(config: RunConfig) -> str:
    return Candidate(config, 0.0, 0.0).family


def _various(best: Sequence[Candidate], number: int) -> list[Candidate]:
    """The best of each family first: a second of one family differs least."""
    firsts = list({c.family: c for c in reversed(best)}.values())
    return sorted(firsts, key=lambda c: c.seconds)[:number]


def candidates(
    config: RunConfig, target: Target, shares: Shares = DEFAULT, recipes: Sequence[Recipe] = ()
) -> tuple[list[Candidate], dict[str, str]]:
    """Layouts that fit by formula, and for each family that has none the reason."""
    known: list[Candidate] = []
    reasons: dict[str, collections.Counter[str]] = {}
    recipes = recipes or (config.precision.recipe,)
    for one, recipe in itertools.product(_layouts(config, target), recipes):
        one = replaced(one, precision=dict(recipe=recipe))
        family = _family(one)
        try:
            check(one)
            fold = resolve_fold(one.parallel, target.num_gpus)
            check_on(one, fold, device_kind=KINDS[target.name])
            _check_kernels(one)
        except ConfigError as error:
            reasons.setdefault(family, collections.Counter())[str(error).splitlines()[0][:160]] += 1
            continue
        parts = by_formula(one, fold)
        whole = set(one.memory.recompute) in (set(), {"layer"})
        needed = (_MARGIN if whole else _SELECTIVE_MARGIN) * sum(p.num_bytes for p in parts)
        if needed > target.usable_bytes:
            text = f"needs {needed / 1e9:.0f} GB by formula, {target.usable_bytes / 1e9:.0f} are usable"
            reasons.setdefault(family, collections.Counter())[text] += 1
            continue
        known.append(Candidate(one, seconds_by_formula(one, target, parts, shares), needed))
    having = {c.family for c in known}
    return known, {family: why.most_common(1)[0][0] for family, why in reasons.items() if family not in having}


def _check_kernels(config: RunConfig) -> None:
    """Raises ConfigError where cutting experts loses the grouped kernels, which take multiples of 128."""
    width, part = config.model.expert_width, config.model.expert_width // config.parallel.etp
    if width % 128 == 0 and part % 128:
        raise ConfigError(f"experts of width {part} have no grouped kernel, which takes multiples of 128")


def _layouts(config: RunConfig, target: Target) -> Iterator[RunConfig]:
    powers = [2**i for i in range(target.num_gpus.bit_length()) if 2**i <= target.num_gpus]
    experts, rows = config.model.router.num_experts, config.train.batch_size
    small = [n for n in powers if n <= target.domain]
    for tp, cp, ep, etp in itertools.product(small, _contexts(config, small), powers, small):
        if tp * cp > target.num_gpus or ep * etp > target.num_gpus or experts % ep:
            continue
        dp = target.num_gpus // (tp * cp)
        sizes_ = dict(tp=tp, cp=cp, ep=ep, etp=etp, dp=0, edp=0, context="ring" if cp > 1 else "gather")
        for zero, recompute, here in itertools.product((1, 3), _RECOMPUTES, (1, 2, 4)):
            if rows % (dp * here) == 0:
                changes: dict[str, dict[str, Any]] = dict(
                    parallel=sizes_ | _buffers(config, ep) | dict(zero=zero),
                    train=dict(accumulation=rows // (dp * here)),
                    memory=dict(recompute=recompute),
                )
                yield replaced(config, **changes)


def _contexts(config: RunConfig, small: Sequence[int]) -> list[int]:
    """Context parallelism pays from about 8K tokens, a rank for each 4K (arXiv 2603.07685)."""
    return [n for n in small if n == 1 or config.train.seq_len >= 8192 * n // 2]


def _buffers(config: RunConfig, ep: int) -> dict:
    names = ("transport", "cell_factor", "spill_factor", "row_factor")
    if ep == 1:
        return dict(transport="local", cell_factor=0.0, spill_factor=0.0, row_factor=0.0)
    if config.parallel.ep == 1:
        return dict(transport="alltoall", cell_factor=1.0, spill_factor=0.35, row_factor=1.25)
    return {name: getattr(config.parallel, name) for name in names}


def seconds_by_formula(config: RunConfig, target: Target, parts: Sequence[Part], shares: Shares = DEFAULT) -> float:
    """A step's seconds by products, dispatch, tensor-parallel and ZeRO traffic, nothing hidden: good for an order.

    parts: of `by_formula`.
    """
    gpu, model, train, p = target.accelerator, config.model, config.train, config.parallel
    fold = resolve_fold(p, target.num_gpus)
    n = sizes(config, fold)
    modules = set(config.memory.recompute)
    passes = 4 if "layer" in modules else 3 + 0.5 * bool(modules)
    tokens = train.batch_size * train.seq_len / target.num_gpus
    all_flops, linear = train_flops_per_token(model, train.seq_len), quantised_flops(config)
    fast = gpu.fp8_flops or gpu.bf16_flops
    units = (all_flops - linear) / gpu.bf16_flops + linear / fast
    products = units * tokens * passes / 3 / shares.matmul
    micros, layers = train.accumulation, model.num_layers
    sends = 5 if modules & {"layer", "moe"} else 4
    dispatch = sends * _link_s("all-to-all", n.slots * model.d_model * 2, p.ep, p.etp, target, shares)
    gathered = 2.0 * n.tokens * p.tp * model.d_model
    tensor = 4 * passes / 3 * _link_s("all-gather", gathered, p.tp, 1, target, shares)
    rows = 2.0 * n.tokens * p.etp * model.d_model
    inner = 4 * passes / 3 * _link_s("all-gather", rows, p.etp, 1, target, shares)
    held = next(part.num_bytes for part in parts if part.name == "master weights")
    weights = held * target.num_gpus / 2 / _model_parallel(config, target)
    zero = _link_s(
        "all-gather", weights, target.num_gpus // max(p.tp, p.ep * p.etp), max(p.tp, p.ep * p.etp), target, shares
    )
    repeats = 4 * micros if p.zero == 3 else 3
    return products + micros * layers * (dispatch + tensor + inner) + repeats * zero


def quantised_flops(config: RunConfig) -> float:
    """FLOPs of training one token that are in a recipe's products: all but attention's own, the head and the router."""
    if config.precision.recipe == "compute":
        return 0.0
    model = config.model
    return train_flops_per_token(model, 0) - 6.0 * model.vocab_size * model.d_model * (1 + model.mtp_depth)


def _model_parallel(config: RunConfig, target: Target) -> float:
    """How many times smaller than the model the weights of a GPU are, once gathered."""
    p, model = config.parallel, config.model
    experts = 3 * model.d_model * model.expert_width * model.router.num_experts * model.num_moe_layers
    rest = 4 * model.d_model**2 * model.num_layers + 2 * model.d_model * model.vocab_size
    return (experts + rest) / (experts / (p.ep * p.etp) + rest / p.tp)


def _link_s(kind: str, num_bytes: float, size: int, inside_of: int, target: Target, shares: Shares) -> float:
    """Seconds of a collective over `size` ranks that stand `inside_of` devices apart."""
    if size <= 1:
        return 0.0
    inside = max(1, min(size, target.domain // inside_of))
    nvlink, network = traffic(kind, int(num_bytes), Groups(size, -(-size // inside), inside, ()))
    gpu = target.accelerator
    return max(nvlink / (gpu.nvlink_bytes_per_s * shares.nvlink), network / (gpu.network_bytes_per_s * shares.network))
