"""What FSDP2 calls on a quantized weight: before and after it gathers the bytes of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qfsdp.tensor_subclasses.tensor_ops import RowPosition


class GatheredTensor(torch.Tensor):
    """Base class of `TensorMethods`.

    It has the one-argument form of `fsdp_pre_all_gather`: with the five-argument form FSDP2
    requires inputs of exactly the padded *logical* size, and bytes have another size.
    """

    def fsdp_pre_all_gather(self: Any, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """This rank's bytes, padded so that all ranks send equally many rows; and the metadata."""
        rows_per_rank = -(-self.global_rows // self.position.parts // mesh.size())
        qdata = self.fetch().qdata
        if missing := rows_per_rank - qdata.size(0):
            qdata = F.pad(qdata, (0, 0, 0, missing))
        return (qdata.contiguous(),), self.metadata

    def fsdp_post_all_gather(
        self: Any,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[Tensor, ...],
        param_dtype: torch.dtype,
        *,
        out: GatheredTensor | None = None,
    ) -> tuple[GatheredTensor, tuple[Tensor, ...]] | None:
        """The gathered bytes without padding, as the whole weight, or its part with these rows.

        The second result, the inner tensors that FSDP2 may free, is empty. The weight is a view of
        the all-gather output, whose storage FSDP2 frees and refills itself. If a view were
        reported, FSDP2 would shrink that storage to the size of the view.
        """
        if out is not None:
            return None  # `out` is a view of the storage that has just been refilled
        rows = self.global_rows // self.position.parts
        qdata = all_gather_outputs[0][:rows]
        first = 0 if self.position.parts == 1 else self.row_offset // rows * rows
        # `rows=0`: the metadata belongs to the shard, so nothing else is copied into the weight.
        position = RowPosition(first, rows=0)
        return self._like(qdata, metadata=metadata, position=position, store=None), ()
