"""Plain text: documents cut into windows, every token of them trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qfsdp.cli.errors import UserError
from qfsdp.data.rows import Row, load_rows, require_column
from qfsdp.data.tokenized_dataset import Sample, TokenizedDataset, Unusable, tokenize_rows


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
    """Documents, one per row or .txt file, for continued pretraining and for perplexities.

    A document is tokenized whole, between the tokenizer's bos and eos, and cut into windows; each
    is a sample. A window begins with the token that the one before ended with, so that every token
    of a document but its first is a target, and of one window only. The last window of a document
    is as long as what is left: set `packed: true` where documents are short.

    Args:
        tokenizer: with an `encode` as of `hf_tokenizer(...)` or torchtune's.
        source: a .txt, .jsonl, .json, .parquet or .csv file, a folder of them, or a hub name.
        split, subset, data_files, max_rows: as in `load_rows`.
        text_column: column with the text; of .txt files it is "text".
        window: tokens of a window; by default the tokenizer's `max_seq_len`.

    Raises:
        UserError: the source, the column or the window is wrong, or no row can be used.
    """
    limit = getattr(tokenizer, "max_seq_len", None)
    size = limit if window is None else window
    if size is None:
        raise UserError("dataset.window: null, and the tokenizer has no max_seq_len; give one")
    if size < 2 or size > (limit or size):
        most = f" and at most tokenizer.max_seq_len ({limit})" if limit else ""
        raise UserError(f"dataset.window: {size}; at least 2{most} is right")
    rows = load_rows(source, split, subset, data_files, max_rows)
    require_column("text_column", text_column, rows, source)

    def samples_of(row: Row) -> Iterator[Sample]:
        text = row[text_column]
        if not isinstance(text, str | None):
            raise UserError(f"a {type(text).__name__} where text is right: {str(text)[:60]!r}")
        if not (text or "").strip():
            raise Unusable("no text")
        tokens = tokenizer.encode(text, add_bos=True, add_eos=True)
        for start in range(0, len(tokens) - 1, size - 1):
            part = list(tokens[start : start + size])
            yield part, part

    return tokenize_rows(rows, source, samples_of)
