"""One HTML file that loads nothing else: no script, no font, no picture from elsewhere.

Its content security policy forbids all of that to the browser too. Light and dark colours follow
the reader's system; charts stand beside each other where there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from qfsdp.cli.files import write_text
from qfsdp.training.report.charts import COLOURS
from qfsdp.training.report.sections import Section

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1f2328; --soft: #59636e;
  --line: #d1d9e0; --grid: #e7ebef; --good: #1a7f37; --bad: #b42318 }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1117; --ink: #e6edf3; --soft: #9198a1;
  --line: #3d444d; --grid: #262c36; --good: #3fb950; --bad: #f97066 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1240px; padding: 16px; background: var(--ground);
  color: var(--ink); font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.5em; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.2em; margin: 2em 0 .6em; padding-bottom: .2em;
  border-bottom: 1px solid var(--line) }
h3 { font-size: 1em; margin: 1.4em 0 .4em; overflow-wrap: anywhere }
.soft { color: var(--soft); font-size: .87em; margin: .3em 0 }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr));
  gap: 18px }
figure { margin: 0; min-width: 0 } figcaption { font-weight: 600 }
figure svg { display: block; width: 100%; max-width: 460px; height: auto }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft) }
svg .mid { text-anchor: middle } svg .end { text-anchor: end }
svg .grid { stroke: var(--grid) } svg .limit { stroke: var(--ink); stroke-dasharray: 5 4 }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round }
.legend { list-style: none; margin: .2em 0 0; padding: 0; display: flex; flex-wrap: wrap;
  gap: 2px 14px; font-size: .84em; color: var(--soft) }
.legend li { overflow-wrap: anywhere }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px }
.scroll { overflow-x: auto; max-width: 100% }
table { border-collapse: collapse; font-size: .87em; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--grid);
  white-space: nowrap; vertical-align: top }
th { color: var(--soft); font-weight: 600 } .left { text-align: left }
.text { display: inline-block; min-width: 150px; max-width: 46ch; white-space: pre-wrap;
  overflow-wrap: anywhere }
.right { color: var(--good) } .wrong { color: var(--bad) }
.interval { width: 120px; height: 14px }
.bar { display: flex; gap: 10px; align-items: center; margin: .3em 0 } .bar span { flex: 0 1 11em;
  font-size: .87em; overflow-wrap: anywhere } .bar svg { flex: 1; height: 16px; min-width: 60px }
summary { cursor: pointer; margin: .6em 0 } code { font-size: .95em }
"""


def colours() -> str:
    """The classes of colours: `c0` fills, `s0` draws a line, and backgrounds of swatches."""
    return "".join(
        f".c{at} {{ fill: {colour}; background: {colour} }} .s{at} {{ stroke: {colour} }}\n"
        for at, colour in enumerate(COLOURS)
    )


def html(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The page as one text."""
    parts = "".join(
        f"<section><h2>{escape(section.title)}</h2>{section.body}</section>\n"
        for section in sections
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}{colours()}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="soft">{escape(subtitle)}</p>
{parts}</body>
</html>
"""


def write_page(path: Path, title: str, subtitle: str, sections: Sequence[Section]) -> None:
    """Writes the page whole; its folder is made if need be. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, html(title, subtitle, sections))
