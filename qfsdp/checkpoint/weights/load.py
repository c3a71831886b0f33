"""Fills the base weights of a sharded model; each rank reads only its own rows."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from qfsdp.checkpoint.weights.folder import ModelWeights as ModelWeights
from qfsdp.checkpoint.weights.model_config import ModelConfig as ModelConfig
from qfsdp.checkpoint.weights.on_disk import check_disk as check_disk
from qfsdp.checkpoint.weights.on_disk import leave_on_disk
from qfsdp.checkpoint.weights.qfsdp_layout import StoredQuantizedWeight
from qfsdp.checkpoint.weights.read import STORED_DTYPES, Pieces, Read, StoredTensor, streamed
from qfsdp.checkpoint.weights.verify import (
    changed_settings,
    check_fit,
    compare_digests,
    of_any_rank,
    refusal,
)
from qfsdp.common.errors import UserError
from qfsdp.common.sizes import parse_size
from qfsdp.common.terminal import warn
from qfsdp.distributed.stores import DiskStore
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.hub_models.decoder import AnyDecoder
from qfsdp.tensor_subclasses.dtensor import gather_rows, local_part, local_rows
from qfsdp.tensor_subclasses.finite import is_finite
from qfsdp.tensor_subclasses.kernels.host_memory import return_freed_memory
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor

HUGE_PAGE_BYTES = 2 << 20


@torch.no_grad()
def load_base(
    model: AnyDecoder,
    source: ModelWeights,
    device: torch.device,
    sharding: ShardingConfig | None = None,
    progress: bool = False,
) -> None:
    """Gives `model` storage and fills its base parameters; adapters are left unset.

    A rank reads its own rows of one tensor after the other, in pieces, while it processes the
    pieces before: it moves them to their device, quantizes them if the parameter is quantized and
    the stored weight is not, and writes them into its shard. Besides the shards this takes three
    pieces of 16 MB and the memory of quantizing one weight. Ranks exchange only the scales of
    weights that they quantize.

    Args:
        model: on the meta device; adapted, quantized and sharded.
        source: weights of the same architecture.
        device: this rank's device, where weights are quantized.
        sharding: the config that `model` was sharded with. Weights that stay on disk are not read
            here; a ring reads them ahead of use. If the base is offloaded, this process returns
            freed memory to the system from here on.
        progress: show a bar, or one line at the end where standard error is no terminal.

    Raises:
        UserError: the weights do not fit the model (`ModelWeights.check`), a file is truncated, a
            weight holds NaN or infinity, or the base cannot stay on disk (`check_disk`, or
            `sharding.ring_memory` is too small).
    """
    sharding = sharding or ShardingConfig()
    check_fit(source, model)
    model.to_empty(device="cpu" if sharding.cpu_offload else device)
    model.tie_weights()
    if sharding.offload_base != "none":
        return_freed_memory()
    memory = parse_size(sharding.ring_memory) if sharding.offload_base == "disk" else None
    if memory is not None:
        leave_on_disk(model, source, memory)
    params = list(base_parameters(model))
    for _, param in params:
        local = local_part(param)
        use_huge_pages(local.qdata if isinstance(local, QuantizedTensor) else local)
    damage = _fill_verified(params, source, device, progress)
    if damage is not None and source.write_again is not None:
        source = source.write_again(damage)
        damage = _fill_verified(params, source, device, progress)
        if memory is not None:
            leave_on_disk(model, source, memory)
    if damage is not None:
        raise refusal(source.folder, damage)
    if progress and (changed := changed_settings(source.folder)):
        names = ", ".join(changed)
        warn(f"{source.folder}: not as it was written or downloaded: {names}")


def _fill_verified(
    params: Sequence[tuple[str, nn.Parameter]],
    source: ModelWeights,
    device: torch.device,
    progress: bool,
) -> str | None:
    """Fills the parameters while the digests of the files are compared.

    Returns:
        How a file is damaged, or None; the same on every rank.

    Raises:
        UserError: the files are as they were written, and cannot be used.
    """
    files = sorted({tensor.file for tensor in source.files.tensors.values()})
    damage_of, problem = compare_digests(source.folder, files), None
    reads = [read for name, param in params for read in _reads(source, name, param, device)]
    try:
        with streamed(reads, progress) as pieces:
            for name, param in params:
                try:
                    _fill(param, name, source, pieces)
                except ValueError as error:
                    raise UserError(f"{source.folder}: {error}") from None
    except UserError as error:
        if any(_exchanges(source, name, param) for name, param in params):
            # The other ranks may wait for this one's scales.
            damage = damage_of()
            raise refusal(source.folder, damage) if damage else UserError(str(error)) from None
        problem = str(error)
    damage, problem = of_any_rank(damage_of(), problem)
    if damage is None and problem is not None:
        raise UserError(problem)
    return damage


def _exchanges(source: ModelWeights, name: str, param: nn.Parameter) -> bool:
    """Whether ranks exchange scales of a parameter: it is quantized while it is loaded."""
    return isinstance(local_part(param), QuantizedTensor) and name not in source.quantized


def _reads(
    source: ModelWeights, name: str, param: nn.Parameter, device: torch.device
) -> list[Read]:
    """The reads for this rank's rows of a parameter.

    Bytes that the shard holds unchanged are read straight into a shard on the CPU.
    """
    local, held = local_part(param), local_rows(param)
    rows = range(held.start, held.stop)
    if isinstance(local, QuantizedTensor) and isinstance(local.store, DiskStore):
        return []
    if (weight := source.quantized.get(name)) is not None:
        qdata = local.qdata if isinstance(local, QuantizedTensor) else None
        where = (local if qdata is None else qdata).device
        into = qdata if len(weight.columns) == 1 and where.type == "cpu" else None
        return [Read(column, rows, where, into) for column in weight.columns]
    stored = source.plain[name]
    if isinstance(local, QuantizedTensor):
        return [Read(stored, rows, device)]
    direct = STORED_DTYPES[stored.dtype] == local.dtype and local.device.type == "cpu"
    return [Read(stored, rows, local.device, local if direct else None)]


def _fill(param: nn.Parameter, name: str, source: ModelWeights, pieces: Pieces) -> None:
    """Fills this rank's rows of a parameter from the pieces of its `_reads`."""
    local, weight = local_part(param), source.quantized.get(name)
    if isinstance(local, QuantizedTensor):
        if isinstance(local.store, DiskStore):
            if weight is not None:
                _fill_metadata(local, source, weight)
        elif weight is not None:
            fill_quantized(local, source, weight, pieces)
        else:
            local.quantize_(next(pieces), name, partial(gather_rows, param))
    elif weight is not None:
        _fill_dequantized(local, local_rows(param), source, weight, pieces)
    else:
        for piece in _copied_pieces(local, next(pieces)):
            check_finite(name, piece)


def fill_quantized(
    local: QuantizedTensor, source: ModelWeights, weight: StoredQuantizedWeight, pieces: Pieces
) -> None:
    """Fills rows of a quantized tensor with the stored bytes.

    Args:
        pieces: for each column of the weight, the pieces of these rows.

    Raises:
        ValueError: its scales hold NaN or infinity.
    """
    for into in local.qdata.split([column.row_bytes for column in weight.columns], dim=1):
        for _ in _copied_pieces(into, next(pieces)):
            pass
    if not type(local).has_finite_scales(local.qdata, local.cols):
        raise ValueError(f"{weight.name}: its scales hold NaN or infinity")
    _fill_metadata(local, source, weight)


def _fill_metadata(
    local: QuantizedTensor, source: ModelWeights, weight: StoredQuantizedWeight
) -> None:
    for tensor, stored in zip(local.metadata, weight.metadata, strict=True):
        if isinstance(stored, StoredTensor):
            tensor.copy_(source.files.read(stored))
        else:
            tensor.fill_(stored)
        if not is_finite(tensor):
            raise ValueError(f"{weight.name}: its scales hold NaN or infinity")


def _fill_dequantized(
    local: Tensor, rows: slice, source: ModelWeights, weight: StoredQuantizedWeight, pieces: Pieces
) -> None:
    """Fills these rows of a trained parameter from a weight that is stored quantized."""
    height, width = weight.shape
    whole = FORMATS[weight.format].empty(height, width, local.dtype, "meta")
    quantized = torch.empty_like(whole[rows], device=local.device)
    assert isinstance(quantized, QuantizedTensor)
    fill_quantized(quantized, source, weight, pieces)
    local.copy_(quantized.dequantize())


def _copied_pieces(into: Tensor, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
    """Copies consecutive pieces into the rows of `into`, and yields those rows."""
    at = 0
    for piece in pieces:
        rows = into[at : at + len(piece)]
        if piece.data_ptr() != rows.data_ptr():  # else it was read there
            rows.copy_(piece)
        at += len(piece)
        yield rows


def check_finite(name: str, values: Tensor) -> None:
    """Raises ValueError if one of the numbers is NaN or infinite."""
    if not is_finite(values):
        half = " in fp16, whose largest number is 65,504" * (values.dtype == torch.float16)
        raise ValueError(f"{name}: holds NaN or infinity{half}")


def use_huge_pages(tensor: Tensor) -> None:
    """Asks the kernel for 2 MB pages below a CPU tensor of 4 MB or more.

    The first write to fresh memory costs a page fault for every page: a file in the page cache
    was read into 4 KB pages at 2.5 GB/s and into 2 MB pages at 12 GB/s.
    """
    size = tensor.untyped_storage().nbytes()  # one byte if the tensor stands for rows on disk
    if tensor.device.type != "cpu" or size < 2 * HUGE_PAGE_BYTES or sys.platform != "linux":
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = tensor.data_ptr() + size - start
    advice = mmap.MADV_HUGEPAGE  # a hint: errors do not matter
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)
