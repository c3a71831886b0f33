"""Rows that are read one after the other, from a place that can be kept and gone back to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import TYPE_CHECKING, Any

from qfsdp.cli.errors import UserError

if TYPE_CHECKING:
    from datasets import IterableDataset


class RowStream:
    """The rows of a streamed dataset, in the order of the data.

    Args:
        rows: of `datasets`, not shuffled.
        source: of the rows, for messages.

    Attributes:
        column_names: of the first row.

    Raises:
        UserError: there is no row, or the first one cannot be read.
    """

    def __init__(self, rows: IterableDataset, source: str) -> None:
        self._rows, self._source = rows, source
        self._start = deepcopy(rows.state_dict())
        first = list(islice(self.after(0, None), 1))
        if not first:
            raise UserError(f"dataset.source: {source} has no rows; expected at least one")
        self.column_names = list(first[0])

    def after(self, number: int, place: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
        """The rows from a place on.

        Args:
            number: rows before that place, for messages.
            place: of an earlier `place()`; None: the beginning.

        Raises:
            UserError: a row cannot be read.
        """
        from datasets.exceptions import DatasetsError

        self._rows.load_state_dict(deepcopy(dict(place or self._start)))
        try:
            for row in self._rows:
                yield row
                number += 1
        except (DatasetsError, ValueError, OSError, RecursionError, EOFError) as error:
            reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            where = f"dataset.source: {self._source}, row {number + 1}"
            raise UserError(f"{where}: {reason[0]}") from None

    def place(self) -> dict[str, Any]:
        """The place after the last row that was read: numbers and text, for a checkpoint."""
        return deepcopy(dict(self._rows.state_dict()))
