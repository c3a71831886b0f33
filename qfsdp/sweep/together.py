"""Cells that differ in their adapters alone, trained in one run of recipes/several_adapters.

The base is in memory once, and read once a step for all of them. Each cell is the adapter of its
key there, and has its share of the run's time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import yaml

from qfsdp.common.errors import UserError
from qfsdp.common.files import write_text, writing
from qfsdp.config.load import config_of, over_defaults, to_yaml
from qfsdp.config.recipe_files import find_recipe, load_recipe
from qfsdp.config.tool_config import Training
from qfsdp.sweep.cells import Cell
from qfsdp.sweep.measure_cell import Runs
from qfsdp.sweep.results import Row

RECIPE = "recipes/several_adapters"
OWN = ("optimizer.lr", "seed")
"""Keys that adapters of one run have beside those of their section `adapter`."""
COMMON = "expected the same in all cells, but adapter.*, optimizer.lr and seed"
HINT = "these cells differ in their adapters alone: together=true trains them in one run"


def can_be_together(training: Training, cells: Sequence[Cell]) -> bool:
    """Whether one run can train all cells."""
    try:
        one_config(training, cells)
    except UserError:
        return False
    return len(cells) > 1


def one_config(training: Training, cells: Sequence[Cell]) -> dict[str, Any]:
    """The config of a run of recipes/several_adapters that trains all cells, as a tree.

    Raises:
        UserError: the cells differ in other keys, or that recipe refuses them.
    """
    schema = _recipe()[1].Config
    own = {field.name for field in fields(schema)}
    given = yaml.safe_load(to_yaml(training.cfg))
    tree = {key: value for key, value in given.items() if key in own}
    defaults = over_defaults(training.recipe.Config, {})
    for key in given.keys() - own - {"adapter"}:
        if given[key] != defaults.get(key):
            now, usual = (json.dumps(tree.get(key)) for tree in (given, defaults))
            expected = f"expected {usual}, as {RECIPE} has no such key"
            raise UserError(f"together: true, and {key} is {now}; {expected}")
    tree["adapters"] = adapters = {}
    for cell in cells:
        if cell.error:
            raise UserError(f"together: true, and a cell is refused: {cell.error}")
        for key in cell.changes:
            if key not in OWN and not key.startswith("adapter."):
                raise UserError(f"together: true, and the grid has {key}; {COMMON}")
        one = yaml.safe_load(to_yaml(cell.cfg))
        rate = one["optimizer"].get("lr")
        rates = {} if isinstance(rate, str) else {"lr": rate}
        adapters[cell.key] = one["adapter"] | rates | {"seed": one["seed"]}
    config_of(schema, RECIPE, over_defaults(schema, tree))
    return tree


def _recipe() -> tuple[str, Any]:
    file = find_recipe(RECIPE)
    assert file is not None
    return file, load_recipe(file)


def train_together(runs: Runs, cells: Sequence[Cell]) -> list[Row]:
    """Trains all cells in one run, or what is left of it, and evaluates each; their results."""
    names = hashlib.sha256(" ".join(cell.key for cell in cells).encode()).hexdigest()[:12]
    folder = runs.folder / f"together-{names}"
    config, tree = folder / "several.yaml", one_config(runs.training, cells)
    with writing("output_dir", folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(config, yaml.safe_dump(tree, sort_keys=False))
    words = [*runs.torchrun, _recipe()[0], "--config", str(config)]
    if failure := runs.train(words, folder):
        return [failure for _ in cells]
    return [
        runs.finished(
            cell,
            folder,
            [f"adapter={folder / 'adapters' / cell.key}"],
            folder / f"{cell.key}.json",
            of_several=len(cells),
        )
        for cell in cells
    ]
