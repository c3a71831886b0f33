"""Rows without conversations: token ids from another program's tokenizer run, which stay as they
are, and plain text, cut into windows with every token trained."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.data.batch import IGNORE_INDEX
from qfsdp.data.chat.messages import text_of
from qfsdp.data.files.rows import Row, load_rows, require_column
from qfsdp.data.reading import current, reads_rows
from qfsdp.data.row_forms import MASKS
from qfsdp.data.tokenized_dataset import (
    Sample,
    TokenizedDataset,
    Unusable,
    one_by_one,
    tokenize_rows,
)

TOKEN_COLUMNS = ("input_ids", "tokens")


@reads_rows
def pretokenized_dataset(
    tokenizer: Any,
    *,
    source: str,
    split: str = "train",
    subset: str | None = None,
    data_files: str | None = None,
    tokens_column: str | None = None,
    max_rows: int | None = None,
) -> TokenizedDataset:
    """Rows of token ids, as they are: nothing is added, and only padding is removed.

    Columns, each a list of integers of equal length per row:

        input_ids or tokens    the ids
        labels                 the id, or -100 where not trained; not shifted (optional)
        loss_mask              1 where trained (optional, instead of labels); TRL's
                               completion_mask and assistant_masks likewise: 1 in all that are there
        attention_mask         0 for padding, before or after the ids (optional)
        position_ids           only looked at: a row is one sample (optional)

    Without labels and masks every token is trained. Rows are cut to the tokenizer's
    `max_seq_len`. Rows without a trained token are skipped; one log line counts them.

    Args:
        tokenizer: of the model; used for its `max_seq_len` and for messages.
        source: a .jsonl, .json or .parquet file, a folder of them, a folder that `save_to_disk` of
            `datasets` wrote, or a hub name.
        split, subset, data_files, max_rows: as in `load_rows`.
        tokens_column: column with the ids. Null: "input_ids", or else "tokens".

    Raises:
        UserError: the source or a column is wrong; a row has values that are no ids of the model,
            or columns of different lengths. The message names the row.
    """
    rows = load_rows(source, split, subset, data_files, max_rows)
    names = list(rows.column_names)
    ids_column = tokens_column or next((n for n in TOKEN_COLUMNS if n in names), TOKEN_COLUMNS[0])
    require_column("tokens_column", ids_column, rows, source)
    mask = next((name for name in MASKS if name in names), None)
    if mask and "labels" in names:
        raise UserError(
            f"dataset.source: {source} has the columns labels and {mask}; expected one of them"
        )
    limit: int | None = getattr(tokenizer, "max_seq_len", None)
    most = current().embedding_rows

    def samples_of(row: Row) -> Iterator[Sample]:
        tokens, labels = (part[:limit] for part in _sample(row, ids_column, most))
        # The first label is not a target: no token comes before it.
        if all(label == IGNORE_INDEX for label in labels[1:]):
            raise Unusable(f"no trained token (max_seq_len {limit})")
        yield tokens, labels

    return tokenize_rows(rows, source, one_by_one(samples_of), limit)


def _sample(row: Row, ids_column: str, most: int | None) -> Sample:
    """Tokens and labels of a row, without padding."""
    tokens = _integers(row, ids_column, 0, most)
    labels = tokens
    if row.get("labels") is not None:
        labels = _integers(row, "labels", IGNORE_INDEX, most, len(tokens))
    for name in (name for name in MASKS if row.get(name) is not None):
        mask = _integers(row, name, 0, 2, len(tokens))
        labels = [a if flag else IGNORE_INDEX for a, flag in zip(labels, mask, strict=True)]
    kept = slice(None)
    if row.get("attention_mask") is not None:
        kept = _without_padding(_integers(row, "attention_mask", 0, 2, len(tokens)))
    if row.get("position_ids") is not None:
        places = _integers(row, "position_ids", 0, None, len(tokens))[kept]
        if any(after != before + 1 for before, after in pairwise(places)):
            found = f"position_ids: {str(places)[:60]}: several samples"
            raise UserError(f"{found}; expected one a row, and packed=true to join them")
    return tokens[kept], labels[kept]


def _integers(
    row: Row, column: str, least: int, most: int | None, length: int | None = None
) -> list[int]:
    """A cell that is a list of integers from `least` to below `most`; -100 may stand for none.
    Raises UserError: it is not."""
    values = row[column]
    if not isinstance(values, list):
        kind = type(values).__name__
        raise UserError(f"{column}: a {kind}: {str(values)[:60]!r}; expected a list of integers")
    if length is not None and len(values) != length:
        raise UserError(f"{column}: {len(values)} values; expected {length}, one for each token")
    for at, value in enumerate(values):
        if column in ("attention_mask", *MASKS) and isinstance(value, bool):
            continue
        if type(value) is not int:
            raise UserError(f"{column}[{at}]: {value!r}; expected an integer")
        low = value < least or (column == "labels" and IGNORE_INDEX < value < 0)
        if low or (most is not None and value >= most):
            upper = f" to {most - 1}" if most is not None else " or more"
            extra = f", or {IGNORE_INDEX}" if column == "labels" else ""
            why = " (the rows of the model's embedding)" if (most or 0) > 2 else ""
            raise UserError(f"{column}[{at}]: {value}; expected 0{upper}{extra}{why}")
    return values


def _without_padding(mask: list[int]) -> slice:
    """The positions whose mask is 1. Raises UserError: they are not next to each other."""
    total = sum(mask)
    start = mask.index(1) if total else 0
    if sum(mask[start : start + total]) != total:
        raise UserError(
            "attention_mask: 0 between ones; expected padding before or after the ids only"
        )
    return slice(start, start + total)


@reads_rows
def text_dataset(
    tokenizer: Any,
    *,
    source: str,
    split: str = "train",
    subset: str | None = None,
    data_files: str | None = None,
    text_column: str = "text",
    window: int | None = None,
    max_rows: int | None = None,
) -> TokenizedDataset:
    """Documents, one per row or per .txt file, for continued pretraining or perplexity.

    Each document is tokenized as a whole, with eos and with bos if the tokenizer puts it before
    texts, and cut into windows. Each window is a sample. A window begins with the last token of the
    window before it, so every token of a document except the first is a target exactly once. The
    last window of a document may be short: set `packed: true` if documents are short.

    Args:
        tokenizer: `hf_tokenizer(...)` or one of torchtune's.
        source: a .txt, .jsonl, .json, .parquet or .csv file, a folder of them, or a hub name.
        split, subset, data_files, max_rows: as in `load_rows`.
        text_column: column with the text. For .txt files it is "text".
        window: tokens per window. Default: the tokenizer's `max_seq_len`.

    Raises:
        UserError: the source, the column or the window is wrong, or no row can be used.
    """
    limit = getattr(tokenizer, "max_seq_len", None)
    size = limit if window is None else window
    if size is None:
        raise UserError(
            "dataset.window: null without tokenizer.max_seq_len; expected one of them to be set"
        )
    if size < 2 or size > (limit or size):
        most = f" and at most tokenizer.max_seq_len ({limit})" if limit else ""
        raise UserError(f"dataset.window: {size}; expected an integer of at least 2{most}")
    rows = load_rows(source, split, subset, data_files, max_rows)
    require_column("text_column", text_column, rows, source)

    def samples_of(row: Row) -> Iterator[Sample]:
        text = text_of(row[text_column])
        if not text.strip():
            raise Unusable("no text")
        tokens = list(tokenizer.encode(text, add_bos=True, add_eos=True))
        for start in range(0, len(tokens) - 1, size - 1):
            part = list(tokens[start : start + size])
            yield part, part

    return tokenize_rows(rows, source, one_by_one(samples_of, tokenizer))
