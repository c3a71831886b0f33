"""What all tests share: one thread, and one real model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from examples.demo import cache_dir
from examples.demo.smollm2 import prepare_model

# Test processes share the machine, and threads that wait for each other's share of a tiny product
# crawl: 4096 short documents took 3 s alone, and 75 s beside another test on the same two cores.
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)
# Inductor starts a pool of processes to compile in, in every process that compiles, and each of
# them imports torch: two ranks took 94 s with pools and 77 s without.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, converted once per machine."""
    return prepare_model(cache_dir())


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run uncompiled, here and on ranks: many shapes or processes mean many builds.
    That compiled kernels give the same bits is tested in test_nf4.py."""
    monkeypatch.setattr("qfsdp.tensor_subclasses.kernels.compiled.can_compile", lambda: False)
    monkeypatch.setenv("QFSDP_EAGER_KERNELS", "1")
