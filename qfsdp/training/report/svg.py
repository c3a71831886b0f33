"""Draws charts as SVG for the page: colours follow the page's, and text keeps its size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from qfsdp.training.report.charts import (
    COLOURS,
    Chart,
    Line,
    Point,
    drawable,
    limits,
    number,
    thinned,
    ticks,
)

# Pixels. The page shows a chart at about this width on any screen, so its text is readable.
WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 8, 38
MOST_DOTS = 60  # points that are drawn each with its values as a tooltip

Place = Callable[[float], float]  # from a value to a pixel


def figure(chart: Chart) -> str:
    """A chart with its title and legend, as HTML; a sentence if there is nothing to draw."""
    head = f"<figure><figcaption>{escape(chart.title)}</figcaption>"
    if chart.is_empty:
        return f'{head}<p class="soft">nothing was logged</p></figure>'
    return f"{head}{drawing(chart)}{legend(chart.lines)}</figure>"


def legend(lines: Sequence[Line]) -> str:
    """The names and colours of lines; "" if no line has a name."""
    if not any(line.name for line in lines):
        return ""
    entries = (
        f'<li><span class="swatch c{at % len(COLOURS)}"></span>{escape(line.name)}</li>'
        for at, line in enumerate(lines)
    )
    return f'<ul class="legend">{"".join(entries)}</ul>'


def drawing(chart: Chart) -> str:
    """The chart as an `svg` element."""
    lines = stacked(chart.lines) if chart.kind == "areas" else list(chart.lines)
    xs = [x for line in lines for x, _ in drawable(line.points)]
    ys = [y for line in lines for _, y in drawable(line.points)]
    if chart.limit is not None:
        ys.append(chart.limit[0])
    low, high = min(xs), max(xs)
    if chart.log_x:
        low, high = limits(xs, chart.log_x)
    elif chart.names or low == high:
        low, high = low - 0.5, high + 0.5
    across = scale(low, high, chart.log_x, LEFT, WIDTH - RIGHT)
    bottom, top = limits(ys, chart.log_y, chart.from_zero or chart.kind == "areas")
    up = scale(bottom, top, chart.log_y, HEIGHT - BOTTOM, TOP)
    whole = all(float(x).is_integer() for x in xs)
    marks = list(chart.ticks) or ticks(low, high, chart.log_x, whole)
    names = list(chart.names) or [number(x) for x in marks]
    shapes = grid(marks, names, ticks(bottom, top, chart.log_y), across, up)
    if chart.kind == "areas":
        shapes += areas(lines, across, up)
    else:
        shapes += [shape for at, line in enumerate(lines) for shape in path(at, line, across, up)]
    if chart.limit is not None:
        y, name = up(chart.limit[0]), escape(chart.limit[1])
        shapes.append(f'<path class="limit" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        shapes.append(f'<text x="{WIDTH - RIGHT}" y="{y - 4:.1f}" class="end">{name}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    shapes.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 4}" class="mid">{escape(chart.x)}')
    shapes.append(
        f'</text><text transform="translate(12 {middle}) rotate(-90)" class="mid">'
        f"{escape(chart.y)}</text>"
    )
    label = escape(f"{chart.title}: {chart.y} over {chart.x}", quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(shapes)}</svg>"
    )


def scale(low: float, high: float, log: bool, start: float, end: float) -> Place:
    """Maps values from `low` to `high` onto pixels from `start` to `end`."""
    shape = math.log if log else float
    first, last = shape(low), shape(high)

    def place(value: float) -> float:
        return start + (shape(value) - first) / ((last - first) or 1) * (end - start)

    return place


def grid(
    xs: Sequence[float], names: Sequence[str], ys: Sequence[float], across: Place, up: Place
) -> list[str]:
    """Lines and names of the ticks."""
    shapes = []
    for x, name in zip(xs, names, strict=True):
        at = across(x)
        shapes.append(f'<path class="grid" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        shapes.append(
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 14}" class="mid">{escape(name)}</text>'
        )
    for y in ys:
        at = up(y)
        shapes.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        shapes.append(f'<text x="{LEFT - 5}" y="{at + 4:.1f}" class="end">{number(y)}</text>')
    return shapes


def path(at: int, line: Line, across: Place, up: Place) -> list[str]:
    """A line, interrupted where it has no value, and its dots."""
    words, begin = [], True
    for x, y in thinned(line.points):
        if y is None or not math.isfinite(y):
            begin = True
            continue
        words.append(f"{'M' if begin else 'L'}{across(x):.1f} {up(y):.1f}")
        begin = False
    colour = at % len(COLOURS)
    shapes = [f'<path class="line s{colour}" d="{"".join(words)}"/>']
    known = list(drawable(line.points))
    if line.dots or len(known) == 1:
        for x, y in known[:MOST_DOTS]:
            says = escape(f"{line.name} {number(x)}: {number(y)}".strip())
            shapes.append(
                f'<circle class="c{colour}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.6">'
                f"<title>{says}</title></circle>"
            )
    return shapes


def stacked(lines: Sequence[Line]) -> list[Line]:
    """The upper edges of areas that are stacked in the order of `lines`."""
    edges, below = [], [0.0] * len(lines[0].points)
    for line in lines:
        below = [low + (y or 0.0) for low, (_, y) in zip(below, line.points, strict=True)]
        points: list[Point] = [(x, top) for (x, _), top in zip(line.points, below, strict=True)]
        edges.append(Line(line.name, points))
    return edges


def areas(edges: Sequence[Line], across: Place, up: Place) -> list[str]:
    """Areas between the edges, the highest drawn first."""
    shapes = []
    for at in reversed(range(len(edges))):
        known = list(drawable(edges[at].points))
        words = "".join(f"L{across(x):.1f} {up(y):.1f}" for x, y in known)
        first, last = across(known[0][0]), across(known[-1][0])
        ground = f"{up(0.0):.1f}"
        shapes.append(
            f'<path class="c{at % len(COLOURS)}" d="M{first:.1f} {ground}{words}'
            f'L{last:.1f} {ground}Z"/>'
        )
    return shapes
