"""Reads the `state` folder of a checkpoint without running code that it brings.

torch.distributed.checkpoint (DCP) stores `.metadata` and every entry that is no tensor as pickles,
and its own reader runs what they ask for. Here `.metadata` may name DCP's classes only, and the
entries what `torch.load(weights_only=True)` allows: tensors, plain Python values, and torchao's
8-bit, 4-bit and FP8 optimizer states, which torchao declares safe.
"""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from qfsdp.common.errors import UserError

# torch says so of a pickle whose second byte is damaged; the digest says it better.
warnings.filterwarnings("ignore", message="Detected pickle protocol")

_DCP = "torch.distributed.checkpoint"
_METADATA_NAMES = {
    **dict.fromkeys(
        ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")
        + ("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
        f"{_DCP}.metadata",
    ),
    "_StorageInfo": f"{_DCP}.filesystem",
    "_get_layout": "torch.serialization",  # turns "torch.strided" into torch.strided
    "Size": "torch",
    "PosixPath": "pathlib",
}


class UnsafeFile(UserError):
    """A file asks for code that no checkpoint of qfsdp needs."""

    def __init__(self, path: Path, asks_for: str) -> None:
        self.asks_for = asks_for
        super().__init__(f"resume: '{path}' asks for {asks_for}; expected a checkpoint of qfsdp")


def load_entries(folder: Path, entries: dict[str, Any]) -> dict[str, Any]:
    """Loads entries of a `state` folder: fills tensors in place, and returns all entries. Raises
    UnsafeFile: a file asks for code. Damaged files raise errors of any kind."""
    reader = _Reader(folder)
    try:
        dcp.load(entries, storage_reader=reader, planner=_Planner(), no_dist=True)
    except dcp.CheckpointException as error:  # is no Exception, and hides its cause
        cause = next(iter(error.failures.values()))[0]
        if not isinstance(cause, pickle.UnpicklingError):
            raise cause from None
        # One of the ten lines of torch's message; the other lines advise to load it anyway.
        asked = re.search(r"GLOBAL (\S+) ", str(cause))
        raise UnsafeFile(folder, asked[1]) if asked else ValueError("broken pickle") from None
    return entries


class _Unpickler(pickle.Unpickler):
    """Knows the names in `_METADATA_NAMES` and torch's dtypes, and no others."""

    def __init__(self, stream: Any, path: Path) -> None:
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or _METADATA_NAMES.get(name) == module:
            return super().find_class(module, name)
        raise UnsafeFile(self._path, f"{module}.{name}")


class _Reader(dcp.FileSystemReader):
    """Reads `.metadata` first: DCP would report an error in it as a missing file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = folder / ".metadata"
        with open(path, "rb") as stream:
            metadata = _Unpickler(stream, path).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise ValueError("no metadata in .metadata")
        for stored in metadata.storage_data.values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise ValueError(f".metadata names the file '{stored.relative_path}'")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """Plans whole entries, and loads those that are no tensors without running code."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        entry = torch.load(value, map_location="cpu", weights_only=True)
        self.state_dict[read_item.dest_index.fqn] = entry
