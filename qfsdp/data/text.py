"""Plain-text datasets: documents cut into windows, with every token trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.data.chat.messages import text_of
from qfsdp.data.files.rows import Row, load_rows, require_column
from qfsdp.data.reading import reads_rows
from qfsdp.data.tokenized_dataset import (
    Sample,
    TokenizedDataset,
    Unusable,
    one_by_one,
    tokenize_rows,
)


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
    texts, and cut into windows. Each window is a
    sample. A window begins with the last token of the window before it, so every token of a
    document except the first is a target exactly once. The last window of a document may be short:
    set `packed: true` if documents are short.

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
        tokens = tokenizer.encode(text, add_bos=True, add_eos=True)
        for start in range(0, len(tokens) - 1, size - 1):
            part = list(tokens[start : start + size])
            yield part, part

    return tokenize_rows(rows, source, one_by_one(samples_of, tokenizer))
