"""What a dry run cannot see of PyTorch's own operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

import qfsdp.modules.attention  # noqa: F401  (defines its operations)

Target = Literal["cpu", "cuda"]
aten = torch.ops.aten


# ---- results that depend on numbers, which there are none of ----------------------------------


def _scalar(tensor: Tensor) -> bool | int | float | None:
    """1 of its type, where the number is not known."""
    if getattr(tensor, "constant", None) is not None:
        return None
    return 1.0 if tensor.is_floating_point() else 1


def _chosen(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """`tensor[mask]`, of a mask that chooses everything; None for other indices."""
    mask = indices[0]
    if len(indices) != 1 or mask is None or mask.dtype != torch.bool:
        return None
    return tensor.new_empty(mask.numel(), *tensor.shape[mask.dim() :])


def _put(tensor: Tensor, indices: Sequence[Tensor | None], *_: Any) -> Tensor | None:
    """Its gradient, which real tensors write into `tensor`."""
    mask = indices[0]
    return tensor if mask is not None and mask.dtype == torch.bool else None


def _all_places(mask: Tensor) -> Tensor:
    """`mask.nonzero()` of a mask that chooses everything."""
    return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)


DATA_DEPENDENT: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.nonzero.default: _all_places,
    aten.index.Tensor: _chosen,
    aten.index_put.default: _put,
    aten.index_put_.default: _put,
    aten._index_put_impl_.default: _put,
}
"""Operation -> what stands for its result; None: the operation itself."""

# ---- memory within operations ------------------------------------------------------------------


def _cpu_tile(q: Tensor) -> tuple[int, int]:
    """Queries and keys that a thread of the CPU's flash attention works on at a time."""
    seq = q.size(-2)
    return min(seq, 256 if seq >= 768 else 64 if seq >= 192 else 32), min(seq, 512)


def _cpu_forward(q: Tensor, *_: Any, **__: Any) -> float:
    """A thread's scores (fp32, and once more in bf16), their row sums and maxima, its output."""
    queries, keys = _cpu_tile(q)
    scores = queries * keys * (4 if q.itemsize == 4 else 6)
    return torch.get_num_threads() * (scores + 8 * queries + 4 * queries * q.size(-1))


def _cpu_backward(grad: Tensor, q: Tensor, *_: Any, **__: Any) -> float:
    """A thread's weights and their gradients, and what bf16 products pack of them."""
    queries, keys = _cpu_tile(q)
    packed = 0 if q.itemsize == 4 else 4 * q.size(-1) * keys
    scores = 2 * queries * keys * (4 if q.itemsize == 4 else 6)
    return torch.get_num_threads() * (scores + 4 * queries + packed)


def _cuda_backward(grad: Tensor, q: Tensor, k: Tensor, *_: Any, **__: Any) -> float:
    """FlashAttention 2: the gradient of q in fp32, for sequences that are multiples of 128; a row's
    product of output and gradient; gradients of k and v for every head of q."""
    batch, heads, seq, dim = q.shape
    rows = batch * heads * -(-seq // 128) * 128
    expanded = 2 * k.itemsize * q.numel() if k.size(1) != heads else 0
    return rows * (4 * -(-dim // 32) * 32 + 4) + expanded


def _documents(kernel: Callable[..., float], tensors: int) -> Callable[..., float]:
    """The same for packed rows `[tokens, heads, head_dim]`, of which documents are worked on one
    after the other, each of `tensors` results written to memory of its own first."""

    def workspace(*args: Any, **_: Any) -> float:
        given = [t for t in args if isinstance(t, Tensor) and t.ndim == 3]
        return kernel(*(t.transpose(0, 1).unsqueeze(0) for t in given)) + tensors * args[0].nbytes

    return workspace


# cuBLAS keeps a workspace for every thread that calls it, forward's and autograd's: 32 MiB on
# Hopper, 8 MiB on older GPUs.
CUBLAS_WORKSPACES = 2 * (32 << 20)

_flash = aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_packed = torch.ops.qfsdp.attend_documents.default
_packed_backward = torch.ops.qfsdp.attend_documents_backward.default

WORKSPACE: dict[tuple[Target, Any], Callable[..., float]] = {
    ("cpu", _flash): _cpu_forward,
    ("cpu", _flash_backward): _cpu_backward,
    ("cuda", _flash_backward): _cuda_backward,
    ("cpu", _packed): _documents(_cpu_forward, 1),
    ("cpu", _packed_backward): _documents(_cpu_backward, 3),
    ("cuda", _packed): lambda *_: 0.0,
    ("cuda", _packed_backward): _documents(_cuda_backward, 0),
    # gloo gathers and reduces in memory of its own.
    ("cpu", torch.ops.c10d._allgather_base_.default): lambda out, *_: out.nbytes,
    ("cpu", torch.ops.c10d._reduce_scatter_base_.default): lambda _, given, *__: given.nbytes,
}
"""(target, operation) -> bytes that it takes for itself, beside its results."""
