"""Matplotlib figures as inline SVG that takes its colours and font from the page, so that light and dark mode both fit.

A plot draws with the stand-in colours of `INK`; `inline` turns them into the page's CSS variables.
"""

import io
import re
from contextlib import contextmanager
from html import escape

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from moex.observe.style import CSS

INK = {
    name: f"#0b0c{index:02x}"  # no real colour of a plot, and six digits that nothing else in an SVG contains
    for index, name in enumerate(("text", "muted", "grid", "blue", "orange", "green", "purple", "red"), 0x11)
}
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.labelsize": 10,
    "legend.fontsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "lines.linewidth": 1.6,
    "path.simplify_threshold": 0.3,
}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@contextmanager
def plot_style(salt: str):
    """Matplotlib settings of the report while plots are made; `salt` makes ids and thus files repeatable."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": salt}):
        yield


def inline(figure: Figure, name: str, description: str) -> str:
    """The figure as an <svg> element without fixed size; ids carry `name`, so that several fit on one page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'\bd="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path.group()), svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", svg)
    for ink, colour in INK.items():
        svg = svg.replace(colour, f"var(--{ink})")
    opening = re.match(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', svg)
    assert opening, "matplotlib writes an svg element with a viewBox"
    kept = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {opening[1]} role="img" aria-label="{description}">'
    return kept + svg[opening.end() :].strip()


def standalone(drawn: str, description: str) -> str:
    """An `inline` figure as a file of its own, in the report's light colours on white; the description is for those who
    can't see it.
    """
    colours = dict(reversed(re.findall(r"--(\w+): (#\w{6});", CSS.split("@media")[0])))
    drawn = re.sub(r"var\(--(\w+)\)", lambda m: colours.get(m[1], "Helvetica, Arial, sans-serif"), drawn)
    opening, rest = drawn.split(">", 1)
    box = re.search(r'viewBox="0 0 (\S+) (\S+)"', opening)
    assert box, "inline keeps the viewBox"
    opening += f' width="{box[1]}" height="{box[2]}" xmlns="http://www.w3.org/2000/svg"'
    about = f"<desc>{escape(description, quote=False)}</desc>"
    return f'{opening}>{about}<rect width="100%" height="100%" fill="#ffffff"/>{rest}\n'


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options) -> tuple[Figure, list[Axes]]:
    """A figure of width x height inches and its axes, row by row, in the report's look."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for ax in axes:
        dress(ax)
    return figure, axes


def dress(ax: Axes) -> None:
    """The report's look: a light horizontal grid, no frame, text in the page's colours."""
    ax.set_facecolor("none")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(INK["grid"])
    ax.grid(axis="y", color=INK["grid"], linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(colors=INK["muted"], length=0, pad=4)
    ax.tick_params(axis="x", length=3, color=INK["grid"])
    for text in (ax.xaxis.label, ax.yaxis.label):
        text.set_color(INK["muted"])
    ax.margins(x=0.01)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.yaxis.set_major_formatter(FuncFormatter(plain))


def plain(value: float, _=None) -> str:
    """A tick label without offsets or mathematical layout: 1,200,000, 0.003 or 2e-06."""
    if value and (abs(value) < 1e-4 or abs(value) >= 1e12):
        return f"{value:g}"
    return f"{value:,.10g}"


def log_axis(ax: Axes) -> None:
    """A logarithmic y axis whose labels are plain numbers, also within one decade."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 1e3 else (1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(plain))
    ax.yaxis.set_minor_locator(NullLocator())


def title(ax: Axes, text: str) -> None:
    """A small heading over the left end of the axes."""
    ax.set_title(text, loc="left", pad=4, color=INK["text"])


def legend(ax: Axes, **options) -> None:
    """A legend without a frame, where it hides least."""
    ax.legend(frameon=False, labelcolor=INK["text"], **options)
