"""Token ids against the rows of the model's embedding.

An id without a row is an IndexError on the CPU, and on an accelerator an assertion that ends the
process without naming the sample. A tokenizer may have more ids than the model has rows, as those
of some models do (an image token in a text model): only ids that are used are refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from qfsdp.common.errors import UserError
from qfsdp.data.stream import StreamedDataset


def check_tokenizer_ids(
    tokenizer: Any, rows: int, datasets: Mapping[str, Any] | None = None
) -> None:
    """Checks the ids that any text may have, and bos, eos and pad, before a row is read.

    Args:
        tokenizer: `hf_tokenizer(...)`, or any other with some of its attributes.
        rows: of the embedding, the model's `vocab_size`.
        datasets: key -> dataset. Those that hold all tokens in one array are checked too.

    Raises:
        UserError: an id has no row.
    """
    ordinary = getattr(tokenizer, "base_vocab_size", None)
    if ordinary is not None and ordinary > rows:
        raise UserError(
            f"tokenizer: {ordinary} token ids, the largest is {_shown(ordinary - 1, tokenizer)}; "
            f"expected at most {rows}, the rows of the model's embedding"
        )
    for name in ("bos_id", "eos_id", "pad_id"):
        index = getattr(tokenizer, name, None)
        if index is not None and not -1 <= index < rows:  # sentencepiece has -1 for "none"
            raise UserError(f"tokenizer: {name} is {_expected(index, tokenizer, rows)}")
    for key, dataset in (datasets or {}).items():
        _check_array(key, dataset, rows, tokenizer)


def check_ids(place: str, ids: Any, rows: int, tokenizer: Any = None) -> None:
    """Raises UserError if one of `ids` has no row in an embedding of `rows`.

    Args:
        place: of the ids, for the message.
    """
    found = np.asarray(ids)
    if found.size and not (found.min() >= 0 and found.max() < rows):
        index = int(found[(found < 0) | (found >= rows)][0])
        raise UserError(f"{place}: token id {_expected(index, tokenizer, rows)}")


def with_checked_ids(key: str, dataset: Any, rows: int, tokenizer: Any = None) -> Any:
    """The dataset, after a check of all its ids or with a check of each sample that is read.

    Args:
        key: the dataset's place in the config, for messages.
        dataset: a map-style dataset. qfsdp's hold all tokens in one array, which is checked at
            once: 0.1 s for 100 million tokens.

    Raises:
        UserError: an id has no row in the embedding.
    """
    if isinstance(dataset, StreamedDataset):
        return dataset.checked(lambda block: _check_array(key, block, rows, tokenizer))
    for name, part in getattr(dataset, "parts", {"": dataset}).items():
        if not _check_array(f"{key}.sets.{name}" if name else key, part, rows, tokenizer):
            return CheckedIds(key, dataset, rows, tokenizer)
    return dataset


def _check_array(key: str, dataset: Any, rows: int, tokenizer: Any) -> bool:
    """Checks all ids of a dataset that holds them in one array; False for any other dataset."""
    tokens = getattr(dataset, "tokens", None)
    if not isinstance(tokens, array | np.ndarray | torch.Tensor):
        return False
    smallest, largest = getattr(dataset, "id_range", None) or (-1, rows)
    if smallest >= 0 and largest < rows:
        return True
    try:
        check_ids(key, np.asarray(tokens), rows, tokenizer)
    except UserError:  # names the sample
        for number in range(len(dataset)):
            check_ids(f"{key}: sample {number + 1}", dataset[number]["tokens"], rows, tokenizer)
    return True


class CheckedIds:
    """A dataset whose samples are checked when they are read; see `with_checked_ids`."""

    def __init__(self, key: str, dataset: Any, rows: int, tokenizer: Any) -> None:
        self._key, self._dataset = key, dataset
        self._rows, self._tokenizer = rows, tokenizer

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        sample = self._dataset[index]
        place = f"{self._key}: sample {index + 1}"
        if not isinstance(sample, Mapping) or "tokens" not in sample:
            kind = type(sample).__name__
            raise UserError(f"{place}: a {kind} without tokens; expected tokens and labels")
        check_ids(place, sample["tokens"], self._rows, self._tokenizer)
        return sample


def _expected(index: int, tokenizer: Any, rows: int) -> str:
    shown = _shown(index, tokenizer)
    return f"{shown}; expected 0 to {rows - 1}: the model's embedding has {rows} rows"


def _shown(index: int, tokenizer: Any) -> str:
    """An id with its text, if the tokenizer has one for it."""
    try:
        text = tokenizer.decode([index], skip_special_tokens=False)
    except Exception:  # an id that the tokenizer does not have, or another interface
        return str(index)
    return f"{index} ({text!r})" if text else str(index)
