"""OFT: small rotations of a linear's input are trained; over a quantized weight, QOFT.

    y = W (R^T x) + bias        R: rotations of `block_size` numbers each, one after the other

A rotation is made from a skew-symmetric Q, whose numbers above the diagonal are trained and are
zeros at the start, by Cayley's transform (I + Q)(I - Q)^-1 as its Neumann series, cut off:

    R = I + 2 Q + 2 Q^2 + 2 Q^3 + Q^4

OFT (https://arxiv.org/abs/2306.07280) rotated weights; OFTv2 (https://arxiv.org/abs/2506.19847)
rotates inputs, so that W is not written anew in every step and may be quantized. It is PEFT's
`OFTConfig` with `use_cayley_neumann` and five terms. The constrained form (`coft`), shared blocks
and the exact inverse are others. W has no factor alpha / rank.

Cost: in * (block_size - 1) / 2 numbers; 2 * in * block_size operations a token, and three products
of `[block_size, block_size]` a block and pass. Autograd keeps the input of every linear.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.low_rank.adapted import AdaptedLinear
from qfsdp.modules.quantized_linear import QuantizedLinear, linear
from qfsdp.tensor_subclasses.dtensor import local_part


class RotatedLinear(AdaptedLinear):
    """A linear with an OFT adapter.

    Fields:
        oft_R: fp32 `[in / block_size, block_size * (block_size - 1) / 2]` (PEFT's shape), the
            numbers above the diagonal of each block's Q, row by row.
        block_size: of the rotations.
    """

    def __init__(self, name: str, base: nn.Linear | QuantizedLinear, config: AdapterConfig) -> None:
        super().__init__(base)
        size, cols = config.block_size, base.weight.size(1)
        if cols % size:
            raise UserError(
                f"adapter.block_size: {size}; expected a divisor of {cols}, the inputs of {name}"
            )
        self.block_size = size
        self.oft_R = self._fp32(cols // size, size * (size - 1) // 2)

    def reset(self) -> None:
        """Sets the rotations to their start, none."""
        local_part(self.oft_R).zero_()

    def forward(self, x: Tensor) -> Tensor:
        numbers: Tensor = self.oft_R
        if self.is_reference:
            numbers = self.start["oft_R"] if self.start else torch.zeros_like(numbers)
        turned = rotated(x, rotations(numbers, self.block_size))
        return linear(turned, self.weight, self.bias, self.fp8)


def rotations(numbers: Tensor, size: int) -> Tensor:
    """R of each block, `[blocks, size, size]`, from the numbers of its Q."""
    rows, cols = torch.triu_indices(size, size, 1, device=numbers.device)
    upper = numbers.new_zeros(len(numbers), size * size)
    upper = upper.index_copy(1, rows * size + cols, numbers).view(-1, size, size)
    q = upper - upper.mT
    square = q @ q
    cube = square @ q
    eye = torch.eye(size, device=q.device, dtype=q.dtype)
    return eye + 2 * (q + square + cube) + cube @ q


def rotated(x: Tensor, r: Tensor) -> Tensor:
    """R^T x of every row of x, `[..., in]`, of x's dtype."""
    blocks, size = r.shape[:2]
    pieces = x.reshape(-1, blocks, size).transpose(0, 1)
    turned = torch.bmm(pieces, r.to(x.dtype))
    return turned.transpose(0, 1).reshape(x.shape)


def merged_rotations(rows: Tensor, numbers: Tensor, size: int) -> Tensor:
    """Rows of a weight merged with OFT, W R^T, fp32 `[n, in]`.

    Args:
        rows: `[n, in]`, rows of the base.
        numbers: fp32, `oft_R`; size: of a block.
    """
    return rotated(rows.float(), rotations(numbers, size).mT)
