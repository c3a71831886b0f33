"""Rows that are read one after the other, from a place that can be kept and gone back to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import TYPE_CHECKING, Any

from qfsdp.common.errors import UserError
from qfsdp.common.files import DAMAGED
from qfsdp.common.messages import first_line

if TYPE_CHECKING:
    from datasets import IterableDataset

    from qfsdp.data.files.file_rows import FileStream


class RowStream:
    """The rows of a streamed dataset, in the order of the data.

    Args:
        rows: not shuffled.
        source: of the rows, for messages.

    Attributes:
        column_names: of the first row.

    Raises:
        UserError: there is no row, or the first one cannot be read.
    """

    def __init__(self, rows: IterableDataset | FileStream, source: str) -> None:
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
            place: of an earlier `place()`; None: the beginning. One of another form, from a release
                that read files in another way, is found by reading `number` rows again.

        Raises:
            UserError: a row cannot be read.
        """
        from datasets.exceptions import DatasetsError

        is_known = place is not None and place.keys() == self._start.keys()
        again = number if place and not is_known else 0
        self._rows.load_state_dict(deepcopy(dict(place if place and is_known else self._start)))
        try:
            for row in islice(self._rows, again, None):
                yield row
                number += 1
        except (DatasetsError, ValueError, *DAMAGED) as error:
            where = f"dataset.source: {self._source}, row {number + 1}"
            raise UserError(f"{where}: {first_line(error.__cause__ or error)}") from None

    def place(self) -> dict[str, Any]:
        """The place after the last row that was read: numbers and text, for a checkpoint."""
        return deepcopy(dict(self._rows.state_dict()))
