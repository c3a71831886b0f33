"""One HTML file that loads nothing else: no script, no font, no picture from elsewhere.

Its content security policy forbids all of that to the browser too. Light and dark colours follow
the reader's system; charts stand beside each other where there is room. `page.html` has the page
and the macros of its parts; they escape every value that is not itself made by one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from qfsdp.common.files import write_text
from qfsdp.training.report.charts import COLOURS, Chart
from qfsdp.training.report.drawing import svg

if TYPE_CHECKING:
    from jinja2 import Template


class Section(NamedTuple):
    """A part of a page: its heading and the HTML below it."""

    title: str
    body: Markup


@cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.globals["colours"] = COLOURS
    return made.get_template("page.html")


def part(name: str, *args: Any, **named: Any) -> Markup:
    """The HTML of a macro of `page.html`."""
    made: Markup = getattr(_parts(), name)(*args, **named)
    return made


@cache
def _parts() -> Any:
    return _template().make_module({"title": "", "subtitle": "", "sections": ()})


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Markup:
    """A table; numbers, all but the first `left` columns, are right-aligned. "" without rows."""
    return part("table", head, list(rows), left)


def figure(chart: Chart) -> Markup:
    """A chart with its title and legend; a sentence if there is nothing to draw."""
    drawing = "" if chart.is_empty else Markup(svg(chart))
    return part("figure", chart.title, drawing, [line.name for line in chart.lines])


def charts_section(title: str, charts: Sequence[Chart], after: str = "") -> Section:
    """The charts that have something to draw, and HTML below them."""
    figures = [figure(chart) for chart in charts if not chart.is_empty]
    return Section(title, part("charts", figures) + after)


def html(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The page as one text."""
    return _template().render(title=title, subtitle=subtitle, sections=sections)


def write_page(path: Path, title: str, subtitle: str, sections: Sequence[Section]) -> None:
    """Writes the page whole; its folder is made if need be. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, html(title, subtitle, sections))
