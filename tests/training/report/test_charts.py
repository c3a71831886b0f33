"""Axes, thinned lines, and charts as SVG."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from qfsdp.planning.tracker import KINDS
from qfsdp.training.report.charts import Chart, Line, is_geometric, needs_log, number, thinned
from qfsdp.training.report.drawing import HEIGHT, svg, write_picture
from qfsdp.training.report.page import figure
from tests.tiny import ROOT

NAN = float("nan")


def test_the_backend_of_a_notebook() -> None:
    """Processes that a notebook starts have its MPLBACKEND; their pages were not written."""
    script = "import torch.utils.tensorboard\n"  # imports it, and keeps silent if that fails
    script += "from qfsdp.training.report.charts import Chart, Line\n"
    script += "from qfsdp.training.report.drawing import svg\n"
    script += "svg(Chart('loss', 'step', 'nats', [Line('a', [(1.0, 2.0), (2.0, 1.0)])]))\n"
    environment = os.environ | {"MPLBACKEND": "module://matplotlib_inlined.backend_inline"}
    environment["PYTHONPATH"] = str(ROOT)
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_numbers_are_short() -> None:
    values = (0, 2.71828, 0.0012345, 5e-5, 12345.6, 1.5e9, -3.0)
    expected = ["0", "2.718", "0.001234", "5e-5", "12,346", "1.5e9", "-3"]
    assert [number(value) for value in values] == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 4, 8, 16], True),
        ([256, 512, 1024], True),
        ([1, 10, 100], True),
        ([1, 2], False),  # any two are
        ([1, 2, 3, 4], False),
        ([0, 1, 2], False),
        ([10, 11, 12.1], False),  # grows by a tenth: a linear axis shows it
    ],
)
def test_geometric_axes(values: list[float], expected: bool) -> None:
    assert is_geometric(values) == expected


def ticks(chart: Chart) -> tuple[list[str], list[str]]:
    """The names of the ticks of x and of y."""
    words = [e.text or "" for e in ElementTree.fromstring(svg(chart)).iter() if e.tag == "text"]
    at = words.index(chart.x)
    return words[:at], words[at + 1 : words.index(chart.y)]


def chart_of(*points: tuple[float, float | None], **fields: Any) -> Chart:
    return Chart("loss", "step", "nats", [Line("a", points)], **fields)


def test_ticks_are_round_and_within_the_axis() -> None:
    assert ticks(chart_of((0, 0.0), (10, 2.0)))[0] == ["0", "2", "4", "6", "8", "10"]
    assert ticks(chart_of((1, 0.0), (4, 1.0)))[0] == ["1", "2", "3", "4"]
    assert ticks(chart_of((3, 5.0)))[0] == ["3"]
    found = [float(y) for y in ticks(chart_of((0, 0.003), (1, 250.0), log_y=True))[1]]
    assert found[0] >= 0.003 / 2 and found[-1] <= 250 * 2 and 3 <= len(found) <= 10
    assert all(re.fullmatch(r"[125]e[+-]\d\d", f"{value:.0e}") for value in found)
    named = chart_of((0, 1.0), (1, 2.0), ticks=range(2), names=["US$", "a$ b"])
    assert ticks(named)[0] == ["US$", "a$ b"]


def test_an_axis_begins_at_zero_where_zero_is_near() -> None:
    assert ticks(chart_of((0, 1.0), (1, 10.0)))[1][0] == "0"
    assert float(ticks(chart_of((0, 9.0), (1, 10.0)))[1][0]) > 8
    assert ticks(chart_of((0, 9.0), (1, 10.0), from_zero=True))[1][0] == "0"


def test_a_thinned_line_keeps_its_spikes() -> None:
    points = [(step, 1.0) for step in range(100_000)]
    points[54_321] = (54_321, 99.0)
    points[77_777] = (77_777, -5.0)
    found = thinned(points)
    assert len(found) <= 500 and {(54_321, 99.0), (77_777, -5.0)} <= set(found)
    assert found == sorted(found) and thinned(points[:400]) == points[:400]


def test_log_only_for_wide_positive_values() -> None:
    assert needs_log([Line("", [(1, 0.1), (2, 10.0)])])
    assert not needs_log([Line("", [(1, 0.0), (2, 10.0)])])
    assert not needs_log([Line("", [(1, NAN)])])


def path_of(svg: str, place: int = 0) -> list[list[float]]:
    """The pixels of a line's path, one list for every unbroken part."""
    tree = ElementTree.fromstring(svg)
    lines = [
        e.get("d") or ""
        for e in tree.iter()
        if e.tag == "path" and "stroke: #4477aa" in (e.get("style") or "") and not e.get("id")
    ]
    return [
        [float(word) for word in re.findall(r"[\d.]+", part)]
        for part in lines[place].split("M")[1:]
    ]


def test_svg_places_points_by_their_values() -> None:
    chart = chart_of((0, 0.0), (5, 5.0), (10, 10.5))
    ((x0, y0, x1, y1, x2, y2),) = path_of(svg(chart))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert (y1 - y2) / (y0 - y1) == pytest.approx(1.1, abs=0.02)
    assert 0 < y2 < y1 < y0 < HEIGHT
    log = replace(chart, lines=[Line("a", [(1, 1.0), (2, 10.0), (4, 100.0)])], log_y=True)
    ((x0, y0, x1, y1, x2, y2),) = path_of(svg(replace(log, log_x=True)))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)


def test_a_missing_value_is_a_gap() -> None:
    line = Line("a", [(1, 1.0), (2, 2.0), (3, None), (4, NAN), (5, 2.0), (6, 1.0)])
    parts = path_of(svg(Chart("loss", "step", "nats", [line])))
    assert [len(part) for part in parts] == [4, 4]


def test_areas_are_stacked() -> None:
    """`a` lies on the axis, `b` on `a`; a missing value counts 0."""
    lines = [Line("a", [(0, 1.0), (1, 2.0)]), Line("b", [(0, 3.0), (1, None)])]
    chart = Chart("memory", "operation", "GiB", lines, kind="areas", limit=(9.0, "a GPU"))
    drawn = svg(chart)
    assert "a GPU" in drawn
    areas = re.findall(r'<path[^>]* d="([^"]*)"[^>]*style="fill: #(?:4477aa|ee6677)"', drawn)
    one, two = ({float(y) for y in re.findall(r"[\d.]+ ([\d.]+)", area)} for area in areas)
    ground, a0, a1 = sorted(one, reverse=True)
    (b0,) = two - one
    assert two - {b0} <= {a0, a1} and ground - b0 == pytest.approx(4 * (ground - a0), abs=0.1)


def test_a_picture_of_areas_says_what_begins_where(tmp_path: Path) -> None:
    """Every kind of tensor has a colour of its own."""
    kinds = [Line(kind, [(0, 1.0), (9, 2.0)]) for kind in KINDS]
    begins = [(0, "forward"), (4, "backward")]
    chart = Chart("memory", "operation", "GiB", kinds, kind="areas", begins=begins)
    write_picture(chart, tmp_path / "memory.svg")
    drawn = (tmp_path / "memory.svg").read_text()
    assert [drawn.count(f">{name}<") for name in ("forward", "backward", *KINDS)] == [1] * 14
    assert len({*re.findall('<path[^>]*"fill: #([0-9a-f]{6})"', drawn)} - {"ffffff"}) == len(KINDS)


def test_dots_say_their_values() -> None:
    lines = [Line("a", [(1, 0.5), (2, None), (3, 1.5)], dots=True), Line("b", [(1, 2.0)])]
    found = re.findall("<title>(.*?)</title>", svg(Chart("loss", "step", "nats", lines)))
    assert found == ["a 1: 0.5", "a 3: 1.5", "b 1: 2"]


def test_names_cannot_leave_the_page() -> None:
    name = '<script>alert("1")</script>'
    lines = [Line(name, [(1, 1.0), (2, 2.0)], dots=True)]
    chart = Chart(name, name, name, lines, ticks=[1, 2], names=[name, "b"])
    drawn = figure(chart)
    assert "<script" not in drawn and "&lt;script&gt;" in drawn
    ElementTree.fromstring(drawn)  # well-formed


def test_an_empty_chart_says_so() -> None:
    assert "nothing was logged" in figure(Chart("loss", "step", "nats", [Line("a", [(1, NAN)])]))


def test_png(tmp_path: Path) -> None:
    lines = [Line("a", [(1, 1.0), (2, None), (4, 4.0)], dots=True)]
    chart = Chart("loss", "batch", "nats", lines, log_x=True, ticks=[1, 2, 4], limit=(2.0, "limit"))
    write_picture(chart, tmp_path / "new/loss.png")
    data = (tmp_path / "new/loss.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 5000
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["loss.png"]


def test_svg_file_is_the_same_each_time(tmp_path: Path) -> None:
    chart = Chart("loss", "update", "nats", [Line("a", [(1, 1.0), (2, 0.5)])], log_y=True)
    for name in ("one.svg", "two.svg"):
        write_picture(chart, tmp_path / name)
    one, two = ((tmp_path / name).read_text() for name in ("one.svg", "two.svg"))
    assert one == two and one.count(">loss<") == 1
    ElementTree.fromstring(one)  # well-formed


def test_a_picture_of_many_long_names_has_room_for_lines(tmp_path: Path) -> None:
    """Three hundred held-out sets: matplotlib warned, and drew no axes beside their names."""
    lines = [Line(f"{name} {'long ' * 90}", [(1, 1.0), (2, 2.0)]) for name in range(300)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_picture(Chart("loss", "step", "loss", lines), tmp_path / "loss.svg")
