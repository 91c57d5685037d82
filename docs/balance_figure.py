"""Draws docs/balance.svg: the load of every balancer on a skewed stream.  After a change: python docs/balance_figure.py.

A token is the unit vector of its cluster plus noise; the r-th cluster is met with probability ~ 1 / r. The router's
initial weight sends each cluster to experts of its own. The same stream meets each balancer, and moex's own functions
route and balance. The weight moves only by a loss; a squared pull of the logits towards the initial ones stands for what
the model wants from its router.

N steps, T tokens a step, A micro-batches, B rows, D width, C clusters, E experts, k experts a token.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))

from moex import balance
from moex.config import RouterConfig
from moex.layers.router import route
from moex.observe.load import max_over_mean
from moex.observe.svg import INK, inline, legend, log_axis, new_figure, plot_style, standalone, title

LIMIT = 1.3
"""Busiest expert over the mean: below it the load counts as even."""
WINDOW = 20
"""Steps that the load is averaged over before it is compared with the limit."""
LAST = 50
"""Steps at the end whose mean is reported."""
FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """Tokens and router before balancing."""

    num_clusters: int = 64
    zipf: float = 1.0
    """The r-th cluster is met with probability ~ r^-zipf."""
    d_model: int = 64
    noise: float = 0.5
    """Length of what is added to a cluster's unit vector."""
    popularity: float = 0.5
    """Standard deviation over experts of what all clusters agree on; what a cluster thinks by itself has 1."""
    num_tokens: int = 4096
    num_rows: int = 16
    num_micros: int = 4
    pull: float = 1e-3
    """Weight of half the mean squared distance of logits from the initial ones."""
    lr: float = 3e-3
    """Of Adam with betas 0.9 and 0.95."""
    steps: int = 300
    seed: int = 0


def balancers(**changes: Any) -> dict[str, RouterConfig]:
    """Each rule with the setting that the figure shows, by name."""
    make = lambda **rule: RouterConfig(**dict(num_experts=64, top_k=4, aux_coefficient=0.0) | rule | changes)
    return {
        "none": make(),
        "Sinkhorn selection": make(selection="sinkhorn"),
        "balance loss x 0.01": make(aux_coefficient=0.01),
        "sequence loss x 0.01": make(sequence_coefficient=0.01),
        "global-batch loss x 0.01": make(global_coefficient=0.01),
        "bias, rate 0.001": make(score_function="sigmoid", bias_rate=1e-3),
        "bias, rate 0.001, centred": make(score_function="sigmoid", bias_rate=1e-3, bias_centred=True),
        "quantiles, decay 0.9": make(selection="quantile"),
    }


class State(NamedTuple):
    """What one balancer carries over: the router's weight, Adam's moments, the bias."""

    weight_DE: jax.Array
    moments: Any
    bias_E: jax.Array


def world(stream: Stream, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors of the clusters [C, D], orthogonal, and the router's initial weight [D, E]."""
    rng = np.random.default_rng(stream.seed)
    centres_CD = np.linalg.qr(rng.standard_normal((stream.d_model, stream.num_clusters)))[0].T
    own_CE = rng.standard_normal((stream.num_clusters, num_experts))
    wish_CE = own_CE + stream.popularity * rng.standard_normal((1, num_experts))
    return centres_CD.astype(np.float32), (centres_CD.T @ wish_CE).astype(np.float32)


def tokens(stream: Stream, centres_CD: np.ndarray, step: int) -> np.ndarray:
    """The tokens of a step, float32 [T, D]."""
    rng = np.random.default_rng((stream.seed, step))
    odds_C = np.arange(1, stream.num_clusters + 1) ** -stream.zipf
    cluster_T = rng.choice(stream.num_clusters, stream.num_tokens, p=odds_C / odds_C.sum())
    noise_TD = rng.standard_normal((stream.num_tokens, stream.d_model), dtype=np.float32)
    return centres_CD[cluster_T] + np.float32(stream.noise / stream.d_model**0.5) * noise_TD


def loss(weight_DE, initial_DE, x_TD, router: RouterConfig, stream: Stream):
    """The pull towards the initial logits and the router's balance losses, each a mean over micro-batches."""
    logits_TE, wanted_TE = x_TD @ weight_DE, x_TD @ initial_DE
    total = stream.pull / 2 * jnp.square(logits_TE - wanted_TE).mean()
    seen_E = jnp.zeros((router.num_experts,), jnp.int32)
    segments_AT = jnp.repeat(jnp.arange(1, stream.num_rows + 1), stream.num_tokens // stream.num_rows)
    segments_AT = segments_AT.reshape(stream.num_micros, -1)
    for micro_TE, segments_T in zip(jnp.split(logits_TE, stream.num_micros), segments_AT, strict=True):
        plain_E = balance.plain_counts(micro_TE, None, router)
        seen_E += plain_E
        terms = [
            (router.aux_coefficient, lambda m, own, _, __: balance.balance_loss(m, None, router, counts_E=own)),
            (router.global_coefficient, lambda m, _, seen, __: balance.balance_loss(m, None, router, counts_E=seen)),
            (
                router.sequence_coefficient,
                lambda m, _, __, s: balance.sequence_balance_loss(m, s, router, num_segments=stream.num_rows),
            ),
        ]
        for coefficient, term in terms:
            if coefficient:
                total += coefficient / stream.num_micros * term(micro_TE, plain_E, seen_E, segments_T)
    return total


def make_step(router: RouterConfig, stream: Stream, initial_DE):
    """A balancer's first `State`, and (state, x_TD) -> (state, counts_E): what moex's step does with a router."""
    tx = optax.adam(stream.lr, b1=0.9, b2=0.95)
    learns = router.aux_coefficient or router.sequence_coefficient or router.global_coefficient

    def step(state: State, x_TD):
        weight_DE, moments, bias_E = state
        logits_TE = x_TD @ weight_DE
        counts_E = route(logits_TE, bias_E, router, training=True).counts_E
        if learns:
            grads = jax.grad(loss)(weight_DE, initial_DE, x_TD, router, stream)
            updates, moments = tx.update(grads, moments)
            weight_DE += updates
        if router.selection == "quantile":
            logits_BSE = logits_TE.reshape(stream.num_rows, -1, router.num_experts)
            real_BS = jnp.ones(logits_BSE.shape[:2], bool)
            offsets_E = balance.quantile_offsets(logits_BSE, bias_E, real_BS, router)
            bias_E = balance.update_quantile_bias(bias_E, offsets_E, router.quantile_decay)
        elif router.bias_rate:
            bias_E = balance.update_bias(bias_E, counts_E, router.bias_rate)
            bias_E = balance.centred(bias_E) if router.bias_centred else bias_E
        return State(weight_DE, moments, bias_E), counts_E

    return State(initial_DE, tx.init(initial_DE), jnp.zeros((router.num_experts,))), jax.jit(step)


def simulate(routers: Mapping[str, RouterConfig], stream: Stream) -> dict[str, np.ndarray]:
    """Tokens that chose each expert at each step, int [N, E], by balancer."""
    (num_experts,) = {router.num_experts for router in routers.values()}
    centres_CD, initial_DE = world(stream, num_experts)
    runs = {name: make_step(router, stream, jnp.asarray(initial_DE)) for name, router in routers.items()}
    states = {name: first for name, (first, _) in runs.items()}
    counts: dict[str, list] = {name: [] for name in routers}
    for number in range(stream.steps):
        x_TD = jnp.asarray(tokens(stream, centres_CD, number))
        for name, (_, step) in runs.items():
            states[name], counts_E = step(states[name], x_TD)
            counts[name].append(np.asarray(counts_E))
    return {name: np.stack(rows) for name, rows in counts.items()}


def smooth(load_N: np.ndarray) -> np.ndarray:
    """Mean over `WINDOW` steps, the present one the last; over those that there are at the start."""
    sums = np.concatenate([[0.0], np.cumsum(load_N)])
    end = np.arange(1, len(load_N) + 1)
    start = np.maximum(end - WINDOW, 0)
    return (sums[end] - sums[start]) / (end - start)


class Verdict(NamedTuple):
    """first: load of the first step.  since: the step, from 1, from which on the smoothed load stays under `LIMIT`; None if
    it doesn't.  worst: its maximum from there.  last, peak: mean and maximum of the last `LAST` steps, each by itself.
    """

    first: float
    since: int | None
    worst: float | None
    last: float
    peak: float


def judge(load_N: np.ndarray) -> Verdict:
    """When a load becomes even for good, and how even it is in the end."""
    smoothed_N = smooth(load_N)
    above = np.nonzero(smoothed_N >= LIMIT)[0]
    start = int(above[-1]) + 1 if len(above) else 0
    stays = start < len(load_N)
    return Verdict(
        first=float(load_N[0]),
        since=start + 1 if stays else None,
        worst=float(smoothed_N[start:].max()) if stays else None,
        last=float(load_N[-LAST:].mean()),
        peak=float(load_N[-LAST:].max()),
    )


def by_chance(stream: Stream, num_experts: int, top_k: int, draws: int = 200) -> float:
    """Mean load of tokens that choose `top_k` different experts evenly at random: what no balancer can beat for long."""
    rng = np.random.default_rng(stream.seed)
    random = lambda: rng.random((stream.num_tokens, num_experts), dtype=np.float32)
    picks = (np.argpartition(random(), top_k, axis=1)[:, :top_k] for _ in range(draws))
    return float(np.mean([np.bincount(pick.ravel(), minlength=num_experts).max() for pick in picks])) / (
        stream.num_tokens * top_k / num_experts
    )


def table(verdicts: Mapping[str, Verdict]) -> list[str]:
    """Lines of a Markdown table."""
    head = [
        "balancer",
        "first step",
        f"under {LIMIT} since step",
        "worst mean since",
        f"last {LAST}: mean",
        "worst step",
    ]
    rows = [head, ["---"] * len(head)]
    for name, v in verdicts.items():
        since, worst = ("never", "") if v.worst is None else (str(v.since), f"{v.worst:.3f}")
        rows.append([name, f"{v.first:.2f}", since, worst, f"{v.last:.2f}", f"{v.peak:.2f}"])
    return [f"| {' | '.join(row)} |" for row in rows]


def settings(stream: Stream, routers: Mapping[str, RouterConfig]) -> str:
    """All numbers that the figure depends on, as one line."""
    plain = RouterConfig()
    changed = lambda r: {k: v for k, v in dataclasses.asdict(r).items() if v != getattr(plain, k)}
    parts = [f"{k}={v}" for k, v in dataclasses.asdict(stream).items()]
    return "; ".join([" ".join(parts), *(f"{name}: {changed(router)}" for name, router in routers.items())])


STYLES = {
    "none": ("muted", "-", 1.6),
    "Sinkhorn selection": ("purple", "-", 1.6),
    "balance loss x 0.01": ("blue", "-", 1.6),
    "sequence loss x 0.01": ("blue", (0, (5, 2)), 1.6),
    "global-batch loss x 0.01": ("blue", (0, (1, 1.5)), 2.2),
    "bias, rate 0.001": ("orange", "-", 2.4),
    "quantiles, decay 0.9": ("green", "-", 1.6),
}
"""Colour, dashes and width; a centred bias chooses the same and shares the line of the other."""


def draw(counts: Mapping[str, np.ndarray], chance: float):
    """The figure: load by step, and load by expert at the end."""
    figure, (left, right) = new_figure(11.2, 4.1, columns=2, width_ratios=(1.7, 1))
    for name, (colour, dashes, width) in STYLES.items():
        style = dict(color=INK[colour], linestyle=dashes, linewidth=width, label=name.replace(" x ", " × "))
        steps_N = np.arange(1, len(counts[name]) + 1)
        left.plot(steps_N, smooth(max_over_mean(counts[name])), **style)
        final_E = np.sort(counts[name][-LAST:].mean(axis=0))[::-1]
        right.plot(np.arange(1, len(final_E) + 1), final_E / final_E.mean(), **style)
    left.axhline(LIMIT, color=INK["red"], linestyle=(0, (4, 3)), linewidth=1.2)
    left.axhline(chance, color=INK["text"], linestyle=(0, (1, 3)), linewidth=1.2, label="even, by chance")
    left.text(1.005, LIMIT, f"{LIMIT}", transform=left.get_yaxis_transform(), color=INK["red"], va="center", size=9)
    log_axis(left)
    left.set_yticks([1, 1.5, 2, 3, 4, 5, 7])
    left.set_ylim(1, 7.5)
    left.set_xticks(range(0, len(counts["none"]) + 1, 50))
    right.set_ylim(0, None)
    right.set_xticks([1, 16, 32, 48, 64])
    title(left, f"Busiest expert over the mean, {WINDOW}-step mean")
    title(right, f"Load of each expert over the mean, last {LAST} steps")
    left.set_xlabel("step")
    right.set_xlabel("expert, busiest first")
    handles, labels = left.get_legend_handles_labels()
    legend(right, handles=handles, labels=labels, loc="center left", bbox_to_anchor=(1.03, 0.5), handlelength=2.6)
    return figure


def svg(counts: Mapping[str, np.ndarray], chance: float, description: str) -> str:
    """The figure as a file; the description is for those who can't see it."""
    with plot_style("balance"):
        drawn = inline(draw(counts, chance), "balance", "Load of the experts by step for each balancer")
    return standalone(drawn, description)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draws docs/balance.svg and prints its numbers.")
    parser.add_argument("--steps", type=int, default=Stream().steps)
    parser.add_argument("--to", type=Path, default=FOLDER / "balance.svg")
    options = parser.parse_args(arguments)
    stream, routers = Stream(steps=options.steps), balancers()
    counts = simulate(routers, stream)
    chance = by_chance(stream, 64, 4)
    lines = table({name: judge(max_over_mean(counts_NE)) for name, counts_NE in counts.items()})
    print("\n".join([*lines, "", f"even, by chance: {chance:.2f}"]))
    options.to.write_text(svg(counts, chance, "\n".join([settings(stream, routers), *lines])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
