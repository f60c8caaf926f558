"""One self-contained HTML page: sections of plots, tables, tiles and notes; nothing is loaded from a network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

Figure = dict[str, Any]
"""A plotly figure as plain data: {"data": [...], "layout": {...}}."""

# A page that is opened from a disk or a mail must not call home: the browser itself enforces it.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

_STYLE = """
:root { --ink: #1d2433; --soft: #5c6677; --line: #e2e5ea; --paper: #ffffff; --ground: #f6f7f9; --mark: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 28px 64px; }
header p.kind { margin: 0; color: var(--soft); font-size: 13px; letter-spacing: .04em; }
h1 { margin: 2px 0 6px; font-size: 28px; line-height: 1.2; font-weight: 650; }
header p.facts { margin: 0; color: var(--soft); }
h2 { margin: 40px 0 4px; font-size: 19px; font-weight: 650; }
h2 + p.intro { margin: 0 0 12px; color: var(--soft); max-width: 110ch; }
h2 + div { margin-top: 12px; }
h3 { margin: 0 0 2px; font-size: 15px; font-weight: 600; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 22px; }
.tile { flex: 1 1 150px; }
.tile, .card { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; }
.tile .name { color: var(--soft); font-size: 13px; }
.tile .value { white-space: nowrap; font-size: 22px; font-weight: 600; line-height: 1.3; }
.tile .more { color: var(--soft); font-size: 12.5px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(520px, 100%), 1fr)); gap: 14px; }
.card { min-width: 0; }
.card p.caption { margin: 4px 0 0; color: var(--soft); font-size: 13.5px; }
.plot { height: 300px; }
.note { background: #fff9e8; border: 1px solid #eedfae; border-radius: 8px; padding: 9px 14px; margin: 10px 0; }
.absent { border: 1px dashed #c9ced6; border-radius: 8px; padding: 9px 14px; color: var(--soft); }
.badge { display: inline-block; padding: 0 9px; border-radius: 999px; font-size: 13px; border: 1px solid var(--line);
  background: var(--paper); color: var(--ink); vertical-align: 1px; }
.badge.finished { border-color: #7cc4ae; background: #e9f6f1; }
.badge.failed, .badge.interrupted, .badge.incomplete { border-color: #e3ab85; background: #fcefe6; }
.scroll { overflow-x: auto; background: var(--paper); border: 1px solid var(--line); border-radius: 8px;
  margin: 10px 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 8px 12px; text-align: right; border-top: 1px solid var(--line); vertical-align: top; }
thead th { border-top: 0; color: var(--soft); font-weight: 600; font-size: 13px; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
td small { display: block; color: var(--soft); font-size: 12px; white-space: nowrap; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 7px; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
details { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; margin: 8px 0; }
summary { cursor: pointer; padding: 9px 16px; }
details > .inside { padding: 4px 16px 14px; border-top: 1px solid var(--line); }
.turn { display: grid; grid-template-columns: 2.6em 1fr 1fr 5.5em; gap: 14px; padding: 10px 0;
  border-bottom: 1px solid var(--line); }
.turn:last-child { border-bottom: 0; }
.turn.head { padding: 6px 0; color: var(--soft); font-size: 12.5px; }
.turn .reward { text-align: right; font-variant-numeric: tabular-nums; }
.turn .reply { border-left: 3px solid var(--mark); padding-left: 10px; }
footer { margin-top: 44px; color: var(--soft); font-size: 13px; }
@media (max-width: 700px) { .turn { grid-template-columns: 1fr; } .turn .reward { text-align: left; } }
@media print { body { background: #fff; } .card, .tile { break-inside: avoid; } }
"""

_DRAW = """
const figures = JSON.parse(document.getElementById("figures").textContent);
const options = {displayModeBar: false, responsive: true};
for (const [id, figure] of Object.entries(figures)) {
  Plotly.newPlot(id, figure.data, figure.layout, options);
}
"""


def dot(color: str) -> str:
    """A small filled circle in an arm's color, as HTML."""
    return f'<span class="dot" style="background:{escape(color, quote=True)}"></span>'


def safe_json(value: object) -> str:
    """JSON that can stand inside a script element: no character of it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


class Page:
    """Collects the parts of one page in reading order, then renders it.

    Every text argument is plain text and is escaped here; only :meth:`html` takes markup. Plots that follow
    each other share a grid.
    """

    def __init__(self, *, kind: str, title: str, facts: Sequence[str], badge: str = "") -> None:
        self._title = title
        self._parts: list[str] = []
        self._figures: dict[str, Figure] = {}
        self._grid_open = False
        mark = f' <span class="badge {escape(badge, quote=True)}">{escape(badge)}</span>' if badge else ""
        told = " · ".join(escape(fact) for fact in facts)
        self._header = (
            f'<header><p class="kind">{escape(kind)}</p><h1>{escape(title)}{mark}</h1>'
            f'<p class="facts">{told}</p></header>'
        )

    def tiles(self, tiles: Iterable[tuple[str, str, str]]) -> None:
        """Headline numbers: (name, value, a line below it)."""
        cells = "".join(
            f'<div class="tile"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
            f'<div class="more">{escape(more)}</div></div>'
            for name, value, more in tiles
        )
        self.html(f'<div class="tiles">{cells}</div>')

    def section(self, heading: str, intro: str = "") -> None:
        """Start a section."""
        self.html(f"<h2>{escape(heading)}</h2>" + (f'<p class="intro">{escape(intro)}</p>' if intro else ""))

    def plot(self, heading: str, figure: Figure | None, caption: str, *, absent: str = "") -> None:
        """A plot with a sentence on what to look for; without a figure, the sentence that says what is absent."""
        if not self._grid_open:
            self._parts.append('<div class="grid">')
            self._grid_open = True
        if figure is None:
            why = absent or "Nothing was logged for it."
            self._parts.append(f'<div class="card"><h3>{escape(heading)}</h3><p class="absent">{escape(why)}</p></div>')
            return
        name = f"plot{len(self._figures) + 1}"
        self._figures[name] = figure
        self._parts.append(
            f'<div class="card"><h3>{escape(heading)}</h3><div class="plot" id="{name}"></div>'
            f'<p class="caption">{escape(caption)}</p></div>'
        )

    def note(self, text: str) -> None:
        """Something a reader has to know."""
        self.html(f'<p class="note">{escape(text)}</p>')

    def absent(self, text: str) -> None:
        """Says that a whole part is not there, and why."""
        self.html(f'<p class="absent">{escape(text)}</p>')

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table. Headings are plain text, cells are HTML made with :func:`cell`."""
        head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
        body = "".join("<tr>" + "".join(f"<td>{part}</td>" for part in row) + "</tr>" for row in rows)
        self.html(f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')

    def folded(self, summary: str, inside: str, *, is_open: bool = False) -> None:
        """A block that opens on a click. The summary is plain text, the inside is HTML."""
        state = " open" if is_open else ""
        self.html(f'<details{state}><summary>{escape(summary)}</summary><div class="inside">{inside}</div></details>')

    def html(self, fragment: str) -> None:
        """Trusted markup."""
        if self._grid_open:
            self._parts.append("</div>")
            self._grid_open = False
        self._parts.append(fragment)

    def render(self) -> str:
        """The whole document, with plotly.js inside it once (and only when there is a plot)."""
        self.html("")
        scripts = ""
        if self._figures:
            from plotly.offline import get_plotlyjs

            scripts = (
                f"<script>{get_plotlyjs()}</script>"
                f'<script type="application/json" id="figures">{safe_json(self._figures)}</script>'
                f"<script>{_DRAW}</script>"
            )
        return (
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self._title)}</title><style>{_STYLE}</style></head>"
            f"<body><main>{self._header}{''.join(self._parts)}</main>{scripts}</body></html>"
        )


def cell(text: str, *small: str) -> str:
    """A table cell's content from plain text, with smaller lines below it."""
    return escape(text) + "".join(f"<small>{escape(line)}</small>" for line in small if line)
