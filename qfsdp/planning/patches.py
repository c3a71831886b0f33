"""What a dry run replaces in PyTorch and in qfsdp, and puts back when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

RANDOM_STATE = torch.get_rng_state().nbytes  # 5,056


@contextmanager
def patched(
    target: str, before_resize: Callable[[torch.UntypedStorage, int], None]
) -> Iterator[None]:
    """Applies the patches in a `with` block.

    Args:
        target: "cuda" or "cpu", the device type that the dry run stands for.
        before_resize: called with each storage that is resized, and its new size in bytes.
    """
    resize = torch.UntypedStorage.resize_

    def followed_resize(storage: torch.UntypedStorage, size: int) -> Any:
        before_resize(storage, size)
        return resize(storage, size)

    replacements: list[tuple[Any, str, Any]] = [
        # FSDP2 frees gathered parameters by resizing their storages, which no dispatch mode sees.
        (torch.UntypedStorage, "resize_", followed_resize)
    ]
    if target == "cpu":  # each checkpointed layer keeps the state of random numbers in host memory
        replacements.append((torch, "get_rng_state", _random_state))
        replacements.append((torch, "set_rng_state", lambda state: None))
    if target == "cuda":
        replacements.append((F, "rms_norm", _fused_rms_norm))
        replacements.append((F, "scaled_dot_product_attention", _fused_attention))
    with ExitStack() as undo:
        for owner, name, value in replacements:
            undo.enter_context(patch.object(owner, name, value))
        yield


def _random_state() -> Tensor:
    """As large as the real one, and counted; a dry run draws no numbers."""
    return torch.empty(RANDOM_STATE, dtype=torch.uint8)


_attention = F.scaled_dot_product_attention


def _fused_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **more: Any
) -> Tensor:
    """Attention whose values are wider or narrower than its keys (latent attention): CUDA has a
    kernel for it; a CPU computes, and keeps, all scores."""
    if q.size(-1) == v.size(-1):
        return _attention(q, k, v, attn_mask, **more)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
    given = (more.get("dropout_p", 0.0), more.get("is_causal", False))
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(q, k, v, attn_mask, True, *given, scale=more.get("scale"))[0]  # type: ignore[no-any-return]


class _FusedRMSNorm(torch.autograd.Function):
    """`F.rms_norm` without a weight as CUDA runs it: one kernel that keeps its input and one number
    per row. The CPU keeps the intermediates of a composition."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Sequence[int], eps: float) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        x, _ = ctx.saved_tensors
        return torch.empty_like(x), None, None


def _fused_rms_norm(x: Tensor, normalized_shape: Sequence[int], eps: float) -> Tensor:
    return _FusedRMSNorm.apply(x, normalized_shape, eps)  # type: ignore[no-any-return]
