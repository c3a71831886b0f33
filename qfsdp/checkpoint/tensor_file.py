"""A small safetensors file whose bytes depend on its content alone, and the digest of tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Writes tensors, and texts beside them.

    `save_file` orders metadata by chance; here its keys are sorted afterwards. So equal adapters
    are equal files.

    Args:
        tensors: name -> contiguous CPU tensor.
        path: is written in place.

    Raises:
        OSError, SafetensorError: the file cannot be written.
    """
    save_file(dict(tensors), path, {"format": "pt", **metadata})
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size, path
        file.seek(8)
        file.write(text.ljust(size))


def tensors_digest(*tensors: Tensor) -> str:
    """The SHA-256 of the numbers of CPU tensors, one after the other."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()
