"""Durations as text: "20s", "10min", "2h", 600."""

from __future__ import annotations

import math
import re

_SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600}
_LONGEST = 366 * 24 * 3600.0


def parse_duration(text: str | float) -> float:
    """Seconds of "20s", "10min", "2h" or a plain number of seconds. Raises ValueError: the text is
    not a duration, or not above 0 and at most a year."""
    match = re.fullmatch(r"\s*([0-9.e+-]+)\s*([a-z]*)\s*", str(text))
    try:
        seconds = float(match[1]) * _SECONDS[match[2]] if match else math.nan
    except (ValueError, KeyError):
        seconds = math.nan
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"{text!r}; expected a duration such as 20s, 10min, 2h or seconds")
    return seconds


def format_duration(seconds: float) -> str:
    """ "45 s", "10 min" or "2.5 h"."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
