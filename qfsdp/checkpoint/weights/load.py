"""Base weights into a sharded model, each rank reading its own rows only."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.qfsdp_layout import QuantizedWeight, local_columns
from qfsdp.checkpoint.weights.read import DTYPES as STORED_DTYPES
from qfsdp.checkpoint.weights.read import OpenFiles, Read, RowStream, StoredTensor
from qfsdp.cli.errors import UserError
from qfsdp.cli.sizes import parse_size
from qfsdp.distributed.disk_ring import DiskRing, FileRows
from qfsdp.distributed.stores import DiskStore
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.modules.adapters import base_parameters
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.dtensor import gather_rows, local_part, local_rows
from qfsdp.tensor_subclasses.kernels.host_memory import return_freed_memory
from qfsdp.tensor_subclasses.plain import PlainRows
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor

HUGE_PAGE_BYTES = 2 << 20


@dataclass
class ModelConfig:
    """Section `model`: the base model.

    Fields:
        path: a Hugging Face model folder (`config.json` and safetensors), a bitsandbytes 4-bit
            one, or one that `recipes/quantize` wrote.
        dtype: what the model computes in, and what weights that are not packed are held in.
            Adapters and the optimizer are fp32 always. Files may be in any dtype.
        quantize_cache: a folder, seen by all ranks, that keeps the packed weights of the first
            run for all later ones; null: quantize every time.
    """

    path: str
    dtype: Literal["bf16", "fp32"] = "bf16"
    quantize_cache: str | None = None

    @property
    def folder(self) -> Path:
        """`path` with a leading `~` expanded."""
        return Path(self.path).expanduser()


@torch.no_grad()
def load_base(
    model: Decoder,
    source: ModelWeights,
    device: torch.device,
    sharding: ShardingConfig | None = None,
    progress: bool = False,
) -> None:
    """Gives `model` storage and fills its base parameters.

    One tensor after another: a rank reads its own rows in pieces, moves them, quantizes them
    where the parameter is packed and the file's is not, and writes them into its shard, while the
    next pieces are read. Above the shards it holds three pieces of 16 MB and what quantizing
    one takes; ranks exchange nothing but the scales of weights that they quantize. Adapters are
    left unset.

    Args:
        model: built on the meta device, adapted, packed and sharded already.
        source: weights of the same architecture.
        device: this rank's, where weights are quantized.
        sharding: that `model` was sharded with: where parameters are held. What stays on disk is
            not read, and waits in a ring for its first use. With the base elsewhere this process
            gives memory that it frees back to the system from here on.
        progress: show a bar (or, where standard error is no terminal, a line at the end).

    Raises:
        UserError: the weights are not this model's (`ModelWeights.check`), a file is truncated,
            or a weight holds NaN or infinity; or what is to stay on disk is not stored as it is
            held (`check_disk`), or needs more than `sharding.ring_memory`.
    """
    sharding = sharding or ShardingConfig()
    source.check(model)
    model.to_empty(device="cpu" if sharding.cpu_offload else device)
    model.tie_weights()
    if sharding.offload_base != "none":
        return_freed_memory()
    if sharding.offload_base == "disk":
        _leave_on_disk(model, source, parse_size(sharding.ring_memory))
    params = list(base_parameters(model))
    for _, param in params:
        use_huge_pages(local_part(param))
    reads = [read for name, param in params for read in _reads(source, name, param, device)]
    with streamed(reads, progress) as pieces:
        for name, param in params:
            local = local_part(param)
            try:
                if isinstance(local, QuantizedTensor) and isinstance(local.store, DiskStore):
                    fill_metadata(local, source, name)
                elif isinstance(local, QuantizedTensor) and name in source.quantized:
                    fill_quantized(local, source, source.quantized[name], pieces)
                elif isinstance(local, QuantizedTensor):
                    local.quantize_(next(pieces), name, partial(gather_rows, param))
                elif name in source.quantized:
                    _fill_dequantized(local, local_rows(param), source, name, pieces)
                else:
                    _fill_plain(local, name, next(pieces))
            except ValueError as error:
                raise UserError(f"{source.folder}: {error}") from None


def _leave_on_disk(model: Decoder, source: ModelWeights, memory: int) -> None:
    """Has a ring read this rank's rows of every weight that stays on disk."""
    check_disk(model, source)
    ring, files = DiskRing(memory), OpenFiles()
    for name, param in base_parameters(model):
        local, held = local_part(param), local_rows(param)
        if isinstance(local, QuantizedTensor) and isinstance(local.store, DiskStore):
            weight = source.quantized.get(name)
            stored = source.plain[name] if weight is None else weight.columns[0]
            read_into = partial(files.read_rows, stored, held.start)
            rows = FileRows(held.stop - held.start, stored.row_bytes, read_into)
            local.store.attach(ring, rows)
    ring.start()


def check_disk(model: Decoder, source: ModelWeights) -> None:
    """Raises UserError unless `source` has the weights that are offloaded as the bytes that are
    held: those of the layers' linears, and `lm_head` where it is packed."""
    for name, param in base_parameters(model):
        local, plain = local_part(param), source.plain.get(name)
        offloaded = name.endswith("_proj.weight") and not param.requires_grad
        if not offloaded and not isinstance(local, QuantizedTensor):
            continue
        if isinstance(local, QuantizedTensor) and local.format != PlainRows.format:
            if len(getattr(source.quantized.get(name), "columns", "no")) != 1:
                raise UserError(
                    f"sharding.offload_base: 'disk' reads packed bytes from model.path, and "
                    f"{source.folder} does not have them of {name!r}; write them once with `tune "
                    "run recipes/quantize`, or set model.quantize_cache"
                )
        elif plain is None or STORED_DTYPES.get(plain.dtype) != param.dtype:
            raise UserError(
                f"sharding.offload_base: 'disk' reads weights as they are stored, and {name!r} in "
                f"{source.folder} is not {param.dtype}; set model.dtype to what is stored"
            )


def _reads(
    source: ModelWeights, name: str, param: nn.Parameter, device: torch.device
) -> list[Read]:
    """What is to be read for this rank's part of a parameter, and where to.

    Whatever is stored as it is held goes straight into a shard on the CPU.
    """
    local, held = local_part(param), local_rows(param)
    rows = range(held.start, held.stop)
    if isinstance(local, QuantizedTensor) and isinstance(local.store, DiskStore):
        return []
    if (weight := source.quantized.get(name)) is not None:
        packed = local.qdata if isinstance(local, QuantizedTensor) else None
        where = (local if packed is None else packed).device
        into = packed if len(weight.columns) == 1 and where.type == "cpu" else None
        return [Read(column, rows, where, into) for column in weight.columns]
    stored = source.plain[name]
    if isinstance(local, QuantizedTensor):
        return [Read(stored, rows, device)]
    direct = STORED_DTYPES[stored.dtype] == local.dtype and local.device.type == "cpu"
    return [Read(stored, rows, local.device, local if direct else None)]


def fill_quantized(
    local: QuantizedTensor,
    source: ModelWeights,
    weight: QuantizedWeight,
    pieces: Iterator[Iterator[Tensor]],
) -> None:
    """Fills rows of a weight with the bytes that are stored of it.

    Args:
        pieces: for each of the weight's columns, the pieces of these rows.

    Raises:
        ValueError: its scales hold NaN or infinity.
    """
    for into in local_columns(weight, local.qdata):
        for _ in _copy_pieces(into, next(pieces)):
            pass
    fill_metadata(local, source, weight.name)


def fill_metadata(local: QuantizedTensor, source: ModelWeights, name: str) -> None:
    """Fills the extras of a weight that is stored packed; any other has none.

    Raises:
        ValueError: they hold NaN or infinity.
    """
    stored_extras = source.quantized[name].metadata if name in source.quantized else []
    for extra, stored in zip(local.metadata, stored_extras, strict=True):
        if isinstance(stored, StoredTensor):
            extra.copy_(source.files.read(stored))
        else:
            extra.fill_(stored)
        if not torch.isfinite(extra).all():
            raise ValueError(f"{name}: its scales hold NaN or infinity")


def _fill_dequantized(
    local: Tensor, rows: slice, source: ModelWeights, name: str, pieces: Iterator[Iterator[Tensor]]
) -> None:
    """Fills these rows of a weight that is trained, but stored packed."""
    weight = source.quantized[name]
    height, width = weight.shape
    whole = FORMATS[weight.format].empty(height, width, local.dtype, "meta")
    packed = torch.empty_like(whole[rows], device=local.device)
    assert isinstance(packed, QuantizedTensor)
    fill_quantized(packed, source, weight, pieces)
    local.copy_(packed.dequantize())


def _fill_plain(local: Tensor, name: str, pieces: Iterator[Tensor]) -> None:
    for piece in _copy_pieces(local, pieces):
        check_finite(name, piece)


def check_finite(name: str, values: Tensor) -> None:
    """Raises ValueError if one of the numbers is NaN or infinite."""
    if values.numel() and not torch.isfinite(torch.stack(values.aminmax())).all():
        raise ValueError(f"{name}: holds NaN or infinity")


def _copy_pieces(into: Tensor, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
    at = 0
    for piece in pieces:
        rows = into[at : at + len(piece)]
        if piece.data_ptr() != rows.data_ptr():
            rows.copy_(piece)
        at += len(piece)
        yield rows


def use_huge_pages(local: Tensor) -> None:
    """Asks for 2 MB pages below a large shard in host memory.

    The first write to fresh memory costs a page fault for every page: a file in the page cache
    was read into 4 KB pages at 2.5 GB/s and into 2 MB pages at 12 GB/s.
    """
    data = local.qdata if isinstance(local, QuantizedTensor) else local
    size = data.untyped_storage().nbytes()  # one byte, where it stands for rows on disk
    if data.device.type != "cpu" or size < 2 * HUGE_PAGE_BYTES or sys.platform != "linux":
        return
    start = -(-data.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = data.data_ptr() + size - start
    advice = mmap.MADV_HUGEPAGE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)  # a hint


@contextmanager
def streamed(reads: Sequence[Read], progress: bool) -> Iterator[Iterator[Iterator[Tensor]]]:
    """For each entry the iterator over its pieces, read ahead (`RowStream`) and counted."""
    with RowStream(reads) as stream, Progress(sum(r.size for r in reads), progress) as bar:
        yield (bar.count(stream.next_read()) for _ in reads)


class Progress:
    """Bytes read by this rank: a bar with rate and time left, or one line at the end."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total, self._shown = total, shown
        self._since = time.perf_counter()
        self._bar = None
        if shown and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                desc="loading",
                unit="B",
                unit_scale=True,
                dynamic_ncols=True,
                leave=False,
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, error: type | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._shown and error is None:
            seconds = max(time.perf_counter() - self._since, 1e-9)
            rate = self._total / 1e6 / seconds
            size = f"{self._total / 2**30:.2f} GiB in {seconds:.1f} s"
            print(f"loaded {size} ({rate:.0f} MB/s per rank)", file=sys.stderr, flush=True)

    def count(self, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        """The same pieces, counted as they pass."""
        for piece in pieces:
            yield piece
            if self._bar is not None:
                self._bar.update(piece.numel() * piece.element_size())
