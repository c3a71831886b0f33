"""Checks and builds the tokenizer and the datasets that a config names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfsdp.cli.errors import UserError
from qfsdp.data.rows import check_source

if TYPE_CHECKING:
    from qfsdp.cli.component import Component


def check_data(
    tokenizer: Component, dataset: Component, validation_sets: Mapping[str, Component]
) -> None:
    """Checks the tokenizer and all datasets of a config without reading any row.

    Args:
        validation_sets: name -> dataset, from the config's `validation.sets`.

    Raises:
        UserError: `Component.check` or `check_source` finds a mistake, or the tokenizer's `path`
            does not exist.
    """
    tokenizer.check("tokenizer")
    path = tokenizer.kwargs.get("path")
    if path and not Path(path).expanduser().exists():
        raise UserError(f"tokenizer.path: '{path}' does not exist; expected a folder or a file")
    check_dataset("dataset", dataset)
    for name, held_out in validation_sets.items():
        check_dataset(f"validation.sets.{name}", held_out)


def check_dataset(key: str, dataset: Component) -> None:
    """Checks a dataset and, if it is a mixture, its parts, without reading any row.

    Args:
        key: the dataset's place in the config, for the messages.

    Raises:
        UserError: `Component.check` or `check_source` finds a mistake.
    """
    dataset.check(key, provided=["tokenizer"])
    if "source" in dataset.kwargs:
        check_source(f"{key}.source", dataset.kwargs["source"])
    for name, part in parts_of(key, dataset.kwargs.get("sets")).items():
        check_dataset(f"{key}.sets.{name}", part)


def parts_of(key: str, sets: Any) -> dict[str, Component]:
    """The parts of a mixture, by name.

    Args:
        key: the mixture's place in the config, for the messages.
        sets: its argument `sets`. Anything but a mapping has no parts.

    Raises:
        UserError: a part is not a component.
    """
    from qfsdp.cli.convert import as_component  # needs OmegaConf; this package needs torch only

    if not isinstance(sets, Mapping):
        return {}
    return {name: as_component(value, f"{key}.sets.{name}") for name, value in sets.items()}


def build_dataset(key: str, dataset: Component, tokenizer: Any) -> Any:
    """Builds a dataset.

    Args:
        key: the dataset's place in the config. Builders write messages that begin with
            `dataset.`; that prefix is replaced by `key`.

    Raises:
        UserError: the builder does.
    """
    try:
        return dataset.build(tokenizer=tokenizer)
    except UserError as error:
        text = str(error)
        if text.startswith("dataset."):
            raise UserError(key + text.removeprefix("dataset")) from error
        raise
