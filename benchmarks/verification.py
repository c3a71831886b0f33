"""What digests cost while a base is loaded: a quantized folder of 1 GB, with and without them.

    python benchmarks/verification.py [--quick] [--json verification.json] [--folder /dev/shm]
                                      [--cold]

Files are in the page cache (`--folder /dev/shm`: in a tmpfs), with `--cold` on the disk: each
loading begins without a page of them in memory. Cases run in turns. Keys of the JSON file, for 1
and 2 ranks:

    ranksN_plain_seconds     loading without a comparison of digests
    ranksN_both_seconds      loading while they are compared, as every run does
    ranksN_verify_seconds    comparing them, without loading
    ranksN_both_over_plain   their ratio, with `_min` and `_max`
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.load_base import ALONE, write_model
from benchmarks.timing import Figures, Times, arguments, in_turns, ratios, tell
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import load_base
from qfsdp.checkpoint.weights.quantize import quantize_folder
from qfsdp.checkpoint.weights.verify import compare_digests
from qfsdp.distributed.sharding import shard_model
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.modules.quantized_linear import QuantizationConfig
from tests.models import build_meta_model, cpu_world
from tests.ranks import run_ranks

NF4 = QuantizationConfig("nf4", ["all-linear"])


def measure(folder: Path, rounds: int, cold: bool) -> Times:
    world = cpu_world()

    def load() -> None:
        if cold:
            drop_pages(folder)
            world.sum(0)  # no rank reads before all have dropped them
        model = build_meta_model(folder)
        shard_model(model, ShardingConfig(), world)
        load_base(model, ModelWeights(folder), torch.device("cpu"))
        world.sum(0)  # waits for the other ranks
        del model
        gc.collect()

    def plain() -> None:
        with mock.patch("qfsdp.checkpoint.weights.verify.known_digests", return_value={}):
            load()

    def verify() -> None:
        if cold:
            drop_pages(folder)
        compare_digests(folder, ModelWeights(folder).weight_files)()
        if world.size > 1:
            dist.barrier()

    return in_turns({"plain": plain, "both": load, "verify": verify}, rounds, calls=1)


def drop_pages(folder: Path) -> None:
    """Takes the files of a folder out of the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # a page that is not written yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cold", action="store_true", help="read from the disk in each round")
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures: Figures = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        write_model(folder / "plain", 1 if args.quick else 2, vocab_size=1024)
        source, size = ModelWeights(folder / "plain"), 256 << 20
        quantize_folder(source, NF4, folder / "nf4", ALONE, max_file_bytes=size)
        for ranks in (1, 2):
            times = run_ranks(ranks, measure, folder / "nf4", args.repeat, args.cold)[0]
            part: Figures = {
                f"{case}_seconds": sorted(seconds)[len(seconds) // 2]
                for case, seconds in times.items()
            }
            part |= ratios("both_over_plain", times["both"], times["plain"])
            figures |= {f"ranks{ranks}_{key}": value for key, value in part.items()}
        stored = sum(file.stat().st_size for file in (folder / "nf4").glob("*.safetensors"))
        tell(figures | {"bytes": stored}, args.json)


if __name__ == "__main__":
    main()
