"""What digests cost: saving and reading a state of 1 GB, with and without them.

    python benchmarks/checkpoint.py [--quick] [--json checkpoint.json]

The state is a model of linears in fp32 with AdamW, sharded over the ranks. Files are in the page
cache (read and written there). Keys of the JSON file, for 1 and 2 ranks; cases run in turns:

    ranksN_read_seconds      reading the state, without digests
    ranksN_verify_seconds    comparing the digests, without reading
    ranksN_both_seconds      both at once, as a resumed run does (`read_verified`)
    ranksN_both_over_read    their ratio, with `_min` and `_max`
    ranksN_write_seconds     the background part of a save, with digests and the search for numbers
                             that are not finite
    ranksN_plain_write_seconds, ranksN_write_over_plain_write
                             the same as torch.distributed.checkpoint does it
    ranksN_copy_seconds      the part of a save that training waits for
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import Figures, Times, arguments, in_turns, ratios, tell
from qfsdp.checkpoint.choose import check_files, published
from qfsdp.checkpoint.digests import Verification
from qfsdp.checkpoint.resume import CheckpointConfig, Checkpointer
from qfsdp.checkpoint.state import Stager, TrainState
from qfsdp.checkpoint.state_files import read_state, read_verified, write_state
from tests.models import cpu_world
from tests.ranks import run_ranks

WIDTH = 2048


def measure(folder: Path, layers: int, rounds: int) -> Times:
    world = cpu_world()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    if world.mesh is not None:
        fully_shard(model, mesh=world.mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    state = TrainState(model, optimizer, None)
    saver = Checkpointer(CheckpointConfig(keep_last=1), folder, world)
    saver.save(1, state)
    saver.close()
    (saved,) = published(folder)
    facts, stager = check_files(saved), Stager(world)
    entries = stager.copy(state, 1)
    group = None if world.mesh is None else dist.group.WORLD

    def read() -> None:
        read_state(saved / "state", world.size, model, world)
        world.sum(0)  # waits for the other ranks

    def verify() -> None:
        Verification(saved, facts["files"], world.rank, world.size).damage()
        world.sum(0)

    def write() -> None:
        if world.rank == 0:
            shutil.rmtree(folder / "again", ignore_errors=True)
        world.sum(0)
        write_state(folder / "again", entries, world, group)

    def plain_write() -> None:
        with mock.patch("qfsdp.checkpoint.state_files._Writer", _PlainWriter):
            write()

    return in_turns(
        {
            "read": read,
            "verify": verify,
            "both": lambda: read_verified(saved, model, world),
            "write": write,
            "plain_write": plain_write,
            "copy": lambda: stager.copy(state, 1),
        },
        rounds,
        calls=1,
    )


class _PlainWriter(dcp.FileSystemWriter):
    hashed: dict[str, object] = {}

    def __init__(self, folder: Path, entries: object, rank: int) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    layers = 8 if args.quick else 21  # 12 bytes a number: 0.4 and 1.06 GB
    figures: Figures = {}
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            times = run_ranks(ranks, measure, Path(folder), layers, args.repeat)[0]
        part: Figures = {}
        for name, seconds in times.items():
            part[f"{name}_seconds"] = sorted(seconds)[len(seconds) // 2]
        part |= ratios("both_over_read", times["both"], times["read"])
        part |= ratios("write_over_plain_write", times["write"], times["plain_write"])
        figures |= {f"ranks{ranks}_{name}": value for name, value in part.items()}
    tell(figures, args.json)


if __name__ == "__main__":
    main()
