"""Draws charts as PNG files."""

from __future__ import annotations

from pathlib import Path

from qfsdp.cli.files import whole_file
from qfsdp.training.report.charts import COLOURS, Chart, drawable, number, thinned


def write_png(chart: Chart, path: Path) -> None:
    """Draws a chart of kind "lines" into `path`, a .png file; its folder is made if need be.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter, NullLocator

    drawn = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.add_subplot()
    for at, line in enumerate(chart.lines):
        points = thinned(line.points)
        values = [float("nan") if y is None else y for _, y in points]
        dotted = line.dots or len(list(drawable(line.points))) == 1
        marker, colour = ("o" if dotted else ""), COLOURS[at % len(COLOURS)]
        label = line.name or None
        xs = [x for x, _ in points]
        axes.plot(xs, values, marker=marker, markersize=4, color=colour, label=label)
    if chart.log_x:
        axes.set_xscale("log", base=2 if chart.ticks else 10)
    if chart.log_y:
        axes.set_yscale("log")
        for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatted(LogFormatter())  # 20, not 2 x 10^1
    if chart.ticks:
        axes.set_xticks(list(chart.ticks), chart.names or [number(x) for x in chart.ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    if chart.limit is not None:
        y, name = chart.limit
        axes.axhline(y, color="black", linestyle="--", linewidth=1)
        axes.text(0.99, y, name, transform=axes.get_yaxis_transform(), ha="right", va="bottom")
    if chart.from_zero and not chart.log_y:
        axes.set_ylim(bottom=0)
    axes.set(title=chart.title, xlabel=chart.x, ylabel=chart.y)
    axes.grid(alpha=0.3)
    if any(line.name for line in chart.lines):
        axes.legend(edgecolor="none", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        drawn.savefig(partial, dpi=110, format="png")
