"""MiSS: one trained matrix per linear, shared by blocks of the input's columns.

    y = W x + bias + D^T (x_0 + x_1 + ... )         D [rank, out], zeros at the start

x_0, x_1, ... are pieces of x with `rank` numbers each; the last one is padded with zeros. So the
same D^T is added to every block of `rank` columns of W, and its last columns are cut off:

    W' = W + [D^T D^T ... ]

MiSS (https://arxiv.org/abs/2409.15371, first called Bone) is PEFT's `MissConfig` with its default
`init_weights`. The forms "bat" and "mini" are others. There is no factor alpha / rank.

Cost: rank * out numbers and products a token; a LoRA of this rank has rank * (in + out). Adding up
the pieces reads x once, in fp32 sums, and autograd keeps `[tokens, rank]` of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.low_rank.adapted import AdaptedLinear
from qfsdp.modules.quantized_linear import QuantizedLinear, linear
from qfsdp.tensor_subclasses.dtensor import local_part


class BlockSharedLinear(AdaptedLinear):
    """A linear with a MiSS adapter.

    Fields:
        miss_block: fp32 `[rank, out]` (PEFT's name and shape), sharded by rows like any adapter.
        dropout: probability, on the input of the product.
    """

    def __init__(self, name: str, base: nn.Linear | QuantizedLinear, config: AdapterConfig) -> None:
        super().__init__(base)
        if name == "lm_head":  # a rank may have some columns of W^T alone, and all of D
            expected = "expected lora, dora or ia3, or adapter.targets without it"
            raise UserError(f"adapter.method: 'miss' has no form of lm_head; {expected}")
        if config.rank > (most := base.weight.size(1)):
            expected = f"expected at most {most}, the inputs of {name}"
            raise UserError(f"adapter.rank: {config.rank}; {expected}")
        self.dropout = config.dropout
        self.miss_block = self._fp32(config.rank, base.weight.size(0))

    def reset(self) -> None:
        """Sets D to its start."""
        local_part(self.miss_block).zero_()

    def forward(self, x: Tensor) -> Tensor:
        block: Tensor = self.miss_block
        if self.is_reference:
            block = self.start["miss_block"] if self.start else torch.zeros_like(block)
        dropped = F.dropout(x, self.dropout) if self.dropout and self.training else x
        pieces = summed_pieces(dropped.flatten(0, -2), block.size(0))
        y = linear(x, self.weight, self.bias, self.fp8)
        return torch.addmm(y.flatten(0, -2), pieces, block.to(y.dtype)).view_as(y)


def summed_pieces(x: Tensor, rank: int) -> Tensor:
    """The sum of the pieces of `rank` numbers of each row: `[n, in]` -> `[n, rank]`, of x's dtype;
    added up in fp32."""
    x = F.pad(x, (0, -x.size(1) % rank))
    return x.view(x.size(0), -1, rank).sum(1, dtype=torch.float32).to(x.dtype)


def merged_blocks(rows: Tensor, block: Tensor) -> Tensor:
    """Rows of a weight merged with MiSS, fp32 `[n, in]`.

    Args:
        rows: `[n, in]`, rows of the base.
        block: fp32 `[rank, n]`, the columns of D of the same rows.
    """
    return rows.float() + block.t().repeat(1, -(-rows.size(1) // len(block)))[:, : rows.size(1)]
