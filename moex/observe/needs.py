"""The figure of what a run's routing would need on other numbers of ranks.  n ranks of an ep view."""

from collections.abc import Mapping

import numpy as np

from moex.observe.svg import INK, inline, legend, new_figure, plot_style, standalone, title

PANELS = dict(load="busiest rank's rows", cell="fullest cell", spill="spill")
COLOURS = ("orange", "blue", "green")


def figure(results: Mapping[int, Mapping[str, Mapping[str, np.ndarray]]], *, sources_known: bool) -> str:
    """An SVG file: load, cell and spill by n, the median draw and the range of all.

    results: n -> way, such as "with clones" -> load, cell, spill of every draw, in units of balanced routing.
    sources_known: without them, load alone.
    """
    panels = list(PANELS)[: len(PANELS) if sources_known else 1]
    ways = list(next(iter(results.values())))
    with plot_style("needs"):
        drawing, axes = new_figure(3.6 * len(panels), 3.0, columns=len(panels))
        places = np.arange(len(results))
        for ax, name in zip(axes, panels, strict=True):
            for i, (way, colour) in enumerate(zip(ways, COLOURS, strict=False)):
                values = [found[way][name] for found in results.values()]
                middle = np.array([np.median(v) for v in values])
                low, high = np.array([v.min() for v in values]), np.array([v.max() for v in values])
                style = dict(marker="o", markersize=4, linestyle="none", color=INK[colour], label=way)
                at = places + 0.24 * (i - (len(ways) - 1) / 2)
                ax.errorbar(at, middle, yerr=np.stack([middle - low, high - middle]), **style)
            ax.set_xticks(places, [str(ep) for ep in results])
            ax.set_xlim(-0.5, len(results) - 0.5)
            ax.set_ylim(bottom=0)
            ax.set_xlabel("ranks of the ep view")
            title(ax, PANELS[name])
        axes[0].set_ylabel("in units of balanced routing")
        legend(axes[0])
        drawn = inline(drawing, "needs", "What routing needs of buffers by number of ranks")
    lines = [
        f"{ep} ranks, {way}: load {values['load'].max():.2f}"
        for ep, found in results.items()
        for way, values in found.items()
    ]
    return standalone(drawn, "\n".join(lines))
