"""The device of tests that need a GPU.

`QFSDP_GPU_TESTS_ON=cpu` tries the tests themselves: they compare numbers then, and no bytes.
"""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.device(os.environ.get("QFSDP_GPU_TESTS_ON", "cuda"))
IS_CUDA = GPU.type == "cuda"
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_CUDA and not torch.cuda.is_available(), reason="no GPU here"),
]


def allocated_bytes() -> int:
    return torch.cuda.memory_allocated() if IS_CUDA else 0


def peak_bytes() -> int:
    """Since the last `forget_peak`."""
    return torch.cuda.max_memory_allocated() if IS_CUDA else 0


def forget_peak() -> None:
    if IS_CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
