"""Prints an estimate, and draws memory over a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qfsdp.common.sizes import format_size
from qfsdp.planning.estimate import Estimate, Point
from qfsdp.planning.tracker import KINDS
from qfsdp.training.report.charts import Chart, Line, number

COLUMNS = 300  # of the picture, each a few pixels wide
# Colours of Paul Tol's "muted" scheme (https://sronpersonalpages.nl/~pault/), which colour-blind
# readers can distinguish: blue and green for lasting tensors, warm colours for temporary ones.
COLOURS = (
    *("#332288", "#88CCEE", "#44AA99", "#117733", "#999933"),
    *("#DDCC77", "#CC6677", "#882255", "#AA4499", "#DDDDDD", "#555555", "#661100"),
)


def lines(found: Estimate, device_memory: int | None) -> list[str]:
    """The estimate as lines of text; with a verdict if `device_memory` (bytes) is given."""
    where = f"{found.where.phase}, {found.where.module or 'between modules'}"
    text = [f"peak per rank: {format_size(found.peak)} ({where})", ""]
    text += _columns(sorted(found.at_peak.items(), key=lambda item: -item[1]))
    text += ["", f"between steps: {format_size(found.steady)}"]
    if found.reserved:
        whole = format_size(found.reserved)
        text.append(f"with fragmentation, CUDA context and NCCL: about {whole}")
    for title, sizes in (
        ("host memory per rank", found.host),
        ("sent per rank and step", found.wire),
        ("moved per rank and step", found.moved),
    ):
        if any(sizes.values()):
            parts = [f"{_words(name)} {format_size(n)}" for name, n in sizes.items() if n]
            text.append(f"{title}: {', '.join(parts)}")
    if device_memory is not None:
        text.append(_verdict(found, device_memory))
    return text


def _columns(sizes: Sequence[tuple[str, int]]) -> list[str]:
    total = max(1, sum(size for _, size in sizes))
    return [
        f"  {_words(name):<22}{format_size(size):>12}{size / total:>8.1%}"
        for name, size in sizes
        if size
    ]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _verdict(found: Estimate, device_memory: int) -> str:
    needs = found.reserved or found.peak
    available = format_size(device_memory)
    if needs <= device_memory:
        return f"fits into {available}: {format_size(device_memory - needs)} are left"
    return f"does not fit into {available}: {format_size(needs - device_memory)} are missing"


def draw(found: Estimate, path: Path, title: str, device_memory: int | None) -> None:
    """Writes a PNG: memory over a step by kind of tensor, its phases, and the device's limit."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = _thinned(found.timeline)
    at = [point.at for point in points]
    kinds = [kind for kind in KINDS if any(point.by_kind.get(kind) for point in points)]
    colours = [COLOURS[KINDS.index(kind)] for kind in kinds]
    heights = [[point.by_kind.get(kind, 0) / 2**30 for point in points] for kind in kinds]

    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.stackplot(at, heights, labels=map(_words, kinds), colors=colours, linewidth=0)
    axes.plot([found.where.at], [found.peak / 2**30], "v", color="black", markersize=6)
    axes.annotate(
        f"peak {format_size(found.peak)}",
        (found.where.at, found.peak / 2**30),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
    )
    top = found.peak / 2**30 * 1.12
    if device_memory is not None and device_memory < 3 * found.peak:
        limit = device_memory / 2**30
        axes.axhline(limit, color="black", linestyle="--", linewidth=1)
        axes.text(at[0], limit, f" {format_size(device_memory)} device memory", va="bottom")
        top = max(top, limit * 1.08)
    for begin, phase in _phases(points):
        axes.axvline(begin, color="grey", linewidth=0.6)
        axes.text(begin, top, f" {phase}", va="top", fontsize=8, color="dimgrey")
    axes.set(xlim=(at[0], at[-1]), ylim=(0, top), ylabel="GiB per rank", title=title)
    axes.set_xlabel("operations of one step")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def chart_of(found: Estimate) -> Chart:
    """Memory over a step by kind of tensor, for a page."""
    points = _thinned(found.timeline)
    kinds = [kind for kind in KINDS if any(point.by_kind.get(kind) for point in points)]
    lines = [
        Line(_words(kind), [(point.at, point.by_kind.get(kind, 0) / 2**30) for point in points])
        for kind in kinds
    ]
    return Chart("Estimate", "operations of one step", "GiB of a rank", lines, kind="areas")


def comparison_of(
    found: Estimate, steps: Sequence[dict[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: the estimate beside what a run has measured, in GiB.

    Args:
        steps: lines of the run's metrics.jsonl.
    """

    def measured(name: str) -> float | None:
        values = [row[name] for row in steps if isinstance(row.get(name), int | float)]
        return max(values, default=None)

    peak = measured("peak_memory_gib")
    rows = [["peak", number(found.peak / 2**30), "" if peak is None else number(peak)]]
    for kind, size in sorted(found.at_peak.items(), key=lambda item: -item[1]):
        held = measured(f"memory/{kind}_gib")
        estimated = number(size / 2**30)
        rows.append([_words(kind), estimated, "" if held is None else number(held)])
    return ["GiB of a rank", "estimated at the peak", "measured"], rows


def _thinned(points: Sequence[Point]) -> list[Point]:
    """The peaks of `COLUMNS` parts of the step, so that short peaks stay visible."""
    peaks: dict[int, Point] = {}
    for point in points:
        column = int(COLUMNS * point.at / max(1, points[-1].at))
        if column not in peaks or point.total > peaks[column].total:
            peaks[column] = point
    return [peaks[column] for column in sorted(peaks)]


def _phases(points: Sequence[Point]) -> list[tuple[float, str]]:
    """Where each phase begins, and its name; without short phases, whose names would overlap."""
    begins = [
        (point.at, point.phase)
        for before, point in zip([None, *points], points, strict=False)
        if point.phase and (before is None or before.phase != point.phase)
    ]
    ends = [at for at, _ in begins[1:]] + [points[-1].at]
    least = points[-1].at / 20
    return [begin for begin, end in zip(begins, ends, strict=True) if end - begin[0] > least]
