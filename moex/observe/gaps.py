"""The figure of what recipes of low precision cost a trained model."""

from collections.abc import Mapping

import numpy as np

from moex.observe.svg import INK, inline, legend, new_figure, plot_style, standalone, title

COLOURS = ("muted", "blue", "orange", "green", "purple", "red")


def figure(gaps: Mapping[str, np.ndarray], cosines: Mapping[str, Mapping[str, float]]) -> str:
    """An SVG file: the gap in the loss by step, the mean of the steps so far; and every gradient's cosine.

    gaps: recipe -> loss minus BF16's at each step, nats.  cosines: recipe -> parameter -> cosine with float32's gradient.
    """
    with plot_style("gaps"):
        drawing, (left, right) = new_figure(10.4, 3.4, columns=2)
        for (name, gap), colour in zip(gaps.items(), COLOURS, strict=False):
            left.plot(
                np.arange(1, len(gap) + 1), np.cumsum(gap) / np.arange(1, len(gap) + 1), color=INK[colour], label=name
            )
        left.axhline(0, color=INK["grid"], linewidth=1)
        left.set_xlabel("step")
        title(left, "Loss above BF16's, nats, mean so far")
        legend(left)
        for place, (name, values) in enumerate(cosines.items()):
            off = np.sort([max(1 - v, 1e-7) for v in values.values()])
            colour = COLOURS[list(gaps).index(name)] if name in gaps else "text"
            right.plot(
                off, np.full(len(off), place), marker="o", markersize=4, linestyle="none", color=INK[colour], alpha=0.6
            )
        right.set_xscale("log")
        right.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        right.set_yticks(range(len(cosines)), list(cosines))
        right.set_ylim(-0.6, len(cosines) - 0.4)
        right.set_xlabel("1 - cosine, a point for each parameter")
        title(right, "Gradients against float32's")
        drawn = inline(drawing, "gaps", "Loss gaps of recipes and directions of their gradients")
    return standalone(drawn, "; ".join(f"{name}: mean gap {gap.mean():+.4f}" for name, gap in gaps.items()))
