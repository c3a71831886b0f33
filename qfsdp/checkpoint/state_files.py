"""Writes and reads the `state` folder of a checkpoint; digests are made and compared meanwhile.

Numbers that are not finite are neither written nor taken from a file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem

from qfsdp.checkpoint.choose import check_files
from qfsdp.checkpoint.digests import Verification
from qfsdp.checkpoint.state import HOST, ReadState, StackedTensors, rank_entry, read_state
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
