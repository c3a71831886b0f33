"""What the CPU multiplies fast, where it is the CPU that computes."""

from __future__ import annotations

import logging

import torch


def has_bf16_products() -> bool:
    """Whether bf16 matrices are multiplied faster than fp32 ones: by x86 with AVX-512, and Arm with
    bf16 instructions.

    Elsewhere PyTorch has plain loops for them: 17 GFLOP/s for `x @ W.T` and 1 to 2 for `dy @ W`,
    against 80 to 150 of either in fp32 (two AVX2 cores, torch 2.13).
    """
    return not torch.backends.mkldnn.is_available() or bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def dtype_override() -> list[str]:
    """What a command line says of the dtype on this CPU: fp32 where bf16 has no products."""
    return [] if has_bf16_products() else ["model.dtype=fp32"]


def warn_of_bf16(dtype: torch.dtype, device: torch.device) -> None:
    """Says so where a model is about to compute on this CPU in bf16, to its cost."""
    if device.type == "cpu" and dtype == torch.bfloat16 and not has_bf16_products():
        logging.getLogger("qfsdp").warning(
            "this CPU has no bf16 matrix products, and training takes about 20 times as long as in "
            "fp32: set model.dtype=fp32"
        )
