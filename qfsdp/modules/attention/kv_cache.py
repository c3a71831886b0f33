"""Keys and values of the tokens that a decoder has seen, for generation.

Rows of a batch have prompts of different lengths, padded on the right. Token `i` of a row is in
slot `i` of the cache, so a slot is a position. Causal attention hides the padding of a prompt. New
tokens of the row overwrite it one by one, and the row's mask hides the rest.

    prompt a   a0 a1 a2 --        then   a0 a1 a2 a3        then   a0 a1 a2 a3 a4
    prompt b   b0 b1 b2 b3               b0 b1 b2 b3 b4            b0 b1 b2 b3 b4 b5
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from qfsdp.modules.decoder_config import DecoderConfig

SEEN_STEP = 128
"""Attention of new tokens reads a multiple of this many slots: a GPU's attention library may plan
anew, for 20 to 40 ms, each time the number of keys changes, which would be at every token."""


class LayerCache(NamedTuple):
    """The cache of one layer.

    Fields:
        keys, values: `[batch, kv_heads, max_len, head_dim]`, keys rotated; the layer fills them.
        slots: int64 `[batch]`, the slot of each row's new token; None for prompts, which fill the
            cache from its start.
        lengths: int64 `[batch]`, of prompts.

    Of a recurrent layer, `keys` are the last inputs of its convolution, `[batch, taps - 1, width]`,
    and `values` its state, fp32 `[batch, value heads, key, value]`.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor | None
    lengths: Tensor | None = None

    def put(self, k: Tensor, v: Tensor) -> None:
        """Writes `[batch, kv_heads, new, head_dim]` of the new tokens."""
        if self.slots is None:
            self.keys[:, :, : k.shape[2]] = k
            self.values[:, :, : v.shape[2]] = v
            return
        where = self.slots[:, None, None, None].expand_as(k)
        self.keys.scatter_(2, where, k)
        self.values.scatter_(2, where, v)


class KVCache:
    """Cached keys and values of every layer, and the number of cached tokens of every row.

    Allocated once, for prompts and new tokens, in the decoder's compute dtype. A decoder called
    with it runs the prompts in the first call, and one new token of every row in each later call.

    Args:
        config: of the decoder.
        lengths: number of tokens of each row's prompt, at least 1.
        max_new_tokens: maximum number of tokens after a prompt.
        device: on which the decoder computes.

    Attributes:
        lengths: int64 `[batch]`, number of each row's tokens in the cache.
        filled: whether the prompts are in the cache.
    """

    def __init__(
        self,
        config: DecoderConfig,
        lengths: Sequence[int],
        max_new_tokens: int,
        device: torch.device,
    ) -> None:
        self.lengths = torch.tensor(lengths, device=device)
        self._longest = max(lengths)
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._recurrent, heads = config.recurrent, config.num_key_value_heads
        self._states = [kind.recurrent for kind in config.layers]
        self._shape = (len(lengths), heads, self._longest + max_new_tokens, config.head_dim)
        self.filled = False

    def layers(self, dtype: torch.dtype) -> Iterator[LayerCache]:
        """The cache of each layer, for one call of a decoder that computes in `dtype`."""
        slots = self.lengths if self.filled else None
        for index, has_state in enumerate(self._states):
            if not self.filled:
                # Zeros: attention multiplies hidden slots by 0, which would keep a NaN.
                shapes = self._state_shapes() if has_state else (self._shape, self._shape)
                keys = torch.zeros(shapes[0], dtype=dtype, device=self.lengths.device)
                values = keys.new_zeros(shapes[1], dtype=torch.float32 if has_state else dtype)
                self._layers.append((keys, values))
            yield LayerCache(*self._layers[index], slots, self.lengths)

    def _state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        part, rows = self._recurrent, self._shape[0]
        assert part is not None
        state = (rows, part.value_heads, part.key_dim, part.value_dim)
        return (rows, part.taps - 1, sum(part.widths)), state

    def mask(self, window: int | None = None) -> Tensor:
        """Bool `[batch, 1, 1, seen]`: the slots that each row's new token attends to, its own slot
        included. `seen` ends up to `SEEN_STEP` slots after the longest row's token, or with the
        cache. `window`: maximum number of the slots that are attended to."""
        count = min(-(-(self._longest + 1) // SEEN_STEP) * SEEN_STEP, self._shape[2])
        slots = torch.arange(count, device=self.lengths.device)
        at = self.lengths.unsqueeze(1)
        seen = slots <= at
        if window is not None:
            seen &= slots > at - window
        return seen[:, None, None]

    def advance(self) -> None:
        """Counts the tokens of this call as cached."""
        if self.filled:
            self.lengths = self.lengths + 1
            self._longest += 1
        self.filled = True

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows of the batch."""
        chosen = torch.tensor(rows, device=self.lengths.device)
        self.lengths = self.lengths[chosen]
        for index, (keys, values) in enumerate(self._layers):  # one copy at a time
            self._layers[index] = keys[chosen], values[chosen]
