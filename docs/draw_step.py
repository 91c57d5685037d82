"""Draws docs/step.svg, a batch's way through one training step: python docs/draw_step.py."""

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 1120, 1010
LOOK = {  # fill, line
    "host": ("#eceff1", "#607d8b"),
    "jit": ("#ffffff", "#424242"),
    "device": ("#fafafa", "#757575"),
    "dense": ("#dbeafe", "#2563eb"),
    "expert": ("#ffedd5", "#ea580c"),
    "neutral": ("#ffffff", "#616161"),
    "global": ("#dcfce7", "#16a34a"),
    "state": ("#f3e8ff", "#7c3aed"),
}
INK = "#1f2328"
LEFT, WIDE = 62, 560  # the column of the forward pass
STYLE = (
    "text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328;font-size:13px}"
    ".t{font-weight:600;font-size:14px}.m{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px}"
    ".q{fill:#57606a;font-size:12.5px}"
)


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, w: float, h: float, look: str, title: str, *lines: str, dash: bool = False) -> str:
    """A rectangle with a bold first line; a line that begins with a backtick is code, one with ~ is quiet."""
    fill, line = LOOK[look]
    stroke = ' stroke-dasharray="6 4"' if dash else ""
    parts = [
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="7" fill="{fill}" stroke="{line}" stroke-width="1.4"{stroke}/>'
    ]
    parts.append(text(x + 12, y + 21, title, "t"))
    for i, words in enumerate(lines):
        kind = {"`": "m", "~": "q"}.get(words[0], "")
        parts.append(text(x + 12, y + 41 + 18 * i, words.lstrip("`~"), kind))
    return "".join(parts)


def arrow(*points: tuple[float, float], colour: str = INK, dash: bool = False) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    stroke = ' stroke-dasharray="6 4"' if dash else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6" marker-end="url(#head)"{stroke}/>'
    )


def down(x: float, top: float, bottom: float) -> str:
    return arrow((x, top), (x, bottom - 2))


def drawing() -> list[str]:
    left, wide, mid = LEFT, WIDE, LEFT + WIDE / 2
    return [
        # host
        box(left, 16, 250, 62, "host", "loader", "`Batches.batch(step, rows)"),
        box(left + 310, 16, 250, 62, "host", "Batch, int32 [A, rows, S]", "rows over dp, sequence over cp"),
        arrow((left + 250, 47), (left + 308, 47)),
        box(860, 16, 236, 62, "state", "TrainState", "shards; replaced by every step"),
        # the jitted step
        box(24, 106, 1072, 770, "jit", "one jitted step: (state, batch) → (state, metrics)"),
        arrow((left + 435, 78), (left + 435, 142)),
        arrow((978, 78), (978, 142)),
        box(
            42,
            690,
            1036,
            170,
            "global",
            "global view: the same jit, whole arrays",
            dash=True,
        ),
        # shard_map
        box(42, 144, 1036, 528, "device", "shard_map over all axes of the mesh: code of one device", dash=True),
        box(left, 180, wide, 44, "neutral", "one micro-batch [B, S] at a time, gradients added up in float32"),
        down(mid, 224, 242),
        box(left, 244, wide, 44, "dense", "embed: ids → [B, S / (cp·tp), D]"),
        box(left - 8, 306, wide + 16, 288, "device", "", dash=True),
        down(mid, 288, 332),
        text(left + wide - 2, 327, "× layers, in a scan", "q", "end"),
        box(
            left,
            334,
            wide,
            62,
            "dense",
            "attention, on the dense view",
            "norm · all-gather tp · heads over tp, keys over cp · reduce-scatter tp",
        ),
        down(left + 136, 396, 406),
        box(left, 408, 272, 62, "dense", "router, float32", "scores, top k, balance loss, counts"),
        arrow((left + 272, 439), (left + 286, 439)),
        box(left + 288, 408, 272, 62, "neutral", "plan (integers), then send", "rows travel over ep; etp gathers"),
        box(
            left,
            490,
            420,
            62,
            "expert",
            "experts, on the expert view: rows [R, D]",
            "grouped_matmul · silu · router weight · grouped_matmul",
        ),
        arrow((left + 424, 470), (left + 424, 478), (left + 210, 478), (left + 210, 488)),
        box(left + 434, 490, 126, 62, "neutral", "combine", "[R, D] → [T, D]"),
        arrow((left + 420, 521), (left + 432, 521)),
        text(left + wide - 2, 580, "added to the residual stream, shared expert too", "q", "end"),
        down(mid, 594, 612),
        box(left, 614, wide, 44, "dense", "loss: chunks of logits over tp → sum of −log p, counts"),
    ]


def right_side() -> list[str]:
    left, wide, x, w = LEFT, WIDE, 664, 396
    return [
        box(
            x,
            180,
            w,
            84,
            "neutral",
            "gather: the one door into compute",
            "cast to compute dtype, all-gather what ZeRO split",
            "~ZeRO-1: here, once a step.  ZeRO-3: in each layer",
        ),
        arrow((x, 222), (left_edge := 634, 222), (left_edge, 265), (left_edge - 10, 265)),
        arrow((left_edge, 265), (left_edge, 365), (left_edge - 10, 365), dash=True),
        box(
            x,
            330,
            w,
            100,
            "neutral",
            "backward: the same way, transposed",
            "all-gather ↔ reduce-scatter, send ↔ combine",
            "the types of shard_map say which sums a",
            "gradient needs; no table of rules",
        ),
        arrow((622, 636), (650, 636), (650, 380), (x - 2, 380)),
        down(x + w / 2, 430, 468),
        box(
            x,
            470,
            w,
            84,
            "neutral",
            "leave: gradients of the stored shards",
            "reduce-scatter in float32 over all that used them",
            "~laid out as the parameters are",
        ),
        down(x + w / 2, 554, 720),
        box(x, 720, w, 62, "global", "clip by global norm, AdamW", "decay of matrices only; rate from the step"),
        box(
            left,
            720,
            wide,
            62,
            "global",
            "bias of the router ± rate",
            "from the step's counts; its own rule, no gradient",
        ),
        arrow((left + 545, 658), (left + 545, 718)),
        text(left + 536, 685, "counts, overflow, loss", "q", "end"),
        box(
            left,
            796,
            998,
            54,
            "global",
            "gates by where, no branch of the host",
            "not finite: step + 1, nothing learned.   overflow, or another step's batch: the state stays, bit for bit",
        ),
        down(x + w / 2, 782, 794),
        down(left + wide / 2, 782, 794),
        # out
        arrow((x + 300, 850), (x + 300, 912)),
        box(
            x + 150,
            914,
            282,
            74,
            "state",
            "TrainState of the next step",
            "orbax saves it in the background,",
            "for any mesh to read",
        ),
        arrow((left + 280, 850), (left + 280, 912)),
        box(
            left,
            914,
            wide,
            74,
            "host",
            "metrics, read one step behind",
            "loss, gradient norm, counts by layer and expert → metrics.jsonl, display,",
            "report.html; evaluation and samples between steps",
        ),
    ]


def main() -> None:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="A batch\'s way through one training step">'
        f"<style>{STYLE}</style>"
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L10,5 L0,10 z" fill="{INK}"/></marker></defs>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    )
    body = "\n".join([*drawing(), *right_side()])
    (Path(__file__).parent / "step.svg").write_text(f"{head}\n{body}\n</svg>\n")


if __name__ == "__main__":
    main()
