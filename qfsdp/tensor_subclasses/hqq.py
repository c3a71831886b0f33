"""HQQ: half-quadratic quantization to 4 bits, equal to the `hqq` package 0.2.8.

Badri and Shaji 2023, https://mobiusml.github.io/hqq_blog/. Affine, without calibration data:

    group      64 consecutive weights of a row share a scale and a zero (`hqq_solver.py`)
    weight     (code - zero) * scale, code = 0..15

    row of bytes:  [ cols/2 bytes of codes | cols/64 scales, fp16 | cols/64 zeros, fp16 ]

That is 4.5 bits a weight, without metadata. By default the package also holds scales and zeros in
fp16, rounded after the codes are chosen. Weights are computed in fp32 here and rounded once.

The solver stops by the error over all rows of all ranks, so shards equal the rows of the whole
weight bit for bit. If 64 does not divide `cols`, the last group of a row is shorter: it is solved
as if it were filled up with its own weights, beginning with the first. (The package refuses such
weights.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.four_bit import BLOCK, KERNEL_CHUNK, dequantize_pairs
from qfsdp.tensor_subclasses.hqq_solver import codes_of, solve
from qfsdp.tensor_subclasses.kernels.compiled import compiled
from qfsdp.tensor_subclasses.kernels.dispatch import FLAT_ON_GPUS
from qfsdp.tensor_subclasses.kernels.pairs import write_pairs
from qfsdp.tensor_subclasses.nf4_quantize import pack_pairs
from qfsdp.tensor_subclasses.quantized_tensor import GatherRows, QuantizedTensor, numbers_of


class HQQTensor(QuantizedTensor):
    """A weight in HQQ; the module's docstring describes the bytes of a row."""

    format = "hqq"

    @staticmethod
    def row_bytes(cols: int) -> int:
        return -(-cols // 2) + 4 * -(-cols // BLOCK)

    @staticmethod
    def dequantize_rows(
        qdata: Tensor,
        metadata: Sequence[Tensor],
        cols: int,
        row_offset: int,
        dtype: torch.dtype,
        row_scale: Tensor | None = None,
    ) -> Tensor:
        code_bytes, fp16_bytes = -(-cols // 2), 2 * -(-cols // BLOCK)
        codes, scales, zeros = qdata.split([code_bytes, fp16_bytes, fp16_bytes], dim=1)
        scales, zeros = (numbers_of(part, torch.float16) for part in (scales, zeros))

        def write(rows: slice, codes: Tensor, row_scale: Tensor | None, out: Tensor) -> None:
            _write_weights(codes, scales[rows], zeros[rows], row_scale, out)

        return dequantize_pairs(write, codes, cols, dtype, row_scale)

    def _quantize(
        self, pieces: Iterable[Tensor], name: str, gather_rows: GatherRows | None
    ) -> None:
        rows, per_row = self.qdata.size(0), -(-self.cols // BLOCK)
        groups = _groups_of_rows(pieces, rows, self.cols)
        gather = gather_rows or (lambda rows: rows)

        def mean_error(of_groups: Tensor) -> float:
            # In fp64 and rounded: the result does not depend on the order of summation.
            of_rows = gather(of_groups.view(rows, per_row).sum(1, keepdim=True))
            return float((of_rows.sum() / (of_rows.numel() * per_row * BLOCK)).float())

        inverse, zero = solve(groups, mean_error)
        held = torch.cat([t.half().view(rows, per_row) for t in (1 / inverse, zero)], dim=1)
        # Checked over all rows: every rank raises, and none waits for another.
        if not (finite := gather(held.isfinite().all(1, keepdim=True).float())).all():
            row = int((finite == 0).flatten().nonzero()[0])
            raise ValueError(
                f"{name}: row {row} holds NaN, infinity or numbers too large for scales in fp16; "
                "it cannot be quantized"
            )
        step = max(1, KERNEL_CHUNK // (per_row * BLOCK))
        code_bytes = -(-self.cols // 2)
        for start in range(0, rows, step):
            part = slice(start * per_row, (start + step) * per_row)
            pairs = pack_pairs(codes_of(groups[part], inverse[part], zero[part]))
            into = self.qdata[start : start + step, :code_bytes]
            into.copy_(pairs.view(into.size(0), per_row * BLOCK // 2)[:, :code_bytes])
        self.qdata[:, code_bytes:] = held.view(torch.uint8)


# ---- quantizing ------------------------------------------------------------------------------


def _groups_of_rows(pieces: Iterable[Tensor], rows: int, cols: int) -> Tensor:
    """A weight `[rows, cols]`, in consecutive pieces, as `[groups, 64]` of the same dtype."""
    filled = cols // BLOCK * BLOCK + torch.arange(-cols % BLOCK) % (cols % BLOCK or 1)
    at, held = 0, torch.empty(0)
    for piece in pieces:
        if at == 0:  # copied, because the next piece overwrites this one
            held = piece.new_empty(rows, cols + filled.numel())
        some = held[at : at + piece.size(0)]
        some[:, :cols] = piece
        some[:, cols:] = piece[:, filled.to(piece.device)]
        at += piece.size(0)
    return held.view(-1, BLOCK)


# ---- dequantizing ----------------------------------------------------------------------------


@partial(compiled, options=FLAT_ON_GPUS, static_on_gpus=True)
def _write_weights(
    codes: Tensor, scales: Tensor, zeros: Tensor, row_scale: Tensor | None, out: Tensor
) -> None:
    """The kernel of `dequantize_rows`; `out` holds two weights in each integer (`write_pairs`)."""
    scale = scales.float()
    if row_scale is not None:
        scale = scale * row_scale.unsqueeze(1)
    scale, zero = scale.unsqueeze(-1), zeros.float().unsqueeze(-1)
    code = codes.unflatten(1, (scales.size(1), BLOCK // 2)).int()
    first, second = ((half.float() - zero) * scale for half in (code >> 4, code & 15))
    write_pairs(first, second, out)
