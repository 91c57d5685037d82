"""The report's heat maps: each expert's share of its layer's tokens by step, one small map a MoE layer.

N steps, L MoE layers, E experts, K bins of steps.
"""

import math

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from moex.observe.load import relative_load
from moex.observe.run import Run
from moex.observe.series import bin_steps
from moex.observe.svg import dress, inline, new_figure, title

MAX_CELLS = 130_000  # of all maps together: about half a megabyte in the page
MAX_BINS, MIN_BINS = 160, 12
_LEVELS = 32  # shades; the eye tells no more apart, and fewer make smaller files
_RANGE = 2.0  # the colours reach from 2**-2 to 2**2 times the uniform share


def load_by_expert(run: Run) -> tuple[np.ndarray, np.ndarray, int]:
    """Expert load relative to uniform, [K, L, E] float32, the bins' steps [K], and the number of steps in a bin.

    A bin's load is that of the tokens of all its steps together; NaN where there were none.
    """
    _, layers, experts = run.counts.shape
    bins = max(MIN_BINS, min(MAX_BINS, MAX_CELLS // max(1, layers * experts)))
    binned = bin_steps(run.steps, run.counts, bins)
    return relative_load(binned.mean).astype(np.float32), binned.steps, binned.width


def heat_maps(run: Run) -> str | None:
    """All layers' maps and one colour bar, in light mode's colours; None when no layer ever had tokens."""
    loads, _, _ = load_by_expert(run)
    if not np.isfinite(loads).any():
        return None
    layers = loads.shape[1]
    columns = 1 if layers == 1 else 2 if layers <= 4 else 3 if layers <= 9 else 4
    rows = math.ceil(layers / columns)
    map_height = {1: 2.6, 2: 2.0, 3: 1.7, 4: 1.45}[columns]
    figure, axes = new_figure(11.2, 0.75 + map_height * rows, rows, columns, sharex=True)
    first, last = float(run.steps[0]) - 0.5, float(run.steps[-1]) + 0.5
    for layer, ax in enumerate(axes):
        if layer >= layers:
            ax.set_visible(False)
            continue
        _map(ax, loads[:, layer].T, (first, last))
        title(ax, f"MoE layer {layer}")
        if layer % columns == 0:
            ax.set_ylabel("expert")
        if layer + columns >= layers:
            ax.set_xlabel("step")
            ax.tick_params(labelbottom=True)
    _colour_bar(figure, axes)
    return inline(figure, "heat", "Share of tokens by expert and step for every MoE layer")


def _map(ax, loads_EK: np.ndarray, span: tuple[float, float]) -> None:
    present = np.isfinite(loads_EK).any(1)
    experts = int(np.flatnonzero(present)[-1]) + 1 if present.any() else len(loads_EK)
    with np.errstate(divide="ignore"):
        shades = np.log2(loads_EK[:experts])  # an expert without tokens is at -inf, which clips to the end of the scale
    _image(ax, shades, (*span, experts - 0.5, -0.5))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True, min_n_ticks=1))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True, min_n_ticks=1))


def _image(ax, shades: np.ndarray, extent: tuple[float, float, float, float]) -> None:
    """Shades are log2 of the load; quantised so that the map is odd around 1 and 1 itself is the neutral colour."""
    half = _LEVELS // 2
    steps = np.round(np.clip(shades, -_RANGE, _RANGE) * (half / _RANGE)) * (_RANGE / half)
    ax.grid(False)
    options = {"cmap": "RdBu_r", "norm": Normalize(-_RANGE, _RANGE), "interpolation": "none", "aspect": "auto"}
    ax.imshow(np.ma.masked_invalid(steps), extent=extent, **options)


def _colour_bar(figure, axes) -> None:
    height = 0.16 / figure.get_size_inches()[1]
    bar = figure.add_axes((0, 0, 1, 1))
    bar.set_in_layout(False)
    figure.get_layout_engine().set(rect=(0, 3.2 * height, 1, 1 - 3.2 * height))
    bar.set_position((0.36, 2.0 * height, 0.28, height))
    dress(bar)
    _image(bar, np.linspace(-_RANGE, _RANGE, 4 * _LEVELS)[None, :], (-_RANGE, _RANGE, 0, 1))
    bar.yaxis.set_visible(False)
    bar.spines["bottom"].set_visible(False)
    names = {-2: "¼× or less", -1: "½×", 0: "uniform", 1: "2×", 2: "4× or more"}
    bar.xaxis.set_major_locator(FixedLocator(list(names)))
    bar.xaxis.set_major_formatter(FuncFormatter(lambda value, _: names[round(value)]))
