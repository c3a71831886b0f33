"""How fast a base model loads, and how much memory that takes above the shard.

    python benchmarks/load_base.py [--quick] [--json load.json] [--layers N] [--dir DIR]

Writes a model of random weights with the layer shapes of Llama-3-70B, quantizes it in qfsdp's and
in bitsandbytes' layout, and loads each of the three into a sharded QDoRA base on 1 and on 2 ranks.
Each load is compared with `cat FILES > /dev/null` in the same run. Files are dropped from the page
cache before both. If there is enough memory, torchtune loads the same model too.

The last lines, and the keys of the JSON file:

    peak_above_shard_bytes   peak private memory of a rank while it loads, less the memory before
                             and the bytes of its shard
    largest_rows_bytes       bytes of a rank's rows of the largest tensor, in the file's dtype
    packed_over_cat          rate of loading the quantized folder over the rate of cat

Keys without suffix are the worst of all cases; `KEY.SOURCE.N` is one source on N ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.memory import PeakMemory
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import load_base, use_huge_pages
from qfsdp.checkpoint.weights.quantize import Layout, quantize_folder
from qfsdp.checkpoint.weights.write import (
    Entry,
    SafetensorsFile,
    plan_files,
    write_file,
    write_index,
)
from qfsdp.common.files import write_json
from qfsdp.distributed.sharding import shard_model
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.modules.transformer import Decoder
from qfsdp.planning.hardware import available_memory
from qfsdp.tensor_subclasses import nf4
from qfsdp.tensor_subclasses.dtensor import local_part, local_rows
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

LLAMA3_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
LAYER_BYTES = 1_711_308_800  # bf16
Format = Literal["nf4", "none"]
CPU = torch.device("cpu")
ALONE = World(CPU)
LAYOUTS: dict[str, Layout] = {"packed": "qfsdp", "bnb": "bnb"}


def write_model(folder: Path, layers: int, vocab_size: int) -> None:
    """A bf16 model folder of `layers` decoder layers."""
    folder.mkdir()
    config = LLAMA3_70B | {"num_hidden_layers": layers, "vocab_size": vocab_size}
    write_json(folder / "config.json", config)
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dir(folder)).bfloat16()
    params = dict(base_parameters(model))
    # 32 M random numbers, repeated: the values do not change the time.
    noise = (torch.randn(1 << 25, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()

    def fill(name: str, file: SafetensorsFile) -> None:
        shape = params[name].shape
        step = noise.numel() // max(1, shape[1:].numel())
        for start in range(0, shape[0], step):
            rows = (min(step, shape[0] - start), *shape[1:])
            file.write(name, noise[: torch.Size(rows).numel()].view(rows), start)

    files = plan_files({name: {name: Entry.of(p)} for name, p in params.items()})
    for file in files:
        write_file(folder, file, fill)
    write_index(folder, files)


def touch_memory(size: int) -> None:
    """Takes memory from the operating system and gives it back.

    A virtual machine may get memory from its host only when it is touched, and may give free
    memory back within seconds. 1 GB of untouched memory cost 2 s here, once, in shards or in the
    page cache. That is not loading. For the same reason files are dropped from the page cache just
    before they are read.
    """
    memory = torch.empty(size, dtype=torch.uint8)
    use_huge_pages(memory)
    memory.fill_(0)


def held_bytes(param: torch.Tensor) -> int:
    local = local_part(param)
    tensors = [local.qdata, *local.metadata] if isinstance(local, QuantizedTensor) else [local]
    return sum(t.numel() * t.element_size() for t in tensors)


def load_rank(rank: int, size: int, folder: str, format: Format, repeat: int, result: str) -> None:
    """Loads `folder` like a rank of QDoRA training, `repeat` times; writes the figures, as lists,
    to `result`."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    world = ALONE
    if size > 1:
        store = dist.FileStore(f"{result}.store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        world = World(CPU, rank, size, init_device_mesh("cpu", (size,)))
    if format != "none" and not ModelWeights(folder).quantized:
        # Compiles the kernel, which also takes the compiler's memory, before the measurement.
        nf4.quantize(torch.randn(1024, 8192, dtype=torch.bfloat16))
    figures = [load_once(Path(folder), format, world) for _ in range(repeat)]
    Path(f"{result}.{rank}").write_text(
        json.dumps({k: [f[k] for f in figures] for k in figures[0]})
    )
    world.sum(0.0)
    os._exit(0)  # gloo's threads may abort the interpreter as it shuts down


def load_once(folder: Path, format: Format, world: World) -> dict[str, float]:
    gc.collect()  # FSDP2's hooks make cycles, which keep the model of the last call
    cat = cat_seconds(folder) if world.rank == 0 else 0.0
    weights = ModelWeights(folder)
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dir(folder)).bfloat16()
    quantize_linears(model, QuantizationConfig(format), weights.formats)
    add_adapters(model, AdapterConfig())
    shard_model(model, ShardingConfig(), world)
    shard = sum(held_bytes(param) for _, param in base_parameters(model))
    world.sum(0.0)
    touch_memory(shard)
    if world.rank == 0:
        drop_from_page_cache(folder)
    world.sum(0.0)
    memory, since = PeakMemory(), time.perf_counter()
    load_base(model, weights, CPU)
    seconds, peak = time.perf_counter() - since, memory.stop()
    rows = {n: local_rows(p) for n, p in base_parameters(model)}
    largest = max((r.stop - r.start) * row_bytes(weights, n) for n, r in rows.items())
    return {
        "cat": cat,
        "seconds": seconds,
        "above": peak - shard,
        "shard": shard,
        "largest_rows": largest,
    }


def row_bytes(weights: ModelWeights, name: str) -> int:
    if name in weights.quantized:
        return sum(column.row_bytes for column in weights.quantized[name].columns)
    return weights.plain[name].row_bytes


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def drop_from_page_cache(folder: Path) -> None:
    os.sync()
    for file in files_of(folder):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cat_seconds(folder: Path) -> float:
    drop_from_page_cache(folder)
    since = time.perf_counter()
    with open(os.devnull, "wb") as nowhere:
        subprocess.run(["cat", *files_of(folder)], stdout=nowhere, check=True)
    return time.perf_counter() - since


def measure(
    folder: Path, size: int, work: Path, repeat: int, format: Format = "nf4"
) -> dict[str, float]:
    """Loads on `size` ranks; medians of the slowest rank's times, the maximum of other figures."""
    result = str(work / f"result{time.time_ns()}")
    args = (size, str(folder), format, repeat, result)
    mp.start_processes(load_rank, args, nprocs=size, start_method="spawn")
    ranks = [json.loads(Path(f"{result}.{rank}").read_text()) for rank in range(size)]
    worst = {k: [max(r) for r in zip(*(rank[k] for rank in ranks), strict=True)] for k in ranks[0]}
    ratios = [cat / load for cat, load in zip(worst["cat"], worst["seconds"], strict=True)]
    medians = {key: statistics.median(worst[key]) for key in ("cat", "seconds")}
    largest = {key: max(worst[key]) for key in ("above", "shard", "largest_rows")}
    return medians | largest | {"over_cat": statistics.median(ratios)}


def choose_layers(directory: Path, vocab_size: int) -> int:
    """The layers that fit on disk (three copies in 60 %) and in memory (one quantized copy)."""
    tables = 4 * vocab_size * LLAMA3_70B["hidden_size"]
    disk = (shutil.disk_usage(directory).free * 0.6 - 3 * tables) / (LAYER_BYTES * 1.53)
    memory = (available_memory() * 0.7 - tables) / (LAYER_BYTES * 0.26)
    return max(4, min(80, int(min(disk, memory))))


HEADER = [*("source", "ranks", "GB", "seconds", "MB/s", "cat MB/s", "ratio")]
HEADER += ["shard MB", "above it MB", "rows MB"]


def compare(name: str, folder: Path, size: int, repeat: int, work: Path) -> dict[str, float]:
    """Measures one source on `size` ranks; prints a line and returns the figures."""
    total = sum(file.stat().st_size for file in files_of(folder))
    found = measure(folder, size, work, repeat)
    row = [
        total / 1e9,
        found["seconds"],
        total / found["seconds"] / 1e6,
        total / found["cat"] / 1e6,
    ]
    row += [found["over_cat"], *(found[key] / 1e6 for key in ("shard", "above", "largest_rows"))]
    print_row(name, size, *(f"{figure:.4g}" for figure in row))
    return {
        f"seconds.{name}.{size}": found["seconds"],
        f"over_cat.{name}.{size}": found["over_cat"],
        f"peak_above_shard_bytes.{name}.{size}": found["above"],
        f"largest_rows_bytes.{name}.{size}": found["largest_rows"],
    }


def print_row(*cells: object) -> None:
    print("".join(f"{cell!s:>12}" for cell in cells), flush=True)


def run(args: argparse.Namespace, work: Path) -> dict[str, float]:
    vocab_size = 16384 if args.quick else LLAMA3_70B["vocab_size"]
    layers = args.layers or (1 if args.quick else choose_layers(work, vocab_size))
    print(f"{layers} layers of Llama-3-70B, vocabulary {vocab_size}; {os.cpu_count()} cores")
    source, figures = work / "bf16", {"layers": float(layers)}
    write_model(source, layers, vocab_size)
    for name, layout in LAYOUTS.items():
        since = time.perf_counter()
        quantize_folder(ModelWeights(source), QuantizationConfig(), work / name, ALONE, layout)
        figures[f"quantize_seconds.{name}"] = time.perf_counter() - since
    print_row(*HEADER)
    for name in ("bf16", *LAYOUTS):
        for size in (1, 2):
            repeat = 1 if args.quick else args.repeat
            figures |= compare(name, work / name, size, repeat, work)
    return figures if args.quick else figures | torchtune_beside(source, work)


def torchtune_beside(source: Path, work: Path) -> dict[str, float]:
    """torchtune's loader on two ranks, and ours unquantized, because its NF4 may not run."""
    total = sum(file.stat().st_size for file in files_of(source))
    if available_memory() < 1.3 * total:
        print(f"torchtune: not run; {total / 1e9:.1f} GB in bf16 do not fit into memory here")
        return {}
    figures: dict[str, float] = {}
    for base in ("nf4", "bf16"):
        result, script = (
            work / f"torchtune-{base}",
            Path(__file__).with_name("load_base_torchtune.py"),
        )
        command = [sys.executable, script, source, result, base]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["killed"])[-1]
            print(f"torchtune, base in {base}, 2 ranks: does not run: {reason[:100]}")
            continue
        theirs = json.loads(result.read_text())
        print(
            f"torchtune, base in {base}, 2 ranks: {theirs['seconds']:.2f} s, "
            f"{theirs['peak'] / 1e6:.0f} MB above the shard of {theirs['shard'] / 1e6:.0f} MB"
        )
        figures |= {f"torchtune_{base}_{key}": theirs[key] for key in ("seconds", "peak")}
    ours = measure(source, 2, work, 1, "none")
    print(
        f"qfsdp, base in bf16, 2 ranks: {ours['seconds']:.2f} s, "
        f"{ours['above'] / 1e6:.0f} MB above the shard of {ours['shard'] / 1e6:.0f} MB"
    )
    return figures | {"plain_bf16_seconds": ours["seconds"], "plain_bf16_above": ours["above"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one layer, once, no torchtune")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--layers", type=int, help="default: as many as disk and memory allow, at least 4"
    )
    parser.add_argument("--dir", type=Path, default=Path("."), help="where the models are written")
    parser.add_argument(
        "--repeat", type=int, default=3, help="loads of each kind; figures are medians"
    )
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="load-") as work:
        figures = run(args, Path(work))
    for key in ("peak_above_shard_bytes", "largest_rows_bytes"):
        figures[key] = max(v for name, v in figures.items() if name.startswith(f"{key}."))
    figures["packed_over_cat"] = min(figures[f"over_cat.packed.{size}"] for size in (1, 2))
    for key in ("peak_above_shard_bytes", "largest_rows_bytes", "packed_over_cat"):
        print(f"{key} {figures[key]:.4g}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
