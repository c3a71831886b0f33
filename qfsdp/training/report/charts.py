"""What a chart shows. `drawing` draws it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

# Paul Tol's "bright" scheme (https://sronpersonalpages.nl/~pault/), which colour-blind readers can
# distinguish, orange, and four of his "muted" one; each has a contrast of about 2 or more to white
# and to the page's dark ground.
COLOURS = (
    *("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB", "#E0812C"),
    *("#44AA99", "#999933", "#882255", "#AA4499"),
)
MOST_POINTS = 400  # of a line: a chart is 360 pixels wide
LOG_RANGE = 20.0  # values that differ by more than this factor are shown on a logarithmic axis

Value = float | None
Point = tuple[float, Value]


@dataclass(frozen=True)
class Line:
    """A line of a chart; a value of None, NaN or infinity leaves a gap.

    Fields:
        name: for the legend; "" for none.
        points: x and y, in the order of x.
        dots: draw the points too.
    """

    name: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over common axes, or areas that are stacked on each other.

    Fields:
        title: what is shown.
        x, y: names of the axes, with units.
        lines: of an area chart, all have the same x.
        kind: "lines" or "areas".
        log_x, log_y: whether an axis is logarithmic. Values of 0 or less are left out there.
        ticks: x of the ticks; (): chosen.
        names: of the ticks, for values that are no numbers; (): the numbers.
        from_zero: the y axis begins at 0 even if all values are far from it.
        limit: y and name of a horizontal line, such as the memory of a device; None: none.
        begins: x and name of vertical lines: what begins there.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    kind: Literal["lines", "areas"] = "lines"
    log_x: bool = False
    log_y: bool = False
    ticks: Sequence[float] = field(default=())
    names: Sequence[str] = field(default=())
    from_zero: bool = False
    limit: tuple[float, str] | None = None
    begins: Sequence[tuple[float, str]] = field(default=())

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(True for line in self.lines for _ in drawable(line.points))


def drawable(points: Sequence[Point]) -> Iterator[tuple[float, float]]:
    """The points whose value is a finite number."""
    for x, y in points:
        if y is not None and math.isfinite(y):
            yield x, y


def is_geometric(values: Sequence[float]) -> bool:
    """Whether values in ascending order grow by about the same factor, as 1, 2, 4, 8 do.

    The factor of three values or more must be at least 1.5, and equal within a tenth.
    """
    if len(values) < 3 or any(value <= 0 for value in values):
        return False
    factors = [b / a for a, b in pairwise(values)]
    return min(factors) >= 1.5 and max(factors) / min(factors) < 1.1


def needs_log(lines: Sequence[Line]) -> bool:
    """Whether the values are all positive and differ by more than `LOG_RANGE`."""
    values = [y for line in lines for _, y in drawable(line.points)]
    return bool(values) and min(values) > 0 and max(values) / min(values) > LOG_RANGE


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about `most` points: of every part of a long line its first, lowest and highest.

    Single spikes of the loss stay visible.
    """
    if len(points) <= most:
        return list(points)
    size = -(-len(points) * 3 // most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        known = sorted(
            (y, at) for at, (_, y) in enumerate(part) if y is not None and math.isfinite(y)
        )
        chosen = {0, *(at for _, at in (*known[:1], *known[-1:]))}
        kept += [part[at] for at in sorted(chosen)]
    return kept


def number(value: float) -> str:
    """A number in few characters: "0.0012", "3.5", "12,000", "5e-4"."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
