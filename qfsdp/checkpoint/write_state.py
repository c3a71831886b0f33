"""Writes the `state` folder of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from qfsdp.checkpoint.digests import HashingFileSystem
from qfsdp.checkpoint.finite import not_finite
from qfsdp.distributed.world import World


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
    dcp.save(
        entries, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None
    )
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


def reason(error: BaseException | None) -> str:
    """The innermost cause in one line."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0] if error else "see rank 0"
