"""What a model of transformers keeps of the tokens that it has seen, for generation.

Each row has its own cache, which transformers makes, and is computed alone. In a batch, rows are
padded to one length: recurrent layers would read the padding, and experts would be chosen for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class HubCache:
    """The caches of the rows of a batch, as `KVCache` of our decoder.

    Args:
        lengths: tokens of each row's prompt, which is padded on the right.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._rows: list[tuple[int, Any]] = [(length, None) for length in lengths]

    def next_tokens(self, tokens: Tensor, run: Any) -> list[Any]:
        """`run(tokens of a row [1, n], its cache)` -> (result, cache), for every row; the results.
        The first call has the prompts, each later one a new token of every row."""
        found = []
        for at, (length, cache) in enumerate(self._rows):
            result, cache = run(tokens[at : at + 1, :length], cache)
            self._rows[at] = (1, cache)
            found.append(result)
        return found

    def add(self, prompt: HubCache, max_new_tokens: int) -> None:
        """Adds the only row of `prompt`, a cache that a model has filled."""
        self._rows += prompt._rows

    def remove(self, row: int) -> None:
        """Removes a row; the last row takes its place."""
        last = self._rows.pop()
        if row < len(self._rows):
            self._rows[row] = last

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows of the batch."""
        self._rows = [self._rows[at] for at in rows]
