"""Tool recipes: their command line has the config of a training recipe and keys of their own.

    tune run recipes/find_fit --config configs/llama3_8b_lora.yaml gpu=rtx4090 batch_size=4
                                       training config             tool's key  training config's key

Keys of the tool's `Config` go to the tool; all others change the training config. The training
recipe is the one that the config belongs to (`qfsdp.config.recipe_files`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from types import ModuleType
from typing import Any, TypeVar

from qfsdp.common.errors import UserError, user_errors
from qfsdp.common.quiet import quiet_torchao
from qfsdp.config.load import load_config
from qfsdp.config.recipe_files import load_recipe, recipe_file_of

T = TypeVar("T")


@dataclass(frozen=True)
class Training:
    """A training recipe and its config; `argv` are the words that the config comes from."""

    recipe: ModuleType
    cfg: Any
    argv: list[str]


def run_tool(schema: type[T], main: Callable[[T, Training], None]) -> None:
    """Runs a tool recipe with the command line's config; the last line of its file.

    Ends the process with status 2 and one line on stderr after a UserError.
    """
    quiet_torchao()
    with user_errors():
        main(*read_tool_config(schema, sys.argv[1:]))


def read_tool_config(schema: type[T], argv: Sequence[str]) -> tuple[T, Training]:
    """Reads a tool's own config, a `schema`, and the training config. Raises UserError: as
    `load_config`; or the config belongs to a recipe that does not train."""
    own = {field.name for field in fields(schema)}  # type: ignore[arg-type]
    mine = [word for word in argv if word.partition("=")[0] in own]
    training = read_training([word for word in argv if word not in mine])
    # A tool has no config file.
    return load_config(schema, ["--config", os.devnull, *mine]), training


def read_training(argv: Sequence[str]) -> Training:
    """Loads the recipe and the config of `--config FILE [key=value ...]`. Raises UserError as
    `read_tool_config`."""
    apart = (w.split("=", 1) if w.startswith("--config=") else [w] for w in argv)
    words = [part for parts in apart for part in parts]
    path = next((b for a, b in pairwise(words) if a == "--config"), "")
    file = recipe_file_of(path)
    recipe = load_recipe(file)
    if not hasattr(recipe, "train_step"):
        name = os.path.basename(file).removesuffix(".py")
        raise UserError(f"{path}: it belongs to recipes/{name}, which trains nothing")
    return Training(recipe, load_config(recipe.Config, words), words)
