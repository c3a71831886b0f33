"""Writes and reads the `state` folder of a checkpoint; digests are made and compared meanwhile.

Numbers that are not finite are neither written nor taken from a file, and no file runs code.
torch.distributed.checkpoint (DCP) stores `.metadata` and every entry that is no tensor as pickles,
and its own reader runs what they ask for. Here `.metadata` may name DCP's classes only, and the
entries what `torch.load(weights_only=True)` allows: tensors, plain Python values, and torchao's
8-bit, 4-bit and FP8 optimizer states, which torchao declares safe.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from qfsdp.checkpoint.choose import check_files
from qfsdp.checkpoint.digests import Verification
from qfsdp.checkpoint.state import (
    HOST,
    TRAINED,
    ReadState,
    StackedTensors,
    rank_entry,
    trained_tensors,
)
from qfsdp.common.errors import UserError
from qfsdp.common.messages import first_line
from qfsdp.common.progress import moved
from qfsdp.common.sealed import Damaged
from qfsdp.distributed.world import World
from qfsdp.tensor_subclasses.dtensor import local_part
from qfsdp.tensor_subclasses.finite import is_finite


def write_state(folder: Path, entries: dict[str, Any], world: World, group: Any) -> dict[str, Any]:
    """Writes the entries of all ranks (`Stager.copy`); returns when all have written.

    Args:
        group: the process group to agree in, or None.

    Returns:
        Name within the checkpoint -> size and digest (`describe_file`), of the files of all ranks.

    Raises:
        CheckpointException: a rank could not write, or has numbers that are not finite.
    """
    writer = _Writer(folder, entries, world.rank)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    agreed: Any = {"process_group": group, "no_dist": group is None}
    dcp.save(entries, storage_writer=writer, planner=planner, **agreed)
    ranks = [writer.hashed]
    if group is not None:
        ranks *= world.size
        dist.all_gather_object(ranks, writer.hashed, group=group)
    return {f"{folder.name}/{name}": file for files in ranks for name, file in files.items()}


class _Writer(dcp.FileSystemWriter):
    """Writes and hashes this rank's part, if all its numbers are finite.

    Raises the OSError behind a failed write; `torch.save` says "unexpected pos 704 vs 598". Done in
    the writer, because exceptions lose their cause on the way to other ranks.
    """

    def __init__(self, folder: Path, entries: dict[str, Any], rank: int) -> None:
        # Without copy-ahead: DCP would wait for this thread's stream, on device 0.
        super().__init__(folder, per_thread_copy_ahead=0)
        self.fs = files = HashingFileSystem()
        self.hashed = files.written
        self._entries, self._of_rank = entries, rank

    def write_data(self, *args: Any) -> Any:
        if (name := not_finite(self._entries, self._of_rank)) is not None:
            raise ValueError(f"{name} has numbers that are not finite")
        try:
            return super().write_data(*args)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


def read_state(folder: Path, saved_ranks: int, model: nn.Module, world: World) -> ReadState:
    """Reads this rank's rows of a `state` folder, without communication. Changes nothing. Raises
    UserError: part of the optimizer's state can be read only by `saved_ranks` ranks, or a file asks
    for code (`UnsafeFile`). Damaged files raise errors of any kind."""
    params = trained_tensors(model)
    same = saved_ranks == world.size
    own = rank_entry(world.rank if same else 0)
    parts = load_entries(folder, {HOST: None, own: None})
    host, mine = parts[HOST], parts[own]
    if mine["alone"] and not same:
        raise UserError(
            f"resume: '{folder.parent}' has optimizer state that only {saved_ranks} ranks can "
            f"read; expected as many, not {world.size}"
        )
    stacks = {key: StackedTensors(**fields) for key, fields in host["stacks"].items()}
    for key, stack in stacks.items():
        shapes = {tuple(params[name].shape) for name in stack.names}
        if stack.field == TRAINED and shapes != {tuple(stack.shape)}:
            raise ValueError(f"'{key}' are not the model's shapes {sorted(shapes)}")
    local = {key: torch.empty(s.local_shape(params), dtype=s.dtype) for key, s in stacks.items()}
    load_entries(folder, {key: stack.entry(local[key], params) for key, stack in stacks.items()})
    return ReadState(host, mine, stacks, local, same)


def read_host(folder: Path) -> dict[str, Any]:
    """Everything that is no tensor, from the `state` folder of a checkpoint."""
    host: dict[str, Any] = load_entries(folder, {HOST: None})[HOST]
    return host


def read_trained(folder: Path) -> dict[str, Tensor]:
    """Name -> whole trained tensor, from the `state` folder of a checkpoint."""
    stored = read_host(folder)["stacks"]
    stacks = {key: StackedTensors(**fields) for key, fields in stored.items()}
    trained = {key: stack for key, stack in stacks.items() if stack.field == TRAINED}
    whole = {k: torch.empty(len(s.names), *s.shape, dtype=s.dtype) for k, s in trained.items()}
    load_entries(folder, dict(whole))
    return {
        name: tensor
        for key, stack in trained.items()
        for name, tensor in zip(stack.names, whole[key].unbind(), strict=True)
    }


def read_verified(folder: Path, model: nn.Module, world: World) -> tuple[dict[str, Any], ReadState]:
    """The values of `facts.json`, and this rank's part of a checkpoint.

    Every rank compares the digests of its share of the files, in threads, while it reads the rows
    that it needs. All ranks return, or all raise the same.

    Raises:
        Damaged: a file is not as it was written, or cannot be read.
        UserError: the files are as they were written, and this run cannot use them.
    """
    facts: dict[str, Any] = {}
    read, changed, unreadable, refusal = None, None, None, None
    try:
        facts = check_files(folder)
        verification = Verification(folder, facts.get("files", {}), world.rank, world.size)
        try:
            read = read_state(folder / "state", facts["world_size"], model, world)
            name = first_not_finite(read.stacks, read.local, read.mine["alone"])
            unreadable = f"state: {name} has numbers that are not finite" if name else None
        except UserError as error:
            refusal = str(error)
        except Exception as error:  # a damaged file makes torch raise anything
            unreadable = f"state: unreadable ({reason(error)})"
        changed = verification.damage()
    except Damaged as error:
        changed = str(error)
    outcomes = world.gather((changed, unreadable, refusal))
    # The rank that finds the changed file may be another than those that cannot read it.
    for kind, error_type in enumerate((Damaged, Damaged, UserError)):
        for outcome in outcomes:
            if outcome[kind] is not None:
                raise error_type(outcome[kind])
    assert read is not None
    return facts, read


def reason(error: BaseException | None) -> str:
    """The innermost cause in one line."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error) if error else "see rank 0"


def not_finite(entries: dict[str, Any], rank: int) -> str | None:
    """The first tensor of `Stager.copy` with NaN or infinity in this rank's part, or None."""
    stacks = {key: StackedTensors(**fields) for key, fields in entries[HOST]["stacks"].items()}
    local = {key: local_part(entries[key]) for key in stacks}
    return first_not_finite(stacks, local, entries[rank_entry(rank)]["alone"])


def first_not_finite(
    stacks: dict[str, StackedTensors],
    local: dict[str, Tensor],
    alone: dict[str, dict[str, dict[str, Any]]],
) -> str | None:
    """As `not_finite`, of what `read_state` has read."""
    for key, stack in stacks.items():
        if not is_finite(local[key]):
            parts = zip(stack.names, local[key].unbind(), strict=True)
            return next(f"{stack.field} of {name}" for name, t in parts if not is_finite(t))
    for name, fields in alone.items():
        for field, kept in fields.items():
            if not all(map(is_finite, kept["inner"].values())):
                return f"{field} of {name}"
    return None


class HashingFileSystem(FileSystem):
    """The file system of a `torch.distributed.checkpoint` writer that hashes what it writes.

    Files are hashed as they are written, and not read again.

    Attributes:
        written: file name -> size and digest.
    """

    def __init__(self) -> None:
        self.written: dict[str, dict[str, Any]] = {}

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        with suppress(FileExistsError):  # a network file system knows it before it shows it
            super().mkdir(path)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashing = _HashingStream(stream)
            yield hashing
        digest = hashing.digest.hexdigest()
        self.written[Path(path).name] = {"bytes": hashing.bytes, "sha256": digest}


class _HashingStream:
    """A file that is written from its start to its end."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.digest, self.bytes = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        written: int = self._stream.write(data)
        self.bytes += written
        moved()
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# torch warns if the second byte of a pickle is damaged. The digest finds that, and names the file.
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
        if module == "pathlib._local":  # where Python 3.13 has it; what it saves, 3.11 reads
            module = "pathlib"
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
