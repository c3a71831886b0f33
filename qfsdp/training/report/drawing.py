"""Draws charts by matplotlib: as SVG for the page, whose colours and font it takes, and as PNG."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from html import escape
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import Any
from unittest.mock import patch

from qfsdp.common.errors import shortened
from qfsdp.common.files import whole_file
from qfsdp.training.report.charts import COLOURS, Chart, drawable, number, thinned

# Names of users may have a "$", which begins a formula for matplotlib. SVG keeps text as text.
SETTINGS: Any = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "qfsdp"}
PAGE: Any = SETTINGS | {"font.size": 11, "lines.linewidth": 1.8, "lines.markersize": 5}
# Points (1/72 inch), which are the SVG's pixels. The page shows a chart at about this width on any
# screen, so its text is readable.
WIDTH, HEIGHT = 360, 230
# Of a picture's legend; a larger one leaves no room for lines.
MOST_NAMES, NAME_LETTERS = len(COLOURS), 60
LETTERS = 44  # below a chart, of all ticks together
# Colours that no chart has: the page puts its own in their place, light or dark.
OF_PAGE = {"#010101": "var(--grid)", "#020202": "var(--ink)"}
GRID, INK = OF_PAGE
STEPS = (1, 2, 2.5, 5, 10)  # between ticks, times a power of ten
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def _import_matplotlib() -> None:
    """Imports matplotlib, without its warnings about its cache. A process that is started in a
    notebook has the notebook's MPLBACKEND. The import fails if that backend is not installed for
    it, and is then made without the variable."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        import matplotlib  # noqa: F401
    except Exception:
        # Perhaps an earlier import failed, that of TensorBoard; both leave half of the package.
        for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
            del sys.modules[name]
        with patch.dict(os.environ):
            os.environ.pop("MPLBACKEND", None)
            import matplotlib  # noqa: F401


def svg(chart: Chart) -> str:
    """The chart as an `svg` element without title and legend, each dot with its values as a
    tooltip."""
    _import_matplotlib()
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    file = StringIO()
    with rc_context(PAGE):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained", frameon=False)
        axes = _axes(figure, chart, GRID, INK)
        axes.set(frame_on=False)
        axes.tick_params(left=False, bottom=False)
        for drawn in figure.findobj():  # a clip path is named by url(), which pages have none of
            drawn.set_clip_on(False)
        FigureCanvasSVG(figure).print_svg(file, metadata=NO_METADATA)
    text = file.getvalue().partition("<svg ")[2].replace("xlink:href", "href")
    text = re.sub(r'\bxmlns[:\w]*="[^"]*" ', "", text)
    text = re.sub('font-family: [^;"]*', "font-family: system-ui, sans-serif", text)
    for colour, of_page in OF_PAGE.items():
        text = text.replace(colour, of_page)
    values = _tooltips(chart)
    text = re.sub(
        "(<use [^>]*)/>", lambda dot: f"{dot[1]}><title>{next(values, '')}</title></use>", text
    )
    label = escape(f"{chart.title}: {chart.y} over {chart.x}")
    return f'<svg role="img" aria-label="{label}" {text}'


def write_picture(chart: Chart, path: Path) -> None:
    """Draws a chart into `path`, .png or .svg; its folder is made if need be. Raises OSError: the
    file cannot be written."""
    _import_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(SETTINGS):
        areas = chart.kind == "areas"
        figure = Figure(figsize=(11, 5) if areas else (7, 4.2), layout="constrained")
        axes = _axes(figure, chart, "#e7ebef", "black")
        axes.set_title(chart.title, pad=16 if chart.begins else None)
        if areas:  # one over the other, as they are stacked
            figure.legend(reverse=True, loc="outside right center", frameon=False)
        elif any(line.name for line in chart.lines):
            lines, names = axes.get_legend_handles_labels()
            names = [shortened(name, NAME_LETTERS) for name in names[:MOST_NAMES]]
            axes.legend(lines[:MOST_NAMES], names, edgecolor="none", fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            metadata = {"Date": None} if path.suffix == ".svg" else None  # the same file each time
            figure.savefig(partial, dpi=110, format=path.suffix[1:], metadata=metadata)


def _axes(figure: Any, chart: Chart, grid: str, ink: str) -> Any:
    """Draws everything but title and legend into a figure of matplotlib."""
    axes = figure.add_subplot()
    if chart.kind == "areas":
        x, *_ = [[x for x, _ in line.points] for line in chart.lines]
        heights = [[y or 0.0 for _, y in line.points] for line in chart.lines]
        names = [line.name for line in chart.lines]
        axes.stackplot(x, heights, labels=names, colors=COLOURS, linewidth=0)
        axes.margins(x=0)
    for at, line in enumerate(chart.lines if chart.kind == "lines" else ()):
        points = thinned(line.points)
        values = [float("nan") if y is None else y for _, y in points]
        colour = COLOURS[at % len(COLOURS)]
        marker = "o" if _has_dots(line) else ""
        axes.plot([x for x, _ in points], values, color=colour, marker=marker)
        axes.lines[-1].set_label(line.name or "_")
    if chart.limit is not None:
        y, name = chart.limit
        axes.axhline(y, color=ink, linestyle="--", linewidth=1)
        axes.text(0.99, y, name, transform=axes.get_yaxis_transform(), ha="right", va="bottom")
    for begin, name in chart.begins:
        axes.axvline(begin, color=ink, linewidth=0.6)
        axes.text(begin, 1.01, name, transform=axes.get_xaxis_transform(), fontsize=8)
    _scale(axes, chart)
    axes.set(xlabel=chart.x, ylabel=chart.y)
    axes.grid(color=grid)
    axes.set_axisbelow(True)
    return axes


def _scale(axes: Any, chart: Chart) -> None:
    """Scales, ends and ticks of both axes: round numbers, integers where all values are."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    low, high = axes.dataLim.intervaly
    near_zero = chart.from_zero or chart.kind == "areas" or low <= high / 2
    xs = [x for line in chart.lines for x, _ in drawable(line.points)]
    whole = all(float(x).is_integer() for x in xs)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=whole, steps=STEPS, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    if chart.log_x:
        axes.set_xscale("log", nonpositive="mask")
    if chart.log_y:
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    elif low >= 0 and near_zero:
        axes.set_ylim(bottom=0)
    if chart.ticks:
        axes.set_xticks(list(chart.ticks))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: number(value))
    if chart.names:
        most = max(1, LETTERS // len(chart.names) - 1)
        names = [fill(name, most, break_long_words=False) for name in chart.names]
        axes.set_xticks(list(chart.ticks), names)
        axes.set_xlim(-0.5, len(chart.names) - 0.5)


def _has_dots(line: Any) -> bool:
    return line.dots or len(list(drawable(line.points))) == 1


def _tooltips(chart: Chart) -> Iterator[str]:
    """What the dots say, in the order in which they are drawn."""
    for line in chart.lines:
        for x, y in drawable(thinned(line.points)) if _has_dots(line) else ():
            yield escape(f"{line.name} {number(x)}: {number(y)}".strip())
