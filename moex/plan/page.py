"""A plan as one HTML page without scripts or outside files: verdict, memory bars, one layer's timeline, links, audit."""

from collections.abc import Mapping
from typing import Any

from moex.observe.page import document, escape, fields, figure, tiles
from moex.observe.svg import plot_style
from moex.observe.tiles import Tile
from moex.plan import figures
from moex.plan.report import ASSUMED

Values = Mapping[str, Any]


def page(values: Values) -> str:
    """The page of what `moex.plan.as_json.as_json` returns."""
    name = values["config"]["name"]
    gpus = values["gpus"]
    heading = f"{name} on {gpus['number']:,} x {gpus['kind'].upper()}"
    with plot_style(heading):
        pictures = [
            figure(
                "Memory of a GPU", figures.memory(values),
                "By the compiler: the arrays that are alive when most memory is. By formula: what a person would add up. "
                "Lines: the memory of each kind of GPU; solid, of the one planned for.",
                wide=True, missing="",
            ),
            *(
                figure(
                    f"One layer, {phase}", figures.layer(values, phase),
                    "As XLA has scheduled it. Grey: sent while kernels run. Red: kernels wait.",
                    wide=True, missing="the step has no loop over layers",
                )
                for phase in ("forward", "backward")
            ),
            figure(
                "Links", figures.links(values),
                "Of one GPU and step, by the view of the mesh that a group lies along.",
                wide=True, missing="nothing is sent on one GPU",
            ),
        ]  # fmt: skip
    body = [
        f'<header><h1>{escape(heading)}</h1><span class="written">{escape(values["mesh"])}</span></header>',
        _verdict(values),
        tiles(_tiles(values)),
        f'<div class="figures">{"".join(pictures)}</div>',
        _audit(values),
        _remedies(values),
        _table(
            "Communication by view",
            values["communication"],
            "view phase scope kind gpus domains nvlink_bytes network_bytes seconds exposed_s",
        ),
        _table("Kernels by scope", values["compute"], "phase scope flops bytes seconds"),
        _rates(values),
        fields("Configuration", values["config"], "none"),
    ]
    return document(heading, body)


def _verdict(values: Values) -> str:
    faults = sum(f["level"] == "fault" for f in values["audit"])
    level = "bad" if not values["fits"] else "unsure" if faults else "good"
    sign = {"good": "✓", "unsure": "–", "bad": "!"}[level]
    audit = f"{faults} faults in the audit" if faults else "no fault in the audit"
    return (
        f'<p class="verdict {level}"><span class="sign" aria-hidden="true">{sign}</span>'
        f"<span><b>{'fits' if values['fits'] else 'does not fit'}</b> "
        f"{escape(values['verdict'].partition(': ')[2])}; {escape(audit)}</span></p>"
    )


def _tiles(values: Values) -> list[Tile]:
    e = values["estimate"]
    executed = sum(e["executed_flops"].values()) / e["model_flops"]
    network = sum(r["network_bytes"] for r in values["communication"]) / 1e9
    return [
        Tile("step", f"{e['step_s']:.2f} s", "estimated, not measured"),
        Tile("tokens/s a GPU", f"{e['tokens_per_s']:,.0f}", ""),
        Tile("MFU", f"{e['mfu']:.1%}", f"{e['model_flops_per_s'] / 1e12:,.0f} model TFLOP/s of the BF16 peak"),
        Tile(
            "waits",
            f"{e['exposed_s'] / e['step_s']:.0%}",
            f"of the step for collectives; {e['hidden_s']:.2f} s are hidden",
        ),
        Tile("network", f"{network:,.0f} GB", "that a GPU gets in a step"),
        Tile("FLOPs", f"{executed:.2f}", "executed for each of the model's"),
    ]


def _audit(values: Values) -> str:
    rows = [
        f"<tr><td>{escape(f['level'])}</td><td>{escape(f['kind'])}</td><td>{escape(f['text'])}<br>{escape(f['where'])}</td></tr>"
        for f in values["audit"]
    ]
    inner = f'<table class="events">{"".join(rows)}</table>' if rows else "<p>Nothing found.</p>"
    return f"<section><h2>Audit</h2>{inner}</section>"


def _remedies(values: Values) -> str:
    found = values["memory"]["remedies"]
    if not found:
        return ""
    rows = [
        f"<tr><td>{escape(r['flags'])}</td><td>{escape(r['about'])}</td>"
        f"<td>{escape(r['error'] or format(r['peak_bytes'] / 1e9, '.1f') + ' GB')}</td></tr>"
        for r in found
    ]
    return f"<section><h2>Remedies, each compiled</h2><table>{''.join(rows)}</table></section>"


def _table(title: str, rows: list[Values], columns: str) -> str:
    names = columns.split()
    head = "".join(f"<th>{escape(n)}</th>" for n in names)
    lines = "".join("<tr>" + "".join(f"<td>{escape(_shown(r[n]))}</td>" for n in names) + "</tr>" for r in rows)
    inner = f"<table><tr>{head}</tr>{lines}</table>"
    return f'<details class="block"><summary>{escape(title)} ({len(rows)})</summary>{inner}</details>'


def _shown(value: object) -> object:
    if not isinstance(value, float):
        return value
    return f"{value:,.3f}" if value < 1e4 else f"{value:,.4g}"


def _rates(values: Values) -> str:
    shares = values["shares"]
    rows = [
        f"<tr><th>{escape(n)}</th><td>{escape(shares[n])}</td><td>{escape(why)}</td></tr>"
        for n, why in shares["reasons"].items()
    ]
    return f'<section><h2>What is assumed</h2><p class="quiet">{escape(ASSUMED)}</p><table>{"".join(rows)}</table></section>'
