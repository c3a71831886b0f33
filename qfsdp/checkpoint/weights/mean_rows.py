"""Rows that a vocabulary has beyond those in a model's files: each is the mean of all tokens' rows.

So a new token is as likely as the usual one and moves no logit far
(https://nlp.stanford.edu/~johnhew/vocab-expansion.html). Nothing is written: the rows are computed
as the weight is read, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qfsdp.checkpoint.weights.other_names import EMBEDDINGS, HEAD
from qfsdp.checkpoint.weights.read import (
    PIECE_BYTES,
    STORED_DTYPES,
    ComputedTensor,
    OpenFiles,
    StoredTensor,
)
from qfsdp.common.errors import UserError

TABLES = (EMBEDDINGS, HEAD)  # with a row for each token
MULTIPLE = 64  # of which the number of rows is, if rows are added: shards and kernels divide it


@dataclass(frozen=True)
class MeanRows(ComputedTensor):
    """A stored matrix whose rows from `first` on, and more of them, are the mean of those before.

    Fields:
        stored: the matrix.
        first: row from which on rows are the mean.
    """

    stored: StoredTensor
    first: int
    _mean: list[Tensor] = field(default_factory=list, compare=False, hash=False)

    @classmethod
    def of(cls, stored: StoredTensor, first: int, rows: int) -> MeanRows:
        first = min(first, stored.rows)  # a tokenizer may have tokens without rows, as a later pad
        shape, size = (rows, *stored.shape[1:]), rows * stored.row_bytes
        return cls(stored.name, stored.file, stored.dtype, shape, 0, size, stored, first)

    def fill(self, files: OpenFiles, row: int, into: Tensor) -> None:
        """Fills `into` with the rows from `row` on."""
        kept = max(0, min(len(into), self.first - row))
        files.read_rows(self.stored, row, into[:kept])
        if kept < len(into):
            into[kept:] = self._mean_of(files)

    def _mean_of(self, files: OpenFiles) -> Tensor:
        """The mean, summed in fp64 in an order that depends on nothing else."""
        if not self._mean:
            total, dtype = torch.zeros(self.shape[1:]).double(), STORED_DTYPES[self.dtype]
            step = max(1, PIECE_BYTES // self.row_bytes)
            for start in range(0, self.first, step):
                piece = torch.empty(min(step, self.first - start), *self.shape[1:], dtype=dtype)
                files.read_rows(self.stored, start, piece)
                total += piece.double().sum(0)
            self._mean.append((total / self.first).to(dtype))
        return self._mean[0]


def with_mean_rows(
    plain: Mapping[str, StoredTensor], first: int, rows: int
) -> dict[str, StoredTensor]:
    """The tensors of a model with the embedding and the output layer, if it is stored, of `rows`
    rows. Raises UserError: the embedding is not stored plain."""
    if TABLES[0] not in plain:
        expected = f"expected null: {TABLES[0]!r} is not stored plain"
        raise UserError(f"model.mean_rows: [{first}, {rows}]; {expected}")
    tables = {name: MeanRows.of(plain[name], first, rows) for name in TABLES if name in plain}
    return {**plain, **tables}
