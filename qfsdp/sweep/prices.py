"""Prices of GPUs per hour, from a file that the user edits, and what they make of a cell."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qfsdp.common.errors import UserError
from qfsdp.common.files import why
from qfsdp.planning.hardware import known_name


@dataclass(frozen=True)
class Price:
    """The price of a GPU: US dollars per hour, when it was read, and where."""

    usd_per_hour: float
    date: str
    source: str


def read_prices(file: Path) -> dict[str, Price]:
    """Name of a GPU -> its price, from a YAML file:

        rtx4090: {usd_per_hour: 0.39, date: 2026-09-20, source: https://...}

    Raises:
        UserError: the file cannot be read; or an entry has another form, no date or no source.
    """
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"prices: '{file}' cannot be read: {why(error)}") from None
    except (ValueError, yaml.YAMLError, RecursionError):
        raise UserError(f"prices: '{file}' is not valid; expected YAML") from None
    if not isinstance(tree, dict):
        raise UserError(f"prices: '{file}' is not valid; expected GPUs with their prices")
    return {_gpu(str(name)): _price(file, str(name), entry) for name, entry in tree.items()}


def _gpu(name: str) -> str:
    try:
        return known_name(name)
    except UserError as error:
        raise UserError(f"prices: {error}") from None


def _price(file: Path, name: str, entry: Any) -> Price:
    fields = {"usd_per_hour", "date", "source"}
    if not isinstance(entry, dict) or set(entry) != fields:
        expected = "usd_per_hour, date and source"
        raise UserError(f"prices: {file}: {name}: {entry!r} is not valid; expected {expected}")
    value, date = entry["usd_per_hour"], entry["date"]
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise UserError(f"prices: {file}: {name}: {value!r}; expected US dollars above 0")
    if not isinstance(date, datetime.date):
        raise UserError(f"prices: {file}: {name}: date {date!r}; expected a day as 2026-09-20")
    return Price(float(value), date.isoformat(), str(entry["source"]))


def costs(row: dict[str, Any], price: Price | None, samples: int | None) -> dict[str, float]:
    """What a cell's whole run takes: "seconds_per_run", "usd_per_1000_samples", "usd_per_run".

    Returns {} without a speed; no dollars without a price, no run without its number of samples.

    Args:
        row: a result, with "ranks".
        samples: of a whole run that was not measured; None: not known.
    """
    speed = row.get("samples_per_second")
    if not speed:
        return {}
    found = {}
    if (seconds := row.get("run_seconds", samples and samples / speed)) is not None:
        found["seconds_per_run"] = seconds
    if price is not None:
        per_second = price.usd_per_hour * row["ranks"] / 3600
        found["usd_per_1000_samples"] = 1000 * per_second / speed
        found |= {"usd_per_run": per_second * seconds} if seconds is not None else {}
    return found
