"""What all tests share: few threads, and one real model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from qfsdp.demo import cache_dir
from qfsdp.demo.smollm2 import prepare_model

if "OMP_NUM_THREADS" not in os.environ:
    # Tiny models gain nothing from many threads, and test processes share the machine.
    torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, converted once per machine."""
    return prepare_model(cache_dir())
