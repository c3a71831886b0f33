"""The cells of a sweep: the points of a grid, each with the changes that it makes to a config.

A grid names axes. An axis is a key of the training config with its values, or a name with choices
that change several keys at once:

    grid:
      batch_size: [1, 2, 4]
      method:
        LoRA: {quantization.format: none, adapter.method: lora}
        QDoRA: {quantization.format: nf4, adapter.method: dora}

Keys of `OWN` belong to the sweep itself. Points are single cells in the same words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config, resolved_yaml
from qfsdp.config.tool_config import Training
from qfsdp.planning.hardware import known_name

OWN = ("gpu", "world_size")  # axes that are keys of the sweep, not of the training config
MOST_CELLS = 10_000
MOST_RANKS = 2**16


@dataclass(frozen=True)
class Cell:
    """One cell.

    Fields:
        point: axis -> value, or the name of a choice.
        changes: key of the training config -> value.
        own: key of the sweep -> value, of `OWN`.
        cfg: the training config with the changes; None if it refuses them together.
        words: the changes as `key=value` words.
        key: names the cell in results; another config has another key.
        in_grid: whether the cell comes from the grid; else from the points.
        error: why there is no `cfg`.
    """

    point: dict[str, Any]
    changes: dict[str, Any]
    own: dict[str, Any]
    cfg: Any
    words: list[str]
    key: str
    in_grid: bool
    error: str = ""


Choices = dict[str, dict[str, Any]]  # name of a value -> its changes


def make_cells(
    training: Training, grid: dict[str, Any], points: Sequence[dict[str, Any]], about: Any
) -> list[Cell]:
    """All cells, those of the grid first, each with its checked config.

    Every value of an axis and every point must suit the base config alone. What the config refuses
    of values of several axes together, such as offload under "ddp", is a cell with an error.

    Args:
        training: the base config, with the words that it was read from.
        grid, points: as the user gives them.
        about: what results also depend on, such as the mode; part of every key.

    Raises:
        UserError: no cells; an axis without values; a key or value that the config does not take.
    """
    axes = {name: choices_of(name, values) for name, values in flattened(grid).items()}
    if not axes and not points:
        raise UserError("grid: {}; expected at least one axis with values, or points")
    count = len(points)
    if axes:
        whole = 1
        for choices in axes.values():
            whole *= len(choices)
        count += whole
    if count > MOST_CELLS:
        raise UserError(f"grid: {count:,} cells; expected at most {MOST_CELLS:,}")
    for choices in axes.values():
        for choice in choices.values():
            _cell(training, "grid", {}, choice["changes"], about)
    wanted: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    if axes:
        for names in product(*(choices.values() for choices in axes.values())):
            point = {axis: choice["shown"] for axis, choice in zip(axes, names, strict=True)}
            merged = {k: v for choice in names for k, v in choice["changes"].items()}
            wanted.append(("grid", point, merged))
    for at, given in enumerate(points):
        wanted.append((f"points[{at}]", *_point(f"points[{at}]", given, axes)))
    found = [
        _cell(training, place, point, merged, about, together=place == "grid" and len(axes) > 1)
        for place, point, merged in wanted
    ]
    return list({cell.key: cell for cell in reversed(found)}.values())[::-1]


def flattened(grid: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The grid with nested keys as "section.name".

    `grid.adapter.rank=[4,8]` on the command line makes `{"adapter": {"rank": [4, 8]}}`.
    """
    found: dict[str, Any] = {}
    for name, value in grid.items():
        nested = isinstance(value, dict) and any(not isinstance(v, dict) for v in value.values())
        found |= flattened(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return found


def choices_of(axis: str, values: Any) -> Choices:
    """The values of an axis by their names. Raises UserError."""
    if isinstance(values, dict) and values:
        return {
            str(name): {"shown": str(name), "changes": flattened_changes(changes)}
            for name, changes in values.items()
        }
    if not isinstance(values, list) or not values:
        expected = "a list of values, or choices by name with their changes"
        raise UserError(f"grid.{axis}: {values!r} is not valid; expected {expected}")
    found = {json.dumps(value): {"shown": value, "changes": {axis: value}} for value in values}
    if len(found) < len(values):
        raise UserError(f"grid.{axis}: {values!r} has a value twice; expected different values")
    return found


def flattened_changes(changes: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Changes with nested keys as "section.name"."""
    found: dict[str, Any] = {}
    for name, value in changes.items():
        inner = isinstance(value, dict) and value
        key = f"{prefix}{name}"
        found |= flattened_changes(value, f"{key}.") if inner else {key: value}
    return found


def _point(
    place: str, given: dict[str, Any], axes: dict[str, Choices]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A point, and its changes; a value of an axis with choices is the name of one."""
    merged: dict[str, Any] = {}
    for name, value in flattened_changes(given).items():
        choices = axes.get(name, {})
        if name in axes and name not in next(iter(choices.values()))["changes"]:
            if str(value) not in choices:
                expected = f"one of {', '.join(choices)}"
                raise UserError(f"{place}.{name}: {value!r} is not valid; expected {expected}")
            merged |= choices[str(value)]["changes"]
        else:
            merged[name] = value
    if not given:
        raise UserError(f"{place}: {{}}; expected at least one key with its value")
    return flattened_changes(given), merged


def _cell(
    training: Training,
    place: str,
    point: dict[str, Any],
    merged: dict[str, Any],
    about: Any,
    together: bool = False,
) -> Cell:
    """A cell; raises UserError if the config refuses its changes, unless they are values of several
    axes `together`."""
    own = {name: merged[name] for name in OWN if name in merged}
    changes = {name: value for name, value in merged.items() if name not in OWN}
    words = [f"{name}={json.dumps(value)}" for name, value in changes.items()]
    cfg, refused = None, ""
    try:
        _check_own(own)
        cfg = load_config(training.recipe.Config, [*training.argv, *words])
    except UserError as error:
        if not together:
            raise UserError(f"{place}: {error}") from None
        refused = str(error)
    content = words if cfg is None else resolved_yaml(cfg)
    text = json.dumps([content, own, about], sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Cell(point, changes, own, cfg, words, key, place == "grid", refused)


def _check_own(own: dict[str, Any]) -> None:
    if "gpu" in own:
        known_name(str(own["gpu"]))
    ranks = own.get("world_size", 1)
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MOST_RANKS:
        expected = f"an integer from 1 to {MOST_RANKS:,}"
        raise UserError(f"world_size: {ranks!r} is not valid; expected {expected}")
