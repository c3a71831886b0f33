"""The fields beside the bar, at every width and for large numbers."""

from __future__ import annotations

import pytest

from qfsdp.training import step_display
from qfsdp.training.step_display import LEAST_BAR, MOST_BAR, Pace, duration, fit, short_fields

METRICS = {
    "loss": 12.3456,
    "grad_norm": 123.456,
    "lr": 2.345e-5,
    "tokens_per_second_per_rank": 41234.0,
    "slot_efficiency": 0.7,
    "peak_memory_gib": 123.4,
    "memory/gradients_gib": 1.0,
}


def test_five_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    fields = short_fields(METRICS)
    assert fields == ["loss 12.35", "norm 123", "lr 2.3e-5", "41k tok/s", "123 GiB"]
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert short_fields(METRICS)[3] == "2.6M tok/s"  # of all ranks


def test_a_bar_fits_and_does_not_collapse() -> None:
    fields = ["2d 13:05 left", *short_fields(METRICS)]
    for columns in range(30, 300):
        count = "120000/300000"
        text, width = fit(count, fields, columns)
        assert len(f"{count} |{'x' * width}| {text}") <= columns
        assert width >= LEAST_BAR or not text
        assert width <= MOST_BAR
    text, width = fit("120000/300000", fields, 160)
    assert text == "  ".join(fields) and width == MOST_BAR


def test_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(step_display.time, "perf_counter", lambda: now[0])
    pace = Pace(10)
    for step, seconds in enumerate([300, 2, 4], start=1):
        now[0] += seconds
        pace.advance()
        left = {1: [], 2: ["0:16 left"], 3: ["0:21 left"]}[step]
        assert pace.left(step) == left, "the first step compiles, and does not count"
    assert pace.left(10) == []


def test_durations() -> None:
    assert [duration(s) for s in (42, 860, 11120, 183900)] == [
        "0:42",
        "14:20",
        "3:05:20",
        "2d 03:05",
    ]
