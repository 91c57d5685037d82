"""Draws docs/step.svg: the way of a batch through one training step.  Run it after a change: python docs/step_diagram.py."""

import sys
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 960, 1066
FONT = "font-family='Helvetica, Arial, sans-serif'"
INK, QUIET, LINE = "#1f2933", "#5f6c7b", "#8a97a6"
PLAIN, DENSE, EXPERT, STORED = ("#ffffff", LINE), ("#e3eefb", "#4a86c8"), ("#fdebd7", "#d58536"), ("#e4f3e6", "#4f9d5d")
LEFT, BOX = 60, 400
"""Left edge and width of the boxes of the main column."""
NOTES = LEFT + BOX + 40
"""Left edge of what stands beside the boxes."""


def text(
    x: float, y: float, words: str, *, size: int = 14, color: str = INK, bold: bool = False, anchor: str = "middle"
) -> str:
    weight = " font-weight='600'" if bold else ""
    return (
        f"<text x='{x}' y='{y}' font-size='{size}' fill='{color}' text-anchor='{anchor}'{weight}>{escape(words)}</text>"
    )


def rect(x: float, y: float, width: float, height: float, style: tuple[str, str], *, dashed: bool = False) -> str:
    fill, stroke = style
    dash = " stroke-dasharray='6 4'" if dashed else ""
    return (
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='6' fill='{fill}' stroke='{stroke}' "
        f"stroke-width='1.3'{dash}/>"
    )


def box(
    y: float, title: str, detail: str, style: tuple[str, str], note: str = "", *, x: float = LEFT, width: float = BOX
) -> str:
    """A step of the main column, 48 high, with the file it is in and what travels written to its right."""
    parts = [rect(x, y, width, 48, style)]
    parts.append(text(x + width / 2, y + 20, title, bold=True))
    parts.append(text(x + width / 2, y + 38, detail, size=12, color=QUIET))
    for i, line in enumerate(note.split("\n") if note else []):
        parts.append(text(NOTES, y + 20 + 18 * i, line, size=12, anchor="start", color=QUIET))
    return "".join(parts)


def arrow(y0: float, y1: float, *, x: float = LEFT + BOX / 2) -> str:
    return f"<path d='M{x} {y0}V{y1 - 1}' stroke='{LINE}' stroke-width='1.6' fill='none' marker-end='url(#tip)'/>"


def back(y0: float, y1: float) -> str:
    """An arrow on the left, from a box up to an earlier one."""
    path = f"M{LEFT} {y0}H{LEFT - 12}V{y1}H{LEFT - 1}"
    return f"<path d='{path}' stroke='{LINE}' stroke-width='1.6' fill='none' marker-end='url(#tip)'/>"


def group(y: float, height: float, title: str, *, inset: float = 0) -> str:
    """A frame around boxes, its title inside at the top, over the notes."""
    x, width = LEFT - 36 + inset, WIDTH - 2 * (LEFT - 36) - 2 * inset
    frame = rect(x, y, width, height, ("none", LINE), dashed=True)
    return frame + text(NOTES, y + 24, title, size=13, bold=True, anchor="start", color=QUIET)


def legend(y: float) -> list[str]:
    parts, x = [], LEFT
    for style, words in (
        (DENSE, "dense view"),
        (EXPERT, "expert view"),
        (STORED, "stored shards (ZeRO)"),
        (PLAIN, "host and whole step"),
    ):
        parts += [rect(x, y, 16, 16, style), text(x + 24, y + 13, words, size=12, color=QUIET, anchor="start")]
        x += 60 + 7 * len(words)
    return parts


def draw() -> str:
    parts = [
        box(
            16,
            "loader",
            "moex.data: a pure function of the step",
            PLAIN,
            "tokens, labels, mask, documents, positions\neach host reads the rows of its own devices",
        ),
        arrow(64, 84),
        box(
            84,
            "Batch [A, rows, S]",
            "rows over dp, sequence over cp (zig-zag)",
            PLAIN,
            "train/placing.py\nA micro-batches, the same rows on every mesh",
        ),
        arrow(132, 192),
        group(150, 602, "shard_map: one device's shards and named collectives"),
        box(
            192,
            "parameters enter",
            "cast to the compute dtype, all-gather",
            STORED,
            "Placement.enter: stored shard → what one device computes with\n"
            "ZeRO-1: once a step; ZeRO-3: in each layer of the scan",
        ),
        arrow(240, 260),
        box(
            260,
            "embed",
            "dense view: vocabulary over tp",
            DENSE,
            "reduce-scatter over tp: from here on tokens are\nsplit over dp, cp and tp",
        ),
        arrow(308, 368),
        group(326, 250, "each layer (lax.scan over a stack)", inset=16),
        back(528, 392),
        box(
            368,
            "attention",
            "dense view: heads over tp, sequence over cp",
            DENSE,
            "all-gather and reduce-scatter over tp;\nkeys by gather, ring or ulysses over cp",
        ),
        arrow(416, 436),
        box(
            436,
            "router",
            "float32: scores, top k, weights, counts",
            DENSE,
            "each device routes its own tokens;\nstatistics are summed over dp, cp and tp",
        ),
        arrow(484, 504),
        box(
            504,
            "plan, send → experts → combine",
            "expert view: experts over ep, width over etp",
            EXPERT,
            "a transport brings rows to their experts, sorted by expert;\n"
            "grouped_matmul; back, a token's k results are summed in order",
        ),
        arrow(552, 606),
        box(
            606,
            "loss in chunks",
            "dense view: head over tp, float32",
            DENSE,
            "over the step's valid tokens of all devices, so\nmicro-batches and devices simply add up",
        ),
        arrow(654, 674),
        box(
            674,
            "gradients leave",
            "reduce-scatter in float32 to the stored shard",
            STORED,
            "Placement.leave: the transpose of entering\nZeRO-1: once, after all micro-batches; ZeRO-3: in each layer",
        ),
        arrow(722, 812),
        group(770, 176, "global view: whole arrays in the same jit"),
        box(
            812,
            "clip, optimizer, router bias",
            "one norm over all gradients; optax",
            STORED,
            "train/optim.py; the compiler keeps every array where it is stored",
        ),
        arrow(860, 880),
        box(
            880,
            "gates",
            "where(no overflow & batch.step = state.step)",
            STORED,
            "not passed: the whole state stays, the step can run again\n"
            "not finite: the step counts, but nothing is learned from it",
        ),
        arrow(928, 964),
        box(
            964,
            "state and metrics",
            "state donated; metrics read one step later",
            PLAIN,
            "loss, gradient norm, learning rate, tokens per expert,\noverflow, applied",
        ),
        *legend(1036),
    ]
    tip = (
        f"<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0 0L8 4L0 8z' fill='{LINE}'/></marker></defs>"
    )
    title = "<title>The way of a batch through one training step</title>"
    page = f"<rect width='{WIDTH}' height='{HEIGHT}' fill='#ffffff'/>"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' {FONT}>"
        f"{title}{tip}{page}{''.join(parts)}</svg>\n"
    ).replace("'", '"')


def main() -> int:
    (Path(__file__).parent / "step.svg").write_text(draw())
    return 0


if __name__ == "__main__":
    sys.exit(main())
