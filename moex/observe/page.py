"""The report as one HTML page: no script, no outside file; everything that comes from the run is escaped here."""

import html
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from moex.observe.health import Verdict, count
from moex.observe.moe import CAUSES, LayerRouting
from moex.observe.run import as_number
from moex.observe.style import CSS
from moex.observe.tiles import Tile

MAX_SAMPLES, MAX_SAMPLE_CHARACTERS = 12, 2_000
MAX_EVENTS, MAX_EVENT_CHARACTERS = 200, 300
_LEVEL = {"good": ("✓", "healthy"), "unsure": ("–", "not clear yet"), "bad": ("!", "needs attention")}
# Should escaping ever fail, the browser still neither runs nor fetches anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def escape(text: object) -> str:
    """Text for HTML, attributes included; control characters, which HTML forbids, as their pictures (␀ ␛)."""
    visible = "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in str(text))
    return html.escape(visible.encode("utf-8", "backslashreplace").decode("utf-8"))


def document(title: str, body: list[str]) -> str:
    """The whole page; `body` is markup, one item a block."""
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{CSS}</style>"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n'
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def header(name: str, state: str, finished: bool, written: str, verdict: Verdict) -> str:
    """Name, state and verdict of the run."""
    badge = f'<span class="state {"done" if finished else "open"}">{escape(state)}</span>'
    return title_line(name, written, badge) + verdict_line(verdict)


def title_line(title: str, written: str, badge: str = "") -> str:
    """The page's heading.  badge: trusted markup."""
    return f'<header><h1>{escape(title)}</h1>{badge}<span class="written">{escape(written)}</span></header>'


def verdict_line(verdict: Verdict, whose: str = "") -> str:
    """A verdict with its sign, and whose it is."""
    sign, words = _LEVEL[verdict.level]
    name = f"<b class='whose'>{escape(whose)}</b> " if whose else ""
    return (
        f'<p class="verdict {verdict.level}"><span class="sign" aria-hidden="true">{sign}</span>'
        f"<span>{name}<b>{words}</b> {escape(verdict.text)}</span></p>"
    )


def grid(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names the rows."""
    if not rows:
        return f'<section><h2>{escape(title)}</h2><p class="nodata">None.</p></section>'
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = ["".join(f"<td>{escape(value)}</td>" for value in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<section><h2>{escape(title)}</h2><table><tr>{head}</tr>{body}</table></section>"


def tiles(items: list[Tile]) -> str:
    """The key numbers side by side."""
    cells = [
        f'<div class="tile"><dt>{escape(item.label)}</dt><dd>{escape(item.value)}</dd><p>{escape(item.note)}</p></div>'
        for item in items
    ]
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def figure(title: str, plot: str | None, caption: str, *, wide: bool = False, missing: str, extra: str = "") -> str:
    """A plot with its caption, or the sentence `missing` in their place. `plot` and `extra` are trusted markup."""
    if plot is None:
        content = f'<p class="nodata">No data: {escape(missing)}</p>'
    else:
        content = f'<div class="plot">{plot}</div><figcaption>{escape(caption)}</figcaption>{extra}'
    return f'<figure class="{"wide" if wide else "half"}"><h2>{escape(title)}</h2>{content}</figure>'


def layer_chips(loads: list[float], limit: float) -> str:
    """One small number a MoE layer, those over the limit marked; a layer without tokens shows a dash."""
    cells = []
    for layer, load in enumerate(loads):
        text = "–" if load != load else f"{load:.2f}"
        cells.append(f'<li class="{"over" if load > limit else ""}"><span>layer {layer}</span> {text}</li>')
    return f'<ul class="chips" aria-label="busiest expert over the mean at the end, by MoE layer">{"".join(cells)}</ul>'


def routing_table(layers: list[LayerRouting], lost: Mapping[str, int], limit: float) -> str:
    """A row a MoE layer, and what was lost by cause."""
    if not layers:
        return ""
    rows = [
        f'<tr class="{"over" if one.load > limit or one.dead else ""}"><td>{one.layer}</td><td>{one.load:.2f}</td>'
        f"<td>{one.least:.2f}</td><td>{one.entropy:.3f}</td><td>{_or_dash(one.gates)}</td>"
        f"<td>{_named_experts(one.dead)}</td></tr>"
        for one in layers
    ]
    names = "MoE layer", "busiest / mean", "idlest / mean", "entropy", "gate mass, heaviest / mean", "dead experts"
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    causes = [f"<li><b>{number:,}</b> pairs: {escape(CAUSES[name])}</li>" for name, number in lost.items()]
    note = f"<ul>{''.join(causes)}</ul>" if causes else '<p class="quiet">No pair of token and expert was dropped.</p>'
    caption = (
        "At the end of the run. Healthy: busiest below 2 and idlest above 0.3, entropy of the experts' shares close to 1, "
        "which is even, and no dead experts."
    )
    table = f"<table>{head}{''.join(rows)}</table>"
    return f'<section><h2>Routing by layer</h2><p class="quiet">{caption}</p>{table}{note}</section>'


def _or_dash(value: float) -> str:
    return "–" if value != value else f"{value:.2f}"


def _named_experts(experts: tuple[int, ...]) -> str:
    return ", ".join(map(str, experts[:8])) + (f" and {len(experts) - 8} more" if len(experts) > 8 else "") or "none"


def time_ledger(seconds: Mapping[str, float], meaning: Mapping[str, str]) -> str:
    """A bar a category, with its share."""
    total = sum(seconds.values())
    if not total:
        return ""
    rows = [
        f"<tr><td>{escape(name)}</td><td>{seconds[name]:,.1f} s</td><td>{seconds[name] / total:.1%}</td>"
        f'<td><span class="bar" style="width:{100 * seconds[name] / total:.1f}%"></span></td><td>{escape(words)}</td></tr>'
        for name, words in meaning.items()
        if seconds[name] > 0
    ]
    caption = "Healthy: nearly all of a long run is steps; nothing is lost or idle."
    return (
        f'<section><h2>Where the time went</h2><p class="quiet">{caption}</p>'
        f'<table class="ledger">{"".join(rows)}</table></section>'
    )


def samples(events: list[dict]) -> str:
    """The newest sample open, older ones (evenly chosen when there are many) folded, newest first."""
    if not events:
        return '<section><h2>Samples</h2><p class="nodata">No data: the run wrote no samples.</p></section>'
    chosen = events
    if len(events) > MAX_SAMPLES:
        last = len(events) - 1
        chosen = [events[round(index * last / (MAX_SAMPLES - 1))] for index in range(MAX_SAMPLES)]
    parts = [_sample(event, opened=index == 0) for index, event in enumerate(reversed(chosen))]
    left_out = len(events) - len(chosen)
    note = f"<p class='quiet'>{left_out} more in events.jsonl.</p>" if left_out else ""
    return f"<section><h2>Samples</h2>{''.join(parts)}{note}</section>"


def _sample(event: dict, *, opened: bool) -> str:
    prompt, text = str(event.get("prompt") or ""), str(event.get("text") or "")
    text = text.removeprefix(prompt)
    if len(text) > MAX_SAMPLE_CHARACTERS:
        text = text[:MAX_SAMPLE_CHARACTERS] + " …"
    step = event.get("step")
    title = f"step {escape(step if step is not None else '?')}"
    return (
        f"<details class='sample'{' open' if opened else ''}><summary>{title}</summary>"
        f"<pre><b>{escape(prompt)}</b>{escape(text)}</pre></details>"
    )


def fields(title: str, tree: Mapping | None, missing: str, *, note: str = "") -> str:
    """A folded two-column table of a nested object, one row a value, named as on the command line: section.field."""
    if not tree:
        return _folded(title, f'<p class="nodata">No data: {escape(missing)}</p>')
    rows = [f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in flatten(tree)]
    return _folded(f"{title} ({len(rows)})", f'{note}<table class="fields">{"".join(rows)}</table>')


def flatten(tree: Mapping, prefix: str = "") -> list[tuple[str, str]]:
    """Each value of a nested object by its dotted name, as text."""
    rows = []
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            rows += flatten(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
    return rows


def events_table(events: list[dict], superseded: int) -> str:
    """Time, kind and fields of the events, in order; the middle of a long list is left out."""
    if not events:
        return _folded("Events", '<p class="nodata">No data: events.jsonl is missing or empty.</p>')
    rows = [_event_row(event) for event in events]
    if len(rows) > MAX_EVENTS:
        half, left_out = MAX_EVENTS // 2, len(rows) - MAX_EVENTS
        rows[half:-half] = [f'<tr><td colspan="3" class="quiet">… {left_out:,} more in events.jsonl …</td></tr>']
    note = (
        f'<p class="quiet">Left out: {count(superseded, "line")} of steps that were run again.</p>'
        if superseded
        else ""
    )
    head = "<tr><th>time (UTC)</th><th>event</th><th>fields</th></tr>"
    return _folded(f"Events ({len(events):,})", f'{note}<table class="events">{head}{"".join(rows)}</table>')


def _event_row(event: dict) -> str:
    rest = {name: value for name, value in event.items() if name not in ("time", "kind")}
    text = "  ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in rest.items())
    if len(text) > MAX_EVENT_CHARACTERS:
        text = text[:MAX_EVENT_CHARACTERS] + " …"
    time, kind = format_time(event.get("time")), event.get("kind", "?")
    return f"<tr><td>{escape(time)}</td><td>{escape(kind)}</td><td>{escape(text)}</td></tr>"


def format_time(seconds: object) -> str:
    """Seconds since the epoch as 2030-01-31 12:00:00, UTC; "-" for anything else."""
    number = as_number(seconds)
    if number is None:
        return "-"
    try:
        return datetime.fromtimestamp(number, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "-"


def _folded(title: str, content: str) -> str:
    return f'<details class="block"><summary>{escape(title)}</summary>{content}</details>'
