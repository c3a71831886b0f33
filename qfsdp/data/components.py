"""Tokenizer and datasets as a config names them: checked before anything is read, then built."""

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
    """Finds what is wrong with what a run reads its samples with, without reading any.

    Raises:
        UserError: see `Component.check` and `check_source`; or the tokenizer's `path` does not
            exist.
    """
    tokenizer.check("tokenizer")
    path = tokenizer.kwargs.get("path")
    if path and not Path(path).expanduser().exists():
        raise UserError(f"tokenizer.path: '{path}' does not exist")
    check_dataset("dataset", dataset)
    for name, held_out in validation_sets.items():
        check_dataset(f"validation.sets.{name}", held_out)


def check_dataset(key: str, dataset: Component) -> None:
    """Finds what is wrong with a dataset, and with those that it is mixed of, without reading any.

    Args:
        key: its place in the config, for the messages.

    Raises:
        UserError: see `Component.check` and `check_source`.
    """
    dataset.check(key, provided=["tokenizer"])
    if "source" in dataset.kwargs:
        check_source(f"{key}.source", dataset.kwargs["source"])
    for name, part in parts_of(key, dataset.kwargs.get("sets")).items():
        check_dataset(f"{key}.sets.{name}", part)


def parts_of(key: str, sets: Any) -> dict[str, Component]:
    """Name -> dataset of those that dataset `key` is mixed of, given its argument `sets`.

    Raises:
        UserError: one of them is no component.
    """
    from qfsdp.cli.convert import as_component  # not above: it needs more packages than data does

    if not isinstance(sets, Mapping):
        return {}
    return {name: as_component(value, f"{key}.sets.{name}") for name, value in sets.items()}


def build_dataset(key: str, dataset: Component, tokenizer: Any) -> Any:
    """Builds a dataset.

    Raises:
        UserError: as the builder does, which says `dataset` for what is `key` in the config.
    """
    try:
        return dataset.build(tokenizer=tokenizer)
    except UserError as error:
        text = str(error)
        if text.startswith("dataset."):
            raise UserError(key + text.removeprefix("dataset")) from error
        raise
