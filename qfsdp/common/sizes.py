"""Memory sizes and durations as text: "24GiB", "512 MB", 1073741824; "20s", "10min", "2h", 600."""

from __future__ import annotations

import math
import re

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text: str | int) -> int:
    """Bytes of "24GiB" (2**30), "24GB" (10**9) or a plain number of bytes. Raises ValueError: the
    text is not a size, or not above 0."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(text))
    unit = _UNITS.get((match[2] or "B").upper()) if match else None
    try:
        size = int(float(match[1]) * unit) if match and unit else 0
    except (ValueError, OverflowError):  # "1.2.3", or more digits than a float has
        size = 0
    if size < 1:
        raise ValueError(f"{text!r}; expected a size such as 24GiB, 500MB or a number of bytes")
    return size


def format_size(size: float) -> str:
    """ "1.50 GiB": in the unit with one to three digits before the point, GiB at most."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1000 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"


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
