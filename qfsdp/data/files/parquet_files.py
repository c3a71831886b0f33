"""Rows of Parquet files, and 32-bit numbers with the digits that were written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qfsdp.common.errors import UserError
from qfsdp.common.messages import first_line

_ROWS = 256  # read at a time
_BUFFER = 2**20  # bytes; without it whole columns of a row group are read


class ParquetRecords:
    """See `qfsdp.data.files.file_records.Records`. Places are numbers of rows."""

    def __init__(self, file: Path) -> None:
        from pyarrow import ArrowException, parquet

        self.file = file
        try:
            with parquet.ParquetFile(file) as opened:
                groups = range(opened.num_row_groups)
                self._counts = [opened.metadata.row_group(i).num_rows for i in groups]
                self._fix = exact_numbers(opened.schema_arrow)
                self._features = _features(opened.schema_arrow)
        except (ArrowException, OSError) as error:
            raise self._wrong(error) from None
        self.count = sum(self._counts)
        self._converted: tuple[Any, list[dict[str, Any]]] = (None, [])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_converted": (None, [])}

    def read(self, at: int) -> Iterator[tuple[int, int, Any]]:
        from pyarrow import ArrowException, parquet

        group = number = 0
        while group < len(self._counts) and number + self._counts[group] <= at:
            number += self._counts[group]
            group += 1
        groups = list(range(group, len(self._counts)))
        try:
            with parquet.ParquetFile(self.file, buffer_size=_BUFFER, pre_buffer=False) as opened:
                for batch in opened.iter_batches(_ROWS, groups) if groups else ():
                    for index in range(max(0, at - number), len(batch)):
                        yield number + index, number + index + 1, (batch, index)
                    number += len(batch)
        except (ArrowException, OSError) as error:
            raise self._wrong(error) from None

    def value(self, content: Any, _at: int) -> dict[str, Any]:
        batch, index = content
        if self._converted[0] is not batch:
            self._converted = (batch, batch.to_pylist())
        row = self._fix(self._converted[1][index])
        return row if self._features is None else self._features.decode_example(row)

    def _wrong(self, error: BaseException) -> UserError:
        return UserError(f"{self.file}: {first_line(error)}; expected a Parquet file")


def exact_numbers(schema: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that gives numbers of 16 and 32 bits in a row of this Arrow schema the fewest
    digits that tell them apart: 0.1, which as 64 bits prints 0.10000000149011612."""
    kinds = {field.name: field.type for field in schema if _narrow(field.type)}
    return partial(_exact_row, kinds)


def _exact_row(kinds: Mapping[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return row | {name: _exact(row[name], kind) for name, kind in kinds.items() if name in row}


def with_exact_numbers(rows: Any) -> Any:
    """Rows of `datasets`, counted or streamed, with numbers as of `exact_numbers`."""
    if rows.features is None or not any(_narrow(f.type) for f in rows.features.arrow_schema):
        return rows
    fix = exact_numbers(rows.features.arrow_schema)
    if not hasattr(rows, "with_transform"):
        return rows.map(fix)

    def fix_batch(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        fixed = [
            fix(dict(zip(batch, row, strict=True))) for row in zip(*batch.values(), strict=True)
        ]
        return {name: [row[name] for row in fixed] for name in batch}

    return rows.with_transform(fix_batch)


def _features(schema: Any) -> Any:
    """What `datasets` notes in a file about its columns, or None."""
    if b"huggingface" not in (schema.metadata or {}):
        return None
    from datasets import Features

    return Features.from_arrow_schema(schema)


def _inner(kind: Any) -> list[tuple[Any, Any]]:
    """The names and types in a struct; of a list (None, type)."""
    from pyarrow import types

    if types.is_struct(kind):
        return [(field.name, field.type) for field in kind.fields]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [(None, kind.value_type)]
    return []


def _narrow(kind: Any) -> bool:
    from pyarrow import types

    narrow = types.is_float32(kind) or types.is_float16(kind)
    return narrow or any(_narrow(inner) for _, inner in _inner(kind))


def _exact(value: Any, kind: Any) -> Any:
    if value is None or not _narrow(kind):
        return value
    inner = _inner(kind)
    if not inner:
        return float(str((np.float32 if kind.bit_width == 32 else np.float16)(value)))
    if isinstance(value, dict):
        return {name: _exact(value[name], part) for name, part in inner}
    return [_exact(one, inner[0][1]) for one in value]
