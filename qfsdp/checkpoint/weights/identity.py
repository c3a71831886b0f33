"""Hashes of the tensors of a model folder, which do not depend on how files divide them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from qfsdp.checkpoint.weights.read import StoredTensor
from qfsdp.common.file_digests import range_digests, remembered
from qfsdp.common.long_waits import long_wait

SAMPLE_BYTES = 4096


def sampled_digest(tensors: Mapping[str, StoredTensor]) -> str:
    """Of names, dtypes, shapes, and the first, middle and last 4 KB of every tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        last = max(0, tensor.size - SAMPLE_BYTES)
        with open(tensor.file, "rb") as file:
            for at in sorted({0, last // 2, last}):
                file.seek(tensor.start + at)
                digest.update(file.read(min(SAMPLE_BYTES, tensor.size)))
    return digest.hexdigest()


def whole_digest(tensors: Mapping[str, StoredTensor], folder: Path) -> str:
    """Of names, dtypes, shapes, and all bytes; remembered while the files are the same.

    Args:
        folder: for a message, if hashing takes long.
    """
    parts = sorted(tensors.items())

    def compute() -> str:
        digests = range_digests([(tensor.file, tensor.start, tensor.size) for _, tensor in parts])
        lines = [
            f"{name} {tensor.dtype} {tensor.shape} {digest}\n"
            for (name, tensor), digest in zip(parts, digests, strict=True)
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    with long_wait(f"hashing {folder}"):
        return remembered(sorted({tensor.file for _, tensor in parts}), "tensors", compute)
