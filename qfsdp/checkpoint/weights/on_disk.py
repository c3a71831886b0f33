"""Weights that stay on disk (`sharding.offload_base: disk`): a ring reads them ahead of use."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.read import STORED_DTYPES, OpenFiles, StoredTensor
from qfsdp.common.errors import UserError
from qfsdp.distributed.disk_ring import DiskRing, FileRows
from qfsdp.distributed.stores import DiskStore
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.hub_models.decoder import AnyDecoder
from qfsdp.tensor_subclasses.dtensor import local_part, local_rows
from qfsdp.tensor_subclasses.plain import PlainRows
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor


def check_disk(model: AnyDecoder, source: ModelWeights) -> None:
    """Checks that the offloaded weights are stored as the bytes that the model holds: the frozen
    linears of the layers, and `lm_head` if it is quantized. Raises UserError: one is not."""
    for name, param in base_parameters(model):
        local, plain = local_part(param), source.plain.get(name)
        offloaded = name.endswith("_proj.weight") and not param.requires_grad
        if not offloaded and not isinstance(local, QuantizedTensor):
            continue
        if isinstance(local, QuantizedTensor) and not isinstance(local, PlainRows):
            weight = source.quantized.get(name)
            if weight is None or len(weight.columns) != 1:
                raise UserError(
                    f"sharding.offload_base: 'disk' reads quantized bytes from model.path, and "
                    f"{source.folder} does not have them for {name!r}; expected a folder that "
                    "`tune run recipes/quantize` wrote, or model.quantize_cache"
                )
        elif plain is None or STORED_DTYPES.get(plain.dtype) != param.dtype:
            raise UserError(
                f"sharding.offload_base: 'disk' reads weights as they are stored, and {name!r} in "
                f"{source.folder} is not {param.dtype}, in which this run computes; expected the "
                "stored dtype as model.dtype, or quantized weights"
            )


def leave_on_disk(model: AnyDecoder, source: ModelWeights, memory: int) -> None:
    """Has a ring read this rank's rows of every weight that stays on disk."""
    check_disk(model, source)
    ring, files = DiskRing(memory), OpenFiles()
    for name, param in base_parameters(model):
        local, held = local_part(param), local_rows(param)
        if isinstance(local, QuantizedTensor) and isinstance(local.store, DiskStore):
            weight = source.quantized.get(name)
            stored = source.plain[name] if weight is None else weight.columns[0]
            read_into = partial(_read_rows, files, stored, held.start)
            rows = FileRows(held.stop - held.start, stored.row_bytes, read_into)
            local.store.attach(ring, rows)
    ring.start()


def _read_rows(files: OpenFiles, stored: StoredTensor, first: int, into: Tensor) -> None:
    """Fills bytes, as many as rows have from `first` on."""
    numbers = into.view(STORED_DTYPES[stored.dtype])
    files.read_rows(stored, first, numbers.view(-1, *stored.shape[1:]))
