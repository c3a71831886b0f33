"""Rates of this machine, for `recipes/find_fit`: products, copies, gathering, disk.

    python benchmarks/bandwidth.py [--quick] [--json here.json] [--device cpu] [--file FILE]
    tune run recipes/find_fit --config ... hardware=here.json

The JSON file has the fields of `qfsdp.planning.hardware.Hardware` that could be measured; the
printed words are the same figures for a command line. The best of several rounds counts, because a
roofline needs peak rates.

    device_memory      bytes of the smallest GPU
    matmul_rate        FLOP/s of large bf16 products (`qfsdp.training.throughput.matmul_rate`)
    memory_bandwidth   of one GPU, bytes read and written by a copy within it
    pcie               from pinned host memory to one GPU, while all GPUs are fed
    interconnect       bytes that one GPU sends in an all-gather of all GPUs by NCCL
    host_memory        bytes of this machine (or of its container)
    host_bandwidth     bytes read and written by copies within host memory, on all cores
    disk               read rate of FILE, or of a temporary file in the working directory, past the
                       page cache

Several machines measure `network`, what one of them sends to the others, by an all-gather of all
ranks (NCCL; gloo without GPUs). The same on every machine, but N:

    torchrun --nnodes 2 --node_rank N --master_addr HOST --nproc_per_node gpu \\
        benchmarks/bandwidth.py

Without a GPU only host memory, disk and the CPU's `matmul_rate` are measured.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import Figures, arguments
from qfsdp.modules.compute_dtype import compute_dtype
from qfsdp.planning.hardware import machine_memory
from qfsdp.training.throughput import best_rate, gather_rate, matmul_rate

PIECE = 16 << 20  # bytes of a read, the same as the loader's


def of_host(size: int) -> Figures:
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    rate = best_rate(2 * size, lambda: target.copy_(source), lambda: None)
    return {"host_memory": machine_memory(), "host_bandwidth": rate}


def of_disk(file: Path | None, size: int) -> Figures:
    """Reads `size` bytes, or the whole file if it is smaller, past the page cache if possible."""
    with tempfile.NamedTemporaryFile(dir=".") as own:
        if file is None:
            block = os.urandom(PIECE)
            for _ in range(size // PIECE):
                own.write(block)
            own.flush()
            os.fsync(own.fileno())
        path = Path(own.name) if file is None else file
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        except OSError:  # this file system has no O_DIRECT
            handle = os.open(path, os.O_RDONLY)
        buffer, read = mmap.mmap(-1, PIECE), 0  # O_DIRECT needs page-aligned memory
        since = time.perf_counter()
        while read < size and (got := os.preadv(handle, [buffer], read)) > 0:
            read += got
        elapsed = time.perf_counter() - since
        os.close(handle)
    return {"disk": read / elapsed}


def of_gpus(size: int) -> Figures:
    """Rates of one GPU; shared links are measured with all GPUs at work."""
    devices = [torch.device("cuda", at) for at in range(torch.cuda.device_count())]
    figures: Figures = {
        "device_memory": min(torch.cuda.get_device_properties(d).total_memory for d in devices),
        "matmul_rate": min(matmul_rate(device, torch.bfloat16) for device in devices),
    }
    figures |= of_copies(devices, size)
    if len(devices) > 1:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(gather, (len(devices), size, folder), len(devices))
            figures["interconnect"] = float((Path(folder) / "rate").read_text())
    return figures


def of_copies(devices: list[torch.device], size: int) -> Figures:
    pinned = [torch.ones(size, dtype=torch.uint8, pin_memory=True) for _ in devices]
    on_gpu = [torch.empty(size, dtype=torch.uint8, device=device) for device in devices]
    other = torch.empty_like(on_gpu[0])

    def copy_in() -> None:
        for to, held in zip(on_gpu, pinned, strict=True):
            to.copy_(held, non_blocking=True)

    def wait() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    return {
        "memory_bandwidth": best_rate(2 * size, lambda: other.copy_(on_gpu[0]), wait),
        "pcie": best_rate(size, copy_in, wait),
    }


def gather(rank: int, count: int, size: int, folder: str) -> None:
    """Runs on every rank; rank 0 writes the bytes that one rank sends per second."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", count)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=count)
    rate = gather_rate(size, torch.device("cuda", rank))
    if rank == 0:
        (Path(folder) / "rate").write_text(str(rate))
    dist.destroy_process_group()


def of_one_machine(args: argparse.Namespace, size: int) -> Figures:
    figures = of_host(size) | of_disk(args.file, size)
    if args.device == "cuda":
        return figures | of_gpus(size)
    return figures | {"matmul_rate": matmul_rate(torch.device("cpu"), compute_dtype("bf16"))}


def of_network(size: int) -> Figures:
    """Runs on every rank of several machines. A ring of all ranks crosses the border of a machine
    once, so a machine sends as much as each rank."""
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(device_id=device if device.type == "cuda" else None)
    rate = gather_rate(size, device)
    dist.barrier()
    dist.destroy_process_group()
    return {"network": rate}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--file", type=Path, help="a large file on the disk of the model folder")
    args = parser.parse_args()
    size = (64 if args.quick else 1024) << 20
    if os.environ.get("WORLD_SIZE", "1") != os.environ.get("LOCAL_WORLD_SIZE", "1"):
        figures = of_network(size)
        if os.environ["RANK"] != "0":
            return
    else:
        figures = of_one_machine(args, size)
    for name, value in figures.items():
        unit = "TFLOPS" if name == "matmul_rate" else "GB"
        scale = 1e12 if name == "matmul_rate" else 1e9
        print(f"{name}={value / scale:.3g}{unit}")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
