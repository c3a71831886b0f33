"""Keys and values of the tokens that a decoder has seen, for generation.

Rows of a batch have prompts of different lengths. Prompts are padded on the right, and token `i` of
a row is in slot `i` of the cache, so a slot is a position: causal attention hides the padding of a
prompt by itself, the row's own tokens overwrite it one by one, and what is left of it lies beyond
the last slot that the row's mask allows.

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


class LayerCache(NamedTuple):
    """What one layer is given of the cache.

    Fields:
        keys, values: `[batch, kv_heads, max_len, head_dim]`, rotated; the layer writes to them.
        slots: int64 `[batch]`, where the one new token of each row goes; None for prompts, which
            fill the cache from its start.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor | None

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
    """Cached keys and values of every layer, and how far each row of the batch has come.

    Allocated once, for prompts and all that may follow, in the dtype that the decoder computes in.
    A decoder that is called with it runs the prompts first and then, call after call, one new token
    of every row.

    Args:
        config: of the decoder.
        lengths: tokens of each row's prompt, at least 1.
        max_new_tokens: how many tokens may follow a prompt.
        device: of the decoder's computation.

    Attributes:
        lengths: int64 `[batch]`, tokens of each row that are in the cache.
        filled: whether the prompts have been run.
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
        self._count, heads = config.num_hidden_layers, config.num_key_value_heads
        self._shape = (len(lengths), heads, self._longest + max_new_tokens, config.head_dim)
        self.filled = False

    def layers(self, dtype: torch.dtype) -> Iterator[LayerCache]:
        """What each layer is given in this call, in which the decoder computes in `dtype`."""
        slots = self.lengths if self.filled else None
        for index in range(self._count):
            if not self.filled:
                # Zeros: what lies in a slot that a mask hides is multiplied by 0, which keeps NaN.
                keys = torch.zeros(self._shape, dtype=dtype, device=self.lengths.device)
                self._layers.append((keys, torch.zeros_like(keys)))
            yield LayerCache(*self._layers[index], slots)

    def mask(self, window: int | None = None) -> Tensor:
        """Bool `[batch, 1, 1, seen]`: the slots that the new token of each row attends to, its own
        included; `seen` ends at the longest row's. `window`: how many of them at most."""
        slots = torch.arange(self._longest + 1, device=self.lengths.device)
        at = self.lengths.unsqueeze(1)
        seen = slots <= at
        if window is not None:
            seen &= slots > at - window
        return seen[:, None, None]

    def advance(self) -> None:
        """The tokens of this call are in the cache."""
        if self.filled:
            self.lengths = self.lengths + 1
            self._longest += 1
        self.filled = True

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows of the batch go on."""
        chosen = torch.tensor(rows, device=self.lengths.device)
        self.lengths = self.lengths[chosen]
        for index, (keys, values) in enumerate(self._layers):  # one copy at a time
            self._layers[index] = keys[chosen], values[chosen]
