"""What the CPU multiplies fast, where it is the CPU that computes."""

from __future__ import annotations

import torch
from torch import Tensor

from qfsdp.tensor_subclasses.kernels.dry_run import on_cpu

BF16_PRODUCTS = not torch.backends.mkldnn.is_available() or bool(
    torch.ops.mkldnn._is_mkldnn_bf16_supported()
)
"""Whether bf16 matrices are multiplied faster than fp32 ones: by x86 with AVX-512, and Arm with
bf16 instructions."""


def product_dtype(x: Tensor) -> torch.dtype:
    """What `x` is multiplied in by a matrix: its own dtype, but fp32 for bf16 on a CPU without bf16
    products.

    PyTorch has plain loops for them there: 17 GFLOP/s for `x @ W.T` and 1 to 2 for `dy @ W`,
    against 80 to 150 of either in fp32 (two AVX2 cores, torch 2.13). What is kept for backward
    stays bf16, copies of a factor in fp32 live as long as the product.
    """
    if x.dtype == torch.bfloat16 and not BF16_PRODUCTS and on_cpu(x):
        return torch.float32
    return x.dtype
