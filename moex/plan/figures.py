"""The plan's three pictures, from its JSON values: memory bars, one layer's timeline, bytes by link."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from mesh.topology import ACCELERATORS
from moex.observe.svg import INK, inline, legend, new_figure, title
from moex.plan.target import KINDS

Values = Mapping[str, Any]
_COLOURS = ("blue", "green", "purple", "orange", "red", "muted")
_SCOPE_COLOURS = {"attention": "blue", "moe/experts": "green", "moe": "purple", "loss": "orange"}
_SMALL_BYTES = 1e8
_FEWEST = 0.004
"""Share of a layer's time below which neighbours of one scope are drawn as one bar."""


def memory(values: Values) -> str:
    """What a GPU holds, by the compiler and by the formula, beside what GPUs of each kind have."""
    figure, (ax,) = new_figure(11, 4.2)
    found, formula = values["memory"]["at_peak"], values["memory"]["by_formula"]
    names = list(dict.fromkeys(p["name"] for p in (*found, *formula) if p["num_bytes"] > _SMALL_BYTES))
    for at, parts in ((1.0, found), (0.0, formula)):
        _stack(ax, at, parts, names)
    peak, own = values["memory"]["peak_bytes"] / 1e9, values["gpus"]["usable_bytes"] / 1e9
    by_size: dict[float, list[str]] = {}
    for name, kind in KINDS.items():
        by_size.setdefault(ACCELERATORS[kind].memory_bytes / 1e9, []).append(name.upper())
    for size, kinds in by_size.items():
        mine = size == own
        if not mine and size > 1.9 * max(peak, own):
            continue
        colour = INK["red" if mine and peak > size else "text" if mine else "muted"]
        ax.axvline(size, color=colour, linewidth=1.6 if mine else 0.8, linestyle="-" if mine else ":")
        ax.text(size, 1.45, f" {', '.join(kinds)}: {size:.0f} GB", color=colour, fontsize=8.5, ha="left", va="bottom")
    ax.set_yticks([0.0, 1.0], ["by formula", "by the compiler"])
    ax.set_ylim(-0.4, 1.75)
    ax.set_xlim(left=0)
    ax.set_xlabel("GB of a GPU at the peak")
    ax.grid(axis="y", visible=False)
    handles = [
        Patch(facecolor=INK[_COLOURS[i % len(_COLOURS)]], hatch=_hatch(i), alpha=0.75, label=n)
        for i, n in enumerate(names)
    ]
    legend(ax, handles=handles, loc="upper center", bbox_to_anchor=(0.45, -0.18), ncols=4)
    return inline(figure, "memory", "memory of a GPU by part, against what each kind of GPU has")


def _hatch(number: int) -> str:
    """Tells apart parts that share a colour."""
    return ("", "///", "...")[min(number // len(_COLOURS), 2)]


def _stack(ax: Axes, at: float, parts: Sequence[Values], names: Sequence[str]) -> None:
    left = 0.0
    for p in parts:
        if p["name"] not in names:
            continue
        i, size = names.index(p["name"]), p["num_bytes"] / 1e9
        colour = INK[_COLOURS[i % len(_COLOURS)]]
        ax.barh(at, size, left=left, height=0.55, color=colour, hatch=_hatch(i), alpha=0.75, edgecolor=INK["grid"])
        if p["num_bytes"] > 0.03 * sum(q["num_bytes"] for q in parts):
            ax.text(left + size / 2, at, f"{size:.1f}", ha="center", va="center", fontsize=8.5, color=INK["text"])
        left += size


def layer(values: Values, phase: str) -> str | None:
    """Kernels and collectives of one layer; None where the step has no such loop."""
    if phase not in values["layer"]:
        return None
    one = values["layer"][phase]
    figure, (ax,) = new_figure(11, 2.5)
    for begins, lasts, scope in _joined(one["events"], _FEWEST * one["seconds"]):
        ax.broken_barh([(begins * 1e3, lasts * 1e3)], (2.1, 0.8), color=INK[_colour(scope)], linewidth=0)
    for e in one["events"]:
        if not e["collective"] or e["lasts_s"] <= 0:
            continue
        network = e["domains"] > 1
        hidden = max(0.0, e["lasts_s"] - e["exposed_s"])
        row = (0.0, 0.8) if network else (1.05, 0.8)
        ax.broken_barh([(e["begins_s"] * 1e3, hidden * 1e3)], row, color=INK["muted"], alpha=0.6, linewidth=0)
        ax.broken_barh(
            [((e["begins_s"] + hidden) * 1e3, (e["lasts_s"] - hidden) * 1e3)], row, color=INK["red"], linewidth=0
        )
    ax.set_yticks([0.4, 1.45, 2.5], ["over the network", "NVLink", "kernels"])
    ax.set_ylim(-0.1, 3.0)
    ax.set_xlim(0, one["seconds"] * 1e3)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"ms of one layer's {phase} pass; run {one['runs']:,} times a step")
    shown = {"attention": "blue", "experts": "green", "dispatch, router, combine": "purple", "other kernels": "muted"}
    patches = [Patch(color=INK[c], label=n) for n, c in (shown | {"kernels wait": "red"}).items()]
    legend(ax, handles=patches, loc="upper center", bbox_to_anchor=(0.5, 1.28), ncols=5)
    return inline(figure, f"layer-{phase}", f"schedule of one layer's {phase} pass")


def _colour(scope: str) -> str:
    return next((c for name, c in _SCOPE_COLOURS.items() if scope.startswith(name)), "muted")


def _joined(events: Sequence[Values], gap: float):
    """(begins, lasts, scope) of kernels, neighbours of one colour joined across gaps shorter than `gap`."""
    begins = ends = 0.0
    scope = ""
    for e in events:
        if e["collective"]:
            continue
        if scope and _colour(e["scope"]) == _colour(scope) and e["begins_s"] - ends < gap:
            ends = e["begins_s"] + e["lasts_s"]
            continue
        if scope:
            yield begins, ends - begins, scope
        begins, ends, scope = e["begins_s"], e["begins_s"] + e["lasts_s"], e["scope"]
    if scope:
        yield begins, ends - begins, scope


def links(values: Values) -> str | None:
    """GB that a GPU receives in a step, by view and phase, over NVLink and over the network; None where nothing is sent."""
    rows = [r for r in values["communication"] if r["nvlink_bytes"] + r["network_bytes"] > 1e6]
    if not rows:
        return None
    views = sorted({r["view"] for r in rows})
    phases = [p for p in ("forward", "recompute", "backward", "update") if any(r["phase"] == p for r in rows)]
    figure, axes = new_figure(11, 1.0 + 0.42 * len(views), columns=2)
    for ax, link, name in zip(
        axes, ("nvlink_bytes", "network_bytes"), ("over NVLink", "over the network"), strict=True
    ):
        table = [
            [sum(r[link] for r in rows if r["view"] == v and r["phase"] == p) / 1e9 for p in phases] for v in views
        ]
        largest = max(max(line) for line in table) or 1.0
        for y, line in enumerate(table):
            for x, value in enumerate(line):
                ax.barh(y, 0.96, left=x + 0.02, height=0.9, color=INK["blue"], alpha=0.06 + 0.7 * value / largest)
                ax.text(
                    x + 0.5,
                    y,
                    f"{value:,.1f}" if value >= 0.05 else "·",
                    ha="center",
                    va="center",
                    color=INK["text"],
                    fontsize=9,
                )
        ax.set_yticks(range(len(views)), views)
        ax.set_xticks([x + 0.5 for x in range(len(phases))], phases)
        ax.set_ylim(len(views) - 0.5, -0.5)
        ax.grid(visible=False)
        title(ax, f"GB that a GPU gets {name}")
    return inline(figure, "links", "bytes received by a GPU, by view and phase, by link")
