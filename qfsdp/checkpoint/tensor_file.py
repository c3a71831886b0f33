"""Small safetensors files: equal content gives equal bytes, and digests find damage.

The file of an adapter has two digests in its metadata: one of the tensors, one of the settings that
change what they compute. Other programs write none, and drop ours when they write the file again.
So a missing digest is not damage.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, uint8

from qfsdp.common.errors import UserError
from qfsdp.common.files import to_json
from qfsdp.common.terminal import warn


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


TENSORS, SETTINGS = "sha256", "settings_sha256"
_PATTERNS = ("rank_pattern", "alpha_pattern")
NUMBERS = ("peft_type", "r", "lora_alpha", "use_dora", "use_rslora", *_PATTERNS)
"""Keys of `adapter_config.json` that change numbers; the tensors show the others."""


def digests(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of an adapter's file.

    Args:
        tensors: name -> CPU tensor, as they are stored.
        settings: of `adapter_config.json`.
    """
    return {TENSORS: _of_tensors(tensors, tensors.__getitem__), SETTINGS: _of_settings(settings)}


def check_digests(file: Path, opened: Any, settings: Mapping[str, Any] | None = None) -> None:
    """Compares an adapter with the digests in its file, if it has any. Reads every tensor.

    Settings may have been edited on purpose: if they changed, one line says so.

    Args:
        file: with the adapter's tensors.
        opened: the same file, from `safetensors.safe_open`.
        settings: of `adapter_config.json`; None: they are not compared.

    Raises:
        UserError: a tensor has changed.
    """
    kept = opened.metadata() or {}
    if TENSORS in kept and kept[TENSORS] != _of_tensors(opened.keys(), opened.get_tensor):
        raise UserError(f"{file}: content changed (SHA-256); expected it as it was written")
    if settings is not None and SETTINGS in kept and kept[SETTINGS] != _of_settings(settings):
        warn(f"{file.parent}: not as it was written: {', '.join(NUMBERS)} of its config")


def _of_tensors(names: Iterable[str], tensor_of: Callable[[str], Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = tensor_of(name)
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(uint8).numpy().data)
    return digest.hexdigest()


def _of_settings(settings: Mapping[str, Any]) -> str:
    used = {key: settings[key] for key in NUMBERS if settings.get(key)}
    return hashlib.sha256(to_json(used, sort_keys=True).encode()).hexdigest()
