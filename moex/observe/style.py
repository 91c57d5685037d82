"""The report's style sheet: light and dark by the reader's preference; plots take their colours from it."""

CSS = """
:root {
  color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --page: #f6f7f9; --card: #ffffff; --line: #e3e6ea;
  --text: #1b2026; --muted: #5f6b78; --grid: #e1e5ea;
  --blue: #0068b3; --orange: #c85200; --green: #007a57; --purple: #8a4fa3; --red: #b3202c;
  --good-back: #e4f4ec; --unsure-back: #fdf3dc; --unsure: #7a5200; --bad-back: #fde8e8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --card: #1d2127; --line: #2f353d;
    --text: #e8ebef; --muted: #9da8b5; --grid: #333a43;
    --blue: #58aef0; --orange: #ff9a4d; --green: #3fc79a; --purple: #d09be6; --red: #ff7b7b;
    --good-back: #16332a; --unsure-back: #3a2f14; --unsure: #f2c66d; --bad-back: #42201f;
  }
  /* The maps are drawn for light mode; this turns light and dark about and keeps blue blue and red red. */
  svg image { filter: invert(1) hue-rotate(180deg) saturate(1.25); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 var(--font); }
main { max-width: 1220px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0 0 6px; }
header { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 14px; }
.state { border-radius: 99px; padding: 2px 12px; font-size: 13px; font-weight: 600; border: 1px solid currentColor; }
.state.done { color: var(--green); }
.state.open { color: var(--unsure); }
.written { color: var(--muted); font-size: 13px; margin-left: auto; }
.verdict { display: flex; gap: 12px; align-items: center; border-radius: 10px; padding: 12px 16px; margin: 16px 0; }
.verdict b::after { content: ":"; }
.verdict b::first-letter { text-transform: uppercase; }
.verdict b { display: inline-block; }
.sign {
  flex: none; width: 26px; height: 26px; border-radius: 50%; display: grid; place-items: center; font-weight: 700;
  color: var(--card);
}
.verdict.good { background: var(--good-back); } .good .sign { background: var(--green); }
.verdict.unsure { background: var(--unsure-back); } .unsure .sign { background: var(--unsure); }
.verdict.bad { background: var(--bad-back); } .bad .sign { background: var(--red); }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 0 0 14px; }
.tile, figure, section, .block { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 14px; flex: 1 1 185px; }
.tile dt { color: var(--muted); font-size: 13px; }
.tile dd { margin: 0; font-size: 25px; line-height: 1.3; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile p { margin: 0; color: var(--muted); font-size: 12.5px; line-height: 1.35; }
.figures { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; }
figure { margin: 0; padding: 14px 16px; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figure svg { display: block; width: 100%; height: auto; }
svg text { font-family: var(--font) !important; }
figcaption, .quiet { color: var(--muted); font-size: 13px; line-height: 1.45; }
figcaption { margin-top: 6px; max-width: 130ch; }
.nodata {
  color: var(--muted); border: 1px dashed var(--line); border-radius: 8px; padding: 26px 14px; text-align: center;
}
.chips { list-style: none; display: flex; flex-wrap: wrap; gap: 5px; margin: 8px 0 0; padding: 0; font-size: 12.5px; }
.chips li { border: 1px solid var(--line); border-radius: 6px; padding: 1px 7px; font-variant-numeric: tabular-nums; }
.chips span { color: var(--muted); }
.chips .over { border-color: var(--red); color: var(--red); font-weight: 600; }
section, .block { padding: 14px 16px; margin-top: 14px; }
summary { cursor: pointer; font-weight: 600; }
.sample { border-top: 1px solid var(--line); padding: 8px 0; }
.sample summary { font-size: 13px; color: var(--muted); }
pre {
  margin: 8px 0 4px; padding: 12px 14px; background: var(--page); border-radius: 8px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
}
pre b { color: var(--blue); }
table { border-collapse: collapse; width: 100%; margin-top: 10px; font-size: 13px; }
th, td { text-align: left; vertical-align: top; padding: 3px 14px 3px 0; border-top: 1px solid var(--line); }
td { overflow-wrap: anywhere; font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.ledger td { white-space: nowrap; } .ledger td:nth-child(4) { width: 40%; } .ledger td:last-child { white-space: normal; }
.bar { display: inline-block; height: 10px; border-radius: 3px; background: var(--blue); min-width: 1px; }
tr.over td { color: var(--red); font-weight: 600; }
.fields th { font-weight: 500; color: var(--muted); width: 34%; overflow-wrap: anywhere; }
.events td:first-child, .events td:nth-child(2) { white-space: nowrap; }
@media (max-width: 860px) {
  .figures { grid-template-columns: minmax(0, 1fr); }
  main { padding: 18px 12px 40px; }
  .wide .plot { overflow-x: auto; }
  .wide svg { min-width: 760px; }
}
@media print { body { background: none; } figure, section, .tile { break-inside: avoid; } }
"""
