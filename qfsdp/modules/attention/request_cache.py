"""Cached keys and values of requests that come and go while others are answered.

Each request has a row. Rows stay together at the front: the last row takes the place of one that
leaves. So a decoder runs views of the storage, and nothing is copied from one token to the next.

    a0 a1 a2 a3 --      request b leaves      a0 a1 a2 a3 --
    b0 b1 -- -- --      ------------->        c0 c1 c2 -- --
    c0 c1 c2 -- --                            (free)

The storage grows by copying: rows double, and slots grow by multiples of `SLOTS`. When the last
request has left, it is freed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qfsdp.modules.attention.kv_cache import KVCache, LayerCache

if TYPE_CHECKING:
    from qfsdp.modules.decoder_config import DecoderConfig

SLOTS = 256


class RequestCache(KVCache):
    """A `KVCache` for new tokens only, whose rows are added and removed between calls.

    Args:
        config: of the decoder.
        device: on which the decoder computes.
    """

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        super().__init__(config, [1], 0, device)
        self.filled = True
        self._shape = (0, self._shape[1], 0, self._shape[3])
        self._seen: list[int] = []  # `lengths` on the host
        self._count_lengths()

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._seen)

    def add(self, prompt: KVCache, max_new_tokens: int) -> None:
        """Adds a row with the only row of `prompt`, a cache that a decoder has filled, and space
        for `max_new_tokens` tokens after it."""
        (length,) = prompt.lengths.tolist()
        parts = [(layer.keys, layer.values) for layer in prompt.layers(torch.float32)]
        self._reserve(len(self) + 1, length + max_new_tokens, parts)
        for kept, new, has_state in zip(self._layers, parts, self._states, strict=True):
            used = None if has_state else length
            for whole, part in zip(kept, new, strict=True):
                whole[len(self), :, :used] = part[0, :, :used]
        self._seen.append(length)
        self._count_lengths()

    def remove(self, row: int) -> None:
        """Removes a row; the last row takes its place."""
        last = self._seen.pop()
        if row < len(self):
            self._seen[row] = last
            for layer, has_state in zip(self._layers, self._states, strict=True):
                used = None if has_state else last
                for whole in layer:
                    whole[row, :, :used] = whole[len(self), :, :used]
        if not self._seen:
            self._layers, self._shape = [], (0, self._shape[1], 0, self._shape[3])
        self._count_lengths()

    def layers(self, dtype: torch.dtype) -> Iterator[LayerCache]:
        for keys, values in self._layers:
            yield LayerCache(keys[: len(self)], values[: len(self)], self.lengths)

    def advance(self) -> None:
        self._seen = [length + 1 for length in self._seen]
        super().advance()

    def _count_lengths(self) -> None:
        self.lengths = torch.tensor(self._seen, dtype=torch.int64, device=self.lengths.device)
        self._longest = max(self._seen, default=0)

    def _reserve(self, rows: int, slots: int, like: list[tuple[Tensor, Tensor]]) -> None:
        """Makes the storage large enough, one tensor at a time."""
        held_rows, heads, held_slots, width = self._shape
        if rows <= held_rows and slots <= held_slots:
            return
        rows = held_rows if rows <= held_rows else max(rows, 2 * held_rows)
        self._shape = (rows, heads, max(held_slots, -(-slots // SLOTS) * SLOTS), width)
        self._layers = self._layers or [(k[:0], v[:0]) for k, v in like]
        for index, (keys, values) in enumerate(self._layers):
            has_state = self._states[index]
            self._layers[index] = self._grown(keys, has_state), self._grown(values, has_state)

    def _grown(self, old: Tensor, has_state: bool) -> Tensor:
        # Zeros: attention multiplies hidden slots by 0, which would keep a NaN.
        new = old.new_zeros((self._shape[0], *old.shape[1:]) if has_state else self._shape)
        new[: len(self), :, : old.shape[2]] = old[: len(self)]
        return new
