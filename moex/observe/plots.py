"""The report's curves: losses, learning rate, gradient norm, throughput, expert load by layer.

Each function takes a Run and returns an <svg> element, or None when the run has no data for it. N steps, L MoE layers.
"""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from moex.observe.health import MAX_LOAD, end_loads
from moex.observe.load import max_over_mean
from moex.observe.run import Run
from moex.observe.series import bin_steps
from moex.observe.svg import INK, inline, legend, log_axis, new_figure, title

WIDE, HALF = (11.2, 3.7), (5.5, 2.9)  # inches; the page shows them at about their size
MAX_POINTS = 400  # points of a curve; more would not be seen and only make the file larger
_NAMED_LAYERS = 3  # layers of the load plot that get a colour and a name, the most loaded first


def _curve(ax: Axes, run: Run, values: np.ndarray, colour: str, label: str | None = None) -> None:
    """The mean over each bin of steps, with the range within the bin as a band when a bin holds several steps."""
    binned = bin_steps(run.steps, values, MAX_POINTS)
    few = np.isfinite(binned.mean).sum() < 40
    marker: dict[str, Any] = {"marker": "o", "markersize": 3} if few else {}
    if binned.width > 1:
        ax.fill_between(binned.steps, binned.low, binned.high, color=INK[colour], alpha=0.2, linewidth=0)
    ax.plot(binned.steps, binned.mean, color=INK[colour], label=label, **marker)
    ax.set_xlabel("step")


def _has(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).any())


def _mark_resumes(ax: Axes, run: Run) -> None:
    steps = {event.get("step") for event in run.events_of("resume") if isinstance(event.get("step"), int)}
    for index, step in enumerate(sorted(steps)):
        label = "resumed" if index == 0 else None
        ax.axvline(step, color=INK["muted"], linewidth=1, linestyle=(0, (1, 2)), label=label)


def loss(run: Run) -> str | None:
    """Training loss with the held-out points, the unigram entropy, resumes, and the non-finite steps along the axis."""
    if not _has(run["loss"]) and not _has(run["eval_loss"]):
        return None
    figure, (ax,) = new_figure(*WIDE)
    _curve(ax, run, run["loss"], "blue", "training")
    seen = np.isfinite(run["eval_loss"])
    if seen.any():
        style = {"marker": "D", "markersize": 4.5, "linewidth": 0.8, "color": INK["orange"]}
        ax.plot(run.steps[seen], run["eval_loss"][seen], label="held-out", **style)
    if run.unigram_entropy is not None:
        label = f"unigram entropy {run.unigram_entropy:.2f}"
        ax.axhline(run.unigram_entropy, color=INK["green"], linestyle="--", linewidth=1.4, label=label)
    _mark_resumes(ax, run)
    broken = run.steps[run.non_finite_steps]
    if len(broken):
        style = {"marker": "x", "linestyle": "none", "color": INK["red"], "clip_on": False}
        ax.plot(broken, np.zeros(len(broken)), transform=ax.get_xaxis_transform(), label="non-finite", **style)
    ax.set_ylabel("loss (nats a token)")
    legend(ax, ncols=2)
    return inline(figure, "loss", "Loss by step")


def loss_parts(run: Run) -> str | None:
    """Language-model, auxiliary and router z-loss side by side, each on its own scale."""
    parts = (
        ("lm_loss", "language model", "blue"),
        ("aux_loss", "load balance", "orange"),
        ("z_loss", "router z", "purple"),
    )
    if not any(_has(run[field]) for field, _, _ in parts):
        return None
    figure, axes = new_figure(WIDE[0], 2.9, columns=3)
    for ax, (field, name, colour) in zip(axes, parts, strict=True):
        if _has(run[field]):
            _curve(ax, run, run[field], colour)
        else:
            ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", color=INK["muted"])
        title(ax, name)
    axes[0].set_ylabel("loss (nats a token)")
    axes[1].set_ylabel("loss")
    axes[2].set_ylabel("loss")
    return inline(figure, "parts", "Language-model, load-balance and router z-losses by step")


def learning_rate(run: Run) -> str | None:
    """From zero up."""
    return _single(run, "lr", run["lr"], "green", "learning rate", "Learning rate by step", zero=True)


def grad_norm(run: Run) -> str | None:
    """On a logarithmic scale; zero has no place there and is left out."""
    values = np.where(run["grad_norm"] > 0, run["grad_norm"], np.nan)
    return _single(run, "grad", values, "purple", "gradient norm", "Gradient norm by step", log=True)


def tokens_per_s(run: Run) -> str | None:
    """Throughput of all devices together, from zero up."""
    return _single(run, "speed", run["tokens_per_s"], "blue", "tokens a second", "Tokens a second by step", zero=True)


def _single(
    run: Run, name: str, values: np.ndarray, colour: str, label: str, description: str, *, log=False, zero=False
) -> str | None:
    if not _has(values):
        return None
    figure, (ax,) = new_figure(*HALF)
    _curve(ax, run, values, colour)
    if log:
        log_axis(ax)
    if zero:
        ax.set_ylim(bottom=min(0.0, float(np.nanmin(values))))
    ax.set_ylabel(label)
    return inline(figure, name, description)


def layer_load(run: Run) -> str | None:
    """Max/mean load of every MoE layer by step; the layers most loaded at the end by name, the others in grey."""
    ratios = max_over_mean(run.counts)
    if not _has(ratios):
        return None
    figure, (ax,) = new_figure(*HALF)
    binned = bin_steps(run.steps, ratios, MAX_POINTS // 2)
    worst_first = np.argsort(-np.nan_to_num(end_loads(run)), kind="stable")
    named = worst_first[:_NAMED_LAYERS]
    marker: dict[str, Any] = {"marker": "o", "markersize": 3} if len(binned.steps) < 40 else {}
    for layer in worst_first[_NAMED_LAYERS:]:
        ax.plot(binned.steps, binned.mean[:, layer], color=INK["muted"], linewidth=0.7, alpha=0.45)
    for layer, colour in reversed(list(zip(named, ("orange", "blue", "green"), strict=False))):
        ax.plot(binned.steps, binned.mean[:, layer], color=INK[colour], label=f"layer {layer}", **marker)
    if len(worst_first) > _NAMED_LAYERS:
        ax.plot([], [], color=INK["muted"], linewidth=1, label="others")
    ax.axhline(1, color=INK["green"], linestyle="--", linewidth=1.2)
    if np.nanmax(binned.mean) > MAX_LOAD:
        ax.axhline(MAX_LOAD, color=INK["red"], linestyle=(0, (1, 2)), linewidth=1.2)
    ax.set_xlabel("step")
    ax.set_ylabel("busiest expert / mean")
    handles, labels = ax.get_legend_handles_labels()
    front = len(named)
    legend(ax, handles=handles[:front][::-1] + handles[front:], labels=labels[:front][::-1] + labels[front:], ncols=2)
    return inline(figure, "load", "Busiest expert over the mean by layer and step")
