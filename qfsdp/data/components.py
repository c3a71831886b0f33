"""Checks and builds the tokenizer and the datasets that a config names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qfsdp.common.errors import UserError
from qfsdp.data.files.rows import check_source
from qfsdp.data.reading import current, reading, split_reading
from qfsdp.data.row_forms import check_columns_of
from qfsdp.data.token_ids import check_tokenizer_ids, with_checked_ids
from qfsdp.hub.download import local_folder

if TYPE_CHECKING:
    from qfsdp.config.component import Component


def check_data(
    tokenizer: Component,
    dataset: Component,
    validation_sets: Mapping[str, Component],
    rows: int | None = None,
) -> Any:
    """Checks the tokenizer and all datasets of a config; reads the beginnings of data files.

    Args:
        validation_sets: name -> dataset, from the config's `validation.sets`.
        rows: of the model's embedding, to check the tokenizer's ids; None: no check.

    Returns:
        The tokenizer; None without `rows`.

    Raises:
        UserError: `Component.check` or `check_source` finds a mistake, the tokenizer's `path` does
            not exist, the tokenizer cannot be built, or the embedding lacks rows for its ids.
    """
    tokenizer.check("tokenizer")
    path = tokenizer.kwargs.get("path")
    if path and not local_folder(path).exists():
        raise UserError(f"tokenizer.path: '{path}' does not exist; expected a folder or a file")
    check_dataset("dataset", dataset)
    for name, held_out in validation_sets.items():
        check_dataset(f"validation.sets.{name}", held_out)
    if rows is None:
        return None
    built = tokenizer.build()
    check_tokenizer_ids(built, rows)
    return built


def check_dataset(key: str, dataset: Component) -> None:
    """Checks a dataset and, if it is a mixture, its parts; reads the first rows of a file.

    Args:
        key: the dataset's place in the config, for the messages.

    Raises:
        UserError: `Component.check` or `check_source` finds a mistake.
    """
    how, dataset = split_reading(key, dataset)
    dataset.check(key, provided=["tokenizer"])
    if "source" in dataset.kwargs:
        check_source(f"{key}.source", dataset.kwargs["source"])
        check_columns_of(key, dataset)
    with reading(how):
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
    from qfsdp.config.convert import as_component  # needs OmegaConf; this package needs torch only

    if not isinstance(sets, Mapping):
        return {}
    return {name: as_component(value, f"{key}.sets.{name}") for name, value in sets.items()}


def build_dataset(
    key: str, dataset: Component, tokenizer: Any, rows: int | None = None, limit: Any = None
) -> Any:
    """Builds a dataset.

    Args:
        rows: of the model's embedding, to check token ids: all now, or of a dataset that does not
            hold them, each sample's when it is read. None: no check.
        key: the dataset's place in the config. Builders write messages that begin with
            `dataset.`; that prefix is replaced by `key`.
        limit: of preferences, see `build_preferences`.

    Raises:
        UserError: the builder does.
    """
    how, dataset = split_reading(key, dataset)
    limit = limit or current().limit  # the parts of a mixture inherit it
    try:
        with reading(replace(how, tokenizer=tokenizer, embedding_rows=rows, limit=limit)):
            built = dataset.build(tokenizer=tokenizer)
    except UserError as error:
        text = str(error)
        if text.startswith("dataset."):
            raise UserError(key + text.removeprefix("dataset")) from error
        raise
    if getattr(built, "limit", "") is None:  # of preferences outside of `build_preferences`
        raise UserError(
            f"{key}: {dataset.path} has preferences; expected a dataset of answers, or "
            "recipes/dpo_distributed"
        )
    return built if rows is None else with_checked_ids(key, built, rows, tokenizer)
