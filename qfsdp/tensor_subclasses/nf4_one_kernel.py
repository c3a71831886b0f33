"""NF4 to weights in one kernel, which works out the absmax of a weight's block for each weight.

`nf4.py` has two: the first writes absmax without its offset (4 bytes for 64 weights), the second
reads it. One kernel saves a launch and 1/16 of a byte per weight. It must not fuse the product and
the sum of absmax into one operation, which would round once: inductor is told so, and the bits stay
those of bitsandbytes. Not yet timed on a GPU: `QFSDP_ONE_KERNEL=1` turns it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.four_bit import (
    BLOCK,
    dequantize_pairs,
    table,
    write_pairs,
    write_uncompiled,
)
from qfsdp.tensor_subclasses.kernels.compiled import FLAT_ON_GPUS, ROUNDED_AS_ON_CPUS, compiled
from qfsdp.tensor_subclasses.nf4_levels import DYNAMIC_LEVELS, NF4_LEVELS, NF4_PAIRS, SCALE_BLOCK


def dequantize_at_once(
    qdata: Tensor,
    metadata: Sequence[Tensor],
    cols: int,
    row_offset: int,
    dtype: torch.dtype,
    row_scale: Tensor | None,
) -> Tensor:
    """As `QuantizedTensor.dequantize_rows`."""
    scales, offset = metadata
    codes, absmax_codes = qdata.split([-(-cols // 2), -(-cols // BLOCK)], dim=1)
    tables = table(DYNAMIC_LEVELS, qdata), table(NF4_LEVELS, qdata)

    def write(rows: slice, codes: Tensor, scale: Tensor | None, out: Tensor) -> None:
        # Only the scales of these rows, so that all experts of a layer share one build.
        blocks = absmax_codes[rows]
        first = (row_offset + rows.start) * blocks.size(1)
        skip, last = first % SCALE_BLOCK, first + blocks.numel() - 1
        mine = scales[first // SCALE_BLOCK : last // SCALE_BLOCK + 1]
        _write_at_once(codes, blocks, mine, offset, scale, *tables, skip, out)

    return dequantize_pairs(write, codes, cols, dtype, row_scale)


@partial(compiled, options=FLAT_ON_GPUS | ROUNDED_AS_ON_CPUS, static_on_gpus=True)
def _write_at_once(
    codes: Tensor,
    absmax_codes: Tensor,
    scales: Tensor,
    offset: Tensor,
    row_scale: Tensor | None,
    dynamic: Tensor,
    levels: Tensor,
    skip: int,
    out: Tensor,
) -> None:
    """`skip`: blocks of the first scale that are in earlier rows. `out` holds two weights in each
    integer (`write_pairs`)."""
    rows, blocks = absmax_codes.shape
    block = torch.arange(rows * blocks, device=codes.device).view(rows, blocks)
    scale = scales[(block + skip) // SCALE_BLOCK]
    absmax = dynamic[absmax_codes.int()] * scale + offset
    if row_scale is not None:
        absmax = absmax * row_scale.unsqueeze(1)
    absmax = absmax.unsqueeze(-1)
    if not torch.compiler.is_compiling():
        return write_uncompiled(NF4_PAIRS, codes, absmax, out)
    code = codes.unflatten(1, (blocks, BLOCK // 2)).int()
    write_pairs(levels[code >> 4] * absmax, levels[code & 15] * absmax, out)
