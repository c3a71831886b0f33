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
from math import prod
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.common.messages import first_line, flat
from qfsdp.config.load import load_config, resolved_yaml
from qfsdp.config.recipe_files import find_config
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

    @property
    def name(self) -> str:
        """The point in a line: "batch_size=4 method=QDoRA"."""
        return " ".join(f"{axis}={value}" for axis, value in self.point.items())


Choices = dict[str, tuple[Any, dict[str, Any]]]  # name of a value -> how it is shown, its changes


def config_file(key: str, name: str) -> str:
    """The path of the config that `key` of a sweep names; raises UserError."""
    found = find_config(name)
    if found is None:
        raise UserError(f"{key}: '{name}' is no config; expected one that `qfsdp ls` lists")
    return found


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
    given = flat(grid, is_value=_is_axis)
    axes = {name: choices_of(name, values) for name, values in given.items()}
    if not axes and not points:
        raise UserError("grid: {}; expected at least one axis with values, or points")
    count = len(points) + (prod(map(len, axes.values())) if axes else 0)
    if count > MOST_CELLS:
        raise UserError(f"grid: {count:,} cells; expected at most {MOST_CELLS:,}")
    for choices in axes.values():
        for _, changes in choices.values():
            _cell(training, "grid", {}, changes, about)
    found = []
    for chosen in product(*(choices.values() for choices in axes.values())) if axes else ():
        point = {axis: shown for axis, (shown, _) in zip(axes, chosen, strict=True)}
        merged = {k: v for _, changes in chosen for k, v in changes.items()}
        found.append(_cell(training, "grid", point, merged, about, together=len(axes) > 1))
    for at, given in enumerate(points):
        place = f"points[{at}]"
        found.append(_cell(training, place, *_point(place, given, axes), about))
    unique = dict[str, Cell]()
    for cell in found:  # a point that is in the grid stays there, in its place
        unique.setdefault(cell.key, cell)
    return list(unique.values())


def _is_axis(value: dict[str, Any]) -> bool:
    """Whether a mapping in a grid is an axis with choices: all of them are mappings."""
    return all(isinstance(changes, dict) for changes in value.values())


def choices_of(axis: str, values: Any) -> Choices:
    """The values of an axis by their names. Raises UserError."""
    if isinstance(values, dict) and values:
        return {str(name): (str(name), flat(changes)) for name, changes in values.items()}
    if not isinstance(values, list) or not values:
        expected = "a list of values, or choices by name with their changes"
        raise UserError(f"grid.{axis}: {values!r} is not valid; expected {expected}")
    found = {json.dumps(value): (value, {axis: value}) for value in values}
    if len(found) < len(values):
        raise UserError(f"grid.{axis}: {values!r} has a value twice; expected different values")
    return found


def _point(
    place: str, given: dict[str, Any], axes: dict[str, Choices]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A point, and its changes; a value of an axis with choices is the name of one."""
    point, merged = flat(given), dict[str, Any]()
    for name, value in point.items():
        choices = axes.get(name, {})
        if any(name not in changes for _, changes in choices.values()):
            if str(value) not in choices:
                expected = f"one of {', '.join(choices)}"
                raise UserError(f"{place}.{name}: {value!r} is not valid; expected {expected}")
            merged |= choices[str(value)][1]
        else:
            merged[name] = value
    if not given:
        raise UserError(f"{place}: {{}}; expected at least one key with its value")
    return point, merged


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
        refused = first_line(error)
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
