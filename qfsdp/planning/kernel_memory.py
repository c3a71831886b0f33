"""What fake tensors do not show of PyTorch's own operations.

Results of operations that need values, and the memory that kernels take for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

import qfsdp.modules.attention.documents  # noqa: F401  (defines qfsdp::attend_documents)
from qfsdp.modules.attention.sinks import BLOCK

Target = Literal["cpu", "cuda"]
aten = torch.ops.aten


# ---- operations that fake tensors do not run: they hold no values ------------------------------


def _scalar(tensor: Tensor) -> bool | int | float | None:
    """1 in the tensor's type; None if the value is known."""
    if getattr(tensor, "constant", None) is not None:
        return None
    return 1.0 if tensor.is_floating_point() else 1


def _masked(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """`tensor[mask]` for a mask that is true everywhere; None if the index is not a mask."""
    mask = indices[0]
    if len(indices) != 1 or mask is None or mask.dtype != torch.bool:
        return None
    return tensor.new_empty(mask.numel(), *tensor.shape[mask.dim() :])


def _put_masked(tensor: Tensor, indices: Sequence[Tensor | None], *_: Any) -> Tensor | None:
    """The gradient of `tensor[mask]`, written into `tensor`; None if the index is not a mask."""
    mask = indices[0]
    return tensor if mask is not None and mask.dtype == torch.bool else None


def _nonzero(mask: Tensor) -> Tensor:
    """`mask.nonzero()` for a mask that is true everywhere."""
    return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)


def _grouped(x: Tensor, other: Tensor, offs: Tensor | None = None, *_: Any) -> Tensor | None:
    """A product for each group of rows; fake tensors of fp32 refuse what real ones compute. None
    for bf16, and for forms that do not occur here."""
    if x.dtype == torch.bfloat16 or x.dim() != 2 or offs is None:
        return None
    if other.dim() == 3:
        return x.new_empty(len(x), other.size(-1))
    return x.new_empty(len(offs), len(x), other.size(-1))  # gradients of the groups' matrices


DATA_DEPENDENT: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.nonzero.default: _nonzero,
    aten._grouped_mm.default: _grouped,
    aten.index.Tensor: _masked,
    aten.index_put.default: _put_masked,
    aten.index_put_.default: _put_masked,
    aten._index_put_impl_.default: _put_masked,
}
"""Operation -> function of its arguments that gives its result; None: run the operation itself."""

# ---- workspaces of kernels ---------------------------------------------------------------------


def _cpu_tile(q: Tensor) -> tuple[int, int]:
    """Numbers of queries and keys in one tile of a thread, in the CPU's flash attention."""
    seq = q.size(-2)
    return min(seq, 256 if seq >= 768 else 64 if seq >= 192 else 32), min(seq, 512)


def _cpu_forward(q: Tensor, *_: Any, **__: Any) -> float:
    """Per thread: scores in fp32, again in bf16 for bf16 input, their row sums and maxima, and the
    output."""
    queries, keys = _cpu_tile(q)
    scores = queries * keys * (4 if q.itemsize == 4 else 6)
    return torch.get_num_threads() * (scores + 8 * queries + 4 * queries * q.size(-1))


def _cpu_backward(grad: Tensor, q: Tensor, *_: Any, **__: Any) -> float:
    """Per thread: attention weights and their gradients, and copies that bf16 products pack."""
    queries, keys = _cpu_tile(q)
    packed = 0 if q.itemsize == 4 else 4 * q.size(-1) * keys
    scores = 2 * queries * keys * (4 if q.itemsize == 4 else 6)
    return torch.get_num_threads() * (scores + 4 * queries + packed)


def _cuda_backward(grad: Tensor, q: Tensor, k: Tensor, *_: Any, **__: Any) -> float:
    """FlashAttention 2: the gradient of q in fp32 and one number per row (output times gradient),
    with rows padded to multiples of 128; gradients of k and v for every head of q, of all keys that
    a part of a shared row sees."""
    batch, heads, seq, dim = q.shape
    rows = batch * heads * -(-seq // 128) * 128
    expanded = 2 * k.nbytes // k.size(1) * heads if k.size(1) != heads else 0
    return rows * (4 * -(-dim // 32) * 32 + 4) + expanded


def _per_document(kernel: Callable[..., float], temporaries: int) -> Callable[..., float]:
    """The formula for packed rows, `[tokens, heads, head_dim]`.

    The operation runs `kernel` for one document after the other. It holds `temporaries` tensors of
    a document: each result before it is copied, and in backward the output, computed again.
    """

    def workspace(*args: Any, **_: Any) -> float:
        given = [t for t in args if isinstance(t, Tensor) and t.ndim == 3]
        return (
            kernel(*(t.transpose(0, 1).unsqueeze(0) for t in given)) + temporaries * args[0].nbytes
        )

    return workspace


def _blocks_with_sinks(scores: int, copies: int, lengths: int) -> Callable[..., float]:
    """The formula for attention with sinks on a CPU: tensors of one block's scores in fp32, and
    copies of q. How many queries and keys a document has are the arguments from `lengths` on."""

    def workspace(*args: Any, **_: Any) -> float:
        q, (queries, keys) = args[0], args[lengths : lengths + 2]  # q, or a gradient of its shape
        return 4 * (scores * q.size(1) * min(BLOCK, queries) * keys + copies * q.numel())

    return workspace


# cuBLAS keeps a workspace for each calling thread, here forward's and autograd's: 32 MiB on Hopper,
# 8 MiB on older GPUs.
CUBLAS_WORKSPACES = 2 * (32 << 20)

_flash = aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_packed = torch.ops.qfsdp.attend_documents.default
_packed_backward = torch.ops.qfsdp.attend_documents_backward.default
_sinks = torch.ops.qfsdp.attend_with_sinks.default
_sinks_backward = torch.ops.qfsdp.attend_with_sinks_backward.default

WORKSPACE: dict[tuple[Target, Any], Callable[..., float]] = {
    ("cpu", _flash): _cpu_forward,
    ("cpu", _flash_backward): _cpu_backward,
    ("cuda", _flash_backward): _cuda_backward,
    ("cpu", _packed): _per_document(_cpu_forward, 1),
    ("cpu", _packed_backward): _per_document(_cpu_backward, 4),
    ("cuda", _packed): lambda *_: 0.0,
    ("cuda", _packed_backward): _per_document(_cuda_backward, 0),
    ("cpu", _sinks): _blocks_with_sinks(2, 0, lengths=6),
    ("cpu", _sinks_backward): _blocks_with_sinks(2, 3, lengths=8),
    ("cuda", _sinks): lambda *_: 0.0,
    ("cuda", _sinks_backward): _per_document(_cuda_backward, 0),
    # gloo gathers and reduces in separate memory.
    ("cpu", torch.ops.c10d._allgather_base_.default): lambda out, *_: out.nbytes,
    ("cpu", torch.ops.c10d._reduce_scatter_base_.default): lambda _, given, *__: given.nbytes,
}
"""(target, operation) -> function of its arguments: bytes of its workspace."""
