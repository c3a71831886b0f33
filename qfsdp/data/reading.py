"""How a dataset is read: by how many processes, through which cache, or as a stream.

These keys stand beside the arguments of every dataset builder of qfsdp:

    dataset: {_component_: qfsdp.data.chat_dataset, source: chats.jsonl, processes: 8}

`build_dataset` takes them off and holds them in `current()` while the builder runs, so no builder
has to pass them on. The parts of a mixture inherit those of the mixture.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from qfsdp.common.devices import cores
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.config.component import FURTHER_KEYS, further_keys

if TYPE_CHECKING:
    from qfsdp.config.component import Component

MOST_PROCESSES = 64

T = TypeVar("T")


@dataclass(frozen=True)
class ReadingKeys:
    """How the rows of one dataset become tokens.

    Fields:
        processes: that tokenize. Null: this process and, for data that takes longer than a few
            seconds, one process per core, shared by the ranks of a machine, at most 64.
        tokenized_cache: the folder of tokenized datasets. "auto": `qfsdp-tokens` in the cache of
            `datasets` ($HF_DATASETS_CACHE). Null: tokens stay in the memory of every rank.
        streaming: read and tokenize while training, for data larger than the disk. Needs
            `max_steps`, because the number of rows is not known.
        shuffle_buffer: rows of a stream that are shuffled and packed together.
    """

    processes: int | None = None
    tokenized_cache: str | None = "auto"
    streaming: bool = False
    shuffle_buffer: int = 10_000

    def check(self) -> None:
        """Raises InvalidField."""
        for name, most in (("processes", MOST_PROCESSES), ("shuffle_buffer", 10**7)):
            value = getattr(self, name)
            may_be_null = name == "processes" and value is None
            if not may_be_null and (type(value) is not int or not 1 <= value <= most):
                expected = f"an integer from 1 to {most}" + ", or null" * (name == "processes")
                raise InvalidField(name, value, expected)
        if type(self.streaming) is not bool:
            raise InvalidField("streaming", self.streaming, "true or false")
        folder = self.tokenized_cache
        if folder is not None and (type(folder) is not str or not folder):
            raise InvalidField("tokenized_cache", folder, "auto, a folder, or null")


@dataclass(frozen=True)
class Reading(ReadingKeys):
    """`ReadingKeys`, and for which dataset.

    Fields:
        builder: the component and its arguments, without these keys; part of the cache's key.
        tokenizer: that the builder uses; part of the key too.
        embedding_rows: of the model, if they are known.
        limit: of preferences (`RowLimit`), or None.
    """

    builder: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    embedding_rows: int | None = None
    limit: Any = None

    @property
    def cache_folder(self) -> Path | None:
        """The folder of tokenized datasets; None: no cache, or no builder that could be its key."""
        if self.tokenized_cache is None or not self.builder:
            return None
        if self.tokenized_cache != "auto":
            return Path(self.tokenized_cache).expanduser()
        from datasets.config import HF_DATASETS_CACHE

        return Path(HF_DATASETS_CACHE) / "qfsdp-tokens"

    @property
    def most_processes(self) -> int:
        """How many processes may tokenize on behalf of this rank."""
        if self.processes is not None:
            return self.processes
        # One rank tokenizes for all of its machine, so it may use the cores of all.
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if self.cache_folder is None else 1
        return max(1, min(cores() // ranks, MOST_PROCESSES))


KEYS = tuple(key.name for key in fields(ReadingKeys))
NOT_IN_RESULTS = ("processes", "tokenized_cache")
"""Keys that change no sample, so a resumed run may have other values."""

_current: ContextVar[Reading | None] = ContextVar("reading", default=None)


def current() -> Reading:
    """How the dataset that is being built is read. Outside of `build_dataset`: without a cache."""
    return _current.get() or Reading(tokenized_cache=None)


@contextmanager
def reading(how: Reading) -> Iterator[None]:
    """Makes `how` the current one within the `with` block."""
    token = _current.set(how)
    try:
        yield
    finally:
        _current.reset(token)


def reads_rows(builder: T) -> T:
    """Decorates a builder of datasets that calls `tokenize_rows`: a config may give it these keys
    besides its arguments."""
    setattr(builder, FURTHER_KEYS, ReadingKeys)
    return builder


def split_reading(key: str, dataset: Component) -> tuple[Reading, Component]:
    """How a dataset is read, and the component without these keys.

    Args:
        key: the dataset's place in the config, for messages.

    Raises:
        UserError: a key has a value that is not valid.
    """
    if further_keys(dataset.resolve(key)) is None:
        return Reading(), dataset
    given = {name: value for name, value in dataset.kwargs.items() if name in KEYS}
    rest = {name: value for name, value in dataset.kwargs.items() if name not in KEYS}
    inherited = {name: getattr(current(), name) for name in KEYS} if current().builder else {}
    how = Reading(**{**inherited, **given}, builder={"_component_": dataset.path, **rest})
    try:
        how.check()
    except InvalidField as error:
        raise UserError(f"{key}.{error}") from None
    if how.streaming and "sets" in rest:
        raise UserError(f"{key}.streaming: true; expected a dataset with one source, no mixture")
    if how.streaming and key != "dataset":
        raise UserError(f"{key}.streaming: true; expected false: only section dataset is streamed")
    return how, replace(dataset, kwargs=rest)
