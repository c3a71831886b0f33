"""Prints an estimate, and draws memory over a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qfsdp.common.sizes import format_size
from qfsdp.planning.estimate import Estimate, Point
from qfsdp.planning.tracker import KINDS
from qfsdp.training.report.charts import Chart, Line, number
from qfsdp.training.report.drawing import write_picture

COLUMNS = 300  # of the picture, each a few pixels wide


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
    """Draws memory over a step by kind of tensor, its phases, and the device's limit. Raises
    OSError, and ValueError: a suffix that matplotlib does not write."""
    chart = chart_of(found)
    if device_memory is not None and device_memory < 3 * found.peak:
        name = f"{format_size(device_memory)} device memory"
        chart = replace(chart, limit=(device_memory / 2**30, name))
    title = f"{title}: peak {format_size(found.peak)} ({found.where.phase})"
    write_picture(replace(chart, title=title, begins=_phases(_thinned(found.timeline))), path)


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
