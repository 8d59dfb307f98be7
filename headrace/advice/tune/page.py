"""What tuning found as one HTML page that needs nothing else."""

from __future__ import annotations

import html

from headrace.advice.tune.picture import COLOURS, panels, svg
from headrace.advice.tune.report import HEADS, Report, cells, kind, value

STYLE = """:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:1120px;margin:2rem auto;
padding:0 1rem}h1{font-size:1.3rem;margin:0}p{margin:.3rem 0}.plots{display:flex;flex-wrap:wrap;gap:1rem;margin:1rem 0}
svg{flex:1 1 440px;max-width:100%;height:auto}svg text{font-size:12px;fill:currentColor}svg .axis{font-weight:600}
svg .number{fill:#fff;font-size:9px;font-weight:700}
.grid{stroke:currentColor;opacity:.15;fill:none}.front{fill:none;stroke:currentColor;opacity:.6;stroke-dasharray:5 4}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{padding:.2rem .7rem;text-align:right;
border-bottom:1px solid color-mix(in srgb,currentColor 15%,transparent)}
th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}
.best{font-weight:700}.dot{display:inline-block;min-width:1.5em;
border-radius:1em;margin-right:.5em;color:#fff;font:700 .75em/1.5 system-ui;text-align:center}
.wide{overflow-x:auto}.bad{opacity:.7}"""


def page(report: Report) -> str:
    rows = []
    for number, result in enumerate(report.runs, 1):
        best = ' class="best"' if result is report.outcome.best else ""
        dot = f'<span class="dot" style="background:{COLOURS[kind(result)]}">{number}</span>'
        name = f"<td>{dot}{html.escape(kind(result))}</td><td>{html.escape(value(result))}</td>"
        if result.ok:
            rest = "".join(f"<td>{text}</td>" for text in [*cells(result), report.versus(result)])
            rows.append(f"<tr{best}>{name}{rest}</tr>")
        else:
            rows.append(
                f'<tr class="bad">{name}<td colspan="6">{html.escape(f"{result.status}: {result.why}")}</td></tr>'
            )
    head = "".join(f"<th>{text}</th>" for text in HEADS)
    plots = "".join(svg(panel) for panel in panels(report))
    title = html.escape(report.title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>headrace tune: {title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style><h1>{title}</h1>'
        f"<p>{html.escape(report.load)}</p><p><b>{html.escape(report.verdict())}</b></p>"
        f"<p>{html.escape(report.standing_line())} {html.escape(report.doubt())} {html.escape(report.proposal())}</p>"
        f'<div class="plots">{plots}</div>'
        "<p>The dashed line is the front: no other setting has both more tokens and shorter waits. Numbers are "
        "rows of the table; the diamond is the plan.</p>"
        f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
        f"<p>Milliseconds; vs plan in {report.gained}.</p></html>\n"
    )
