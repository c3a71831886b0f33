"""Memory and rates of known GPUs, and of the machine around them.

All rates are what programs reach: `REACHED` times the vendor's figure. Rates from the command line,
or measured by `benchmarks/bandwidth.py`, are used as they are.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import combinations
from pathlib import Path
from typing import Any

from qfsdp.common.control_groups import memory_limit
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.common.sizes import parse_size

REACHED = 0.8  # share of vendors' figures: large products, copies and rings reach 0.75 to 0.9

# Columns: memory (GiB, as in PyTorch's out-of-memory messages: less than on the box), dense 16-bit
# products with fp32 sums (TFLOP/s; bf16 and fp16 have the same rate), memory bandwidth (GB/s), link
# to other GPUs (GB/s in one direction; None: PCIe), link to the host (PCIe x16, GB/s in one
# direction). Rates are the vendor's, halved if they count sparsity or both directions. Sources:
# NVIDIA's whitepapers of GA102 (3090), Ada (4090), Blackwell RTX (5090), Volta (V100, SXM2), Turing
# (T4), Hopper (H100, H200) and Grace Hopper (GH200: 96 GB of HBM3, NVLink-C2C to the host); AMD's
# data sheet of MI300X (seven links); NVIDIA's data sheets of the others.
GPUS: dict[str, tuple[float, float, float, float | None, float]] = {
    "v100-16": (15.8, 125, 900, 150, 16),
    "v100-32": (31.7, 125, 900, 150, 16),
    "t4": (14.6, 65, 320, None, 16),
    "rtx3090": (23.6, 71, 936, None, 32),
    "rtx4080": (15.6, 97, 717, None, 32),
    "rtx4090": (23.6, 165, 1008, None, 32),
    "rtx5090": (31.3, 210, 1792, None, 64),
    "a10": (22.0, 125, 600, None, 32),
    "a10g": (22.0, 70, 600, None, 32),
    "l4": (22.0, 121, 300, None, 32),
    "a5000": (23.6, 111, 768, None, 32),
    "a6000": (47.4, 155, 768, None, 32),
    "rtx6000ada": (47.4, 364, 960, None, 32),
    "l40s": (44.4, 362, 864, None, 32),
    "a100-40": (39.4, 312, 1555, 300, 32),
    "a100-80": (79.1, 312, 2039, 300, 32),
    "h100": (79.1, 989, 3350, 450, 64),
    "h200": (139.8, 989, 4800, 450, 64),
    "gh200": (94.5, 989, 4000, 450, 450),
    "b200": (178.3, 2250, 8000, 900, 64),
    "mi300x": (192.0, 1307, 5300, 448, 64),
}
WITHOUT_BF16 = ("v100-16", "v100-32", "t4")  # compute capability below 8.0: model.dtype=fp16


@dataclass(frozen=True)
class Hardware:
    """A machine and its GPUs.

    Fields:
        device_memory: bytes of one GPU.
        matmul_rate: FLOP/s of large bf16 or fp16 products on one GPU.
        memory_bandwidth: bytes/s that one GPU reads and writes of its memory.
        interconnect: bytes/s that one GPU sends to others; None: it sends over PCIe.
        pcie: bytes/s between one GPU and the host, in one direction.
        network: bytes/s that one machine sends to other machines, all its network cards together;
            None: there is one machine.
        host_memory: bytes of the machine, for all its ranks; None: enough.
        host_bandwidth: bytes/s of host memory, read and written by all ranks together.
        disk: bytes/s that all ranks together read from disk.
    """

    device_memory: int
    matmul_rate: float
    memory_bandwidth: float
    interconnect: float | None
    pcie: float
    host_memory: int | None = None
    host_bandwidth: float = 40e9  # two channels of DDR4-3200, the least in machines with such GPUs
    disk: float = 3e9  # an NVMe drive on PCIe 3
    network: float | None = None


@dataclass
class HardwareConfig:
    """The hardware as a user describes it. Sizes are like 24GiB, rates like 25GB (per second).

    `gpu` and `hardware` give all figures; the other fields replace single ones.

    Fields:
        gpu: name of a known GPU, such as rtx4090.
        hardware: JSON file of `benchmarks/bandwidth.py`.
        device_memory: of one GPU; null: from the training config, else from `gpu`.
        host_memory: of one machine, for all its ranks; null: enough.
        matmul_rate: of large 16-bit products on one GPU, such as 130TFLOPS.
        memory_bandwidth: of one GPU's memory.
        interconnect: from one GPU to others; "pcie" if they communicate over PCIe.
        pcie: between one GPU and the host, in one direction.
        host_bandwidth, disk: of one machine, for all its ranks.
        network: from one machine to others, such as 12GB with a card of 100 Gb/s.
    """

    gpu: str | None = None
    hardware: str | None = None
    device_memory: str | int | None = None
    host_memory: str | int | None = None
    matmul_rate: str | float | None = None
    memory_bandwidth: str | float | None = None
    interconnect: str | float | None = None
    pcie: str | float | None = None
    host_bandwidth: str | float | None = None
    disk: str | float | None = None
    network: str | float | None = None

    def check(self) -> None:
        self._figures()

    def _figures(self) -> dict[str, Any]:
        """The given fields, converted to those of `Hardware`."""
        given: dict[str, Any] = {}
        for field in fields(Hardware):
            text = getattr(self, field.name)
            if field.name == "interconnect" and str(text).lower() == "pcie":
                given[field.name] = None
            elif text is not None:
                is_size = field.name.endswith("_memory")
                try:
                    given[field.name] = parse_size(text) if is_size else parse_rate(text)
                except ValueError as error:
                    expected = str(error).partition("expected ")[2]
                    raise InvalidField(field.name, text, expected) from None
        return given

    def build(self, device_memory: int | None = None) -> Hardware:
        """All figures: those of `gpu`, replaced by the file's, replaced by single fields.

        Without `gpu` the figures are those of the known GPU with the nearest memory size.

        Args:
            device_memory: bytes, used if no field gives them.

        Raises:
            UserError: the GPU is unknown, the file cannot be read, or nothing gives the memory.
        """
        given = from_file(self.hardware) if self.hardware is not None else {}
        given |= self._figures()
        if device_memory is not None:
            given.setdefault("device_memory", device_memory)
        if self.gpu is not None:
            return replace(known_gpu(self.gpu), **given)
        if "device_memory" not in given:
            raise UserError("gpu: null; expected gpu=rtx4090, device_memory=24GiB or hardware=FILE")
        return replace(with_memory(given["device_memory"]), **given)


def known_name(name: str) -> str:
    """The name in `GPUS` of a GPU as users or drivers write it ("Tesla V100-SXM2-16GB"). Raises
    UserError: it is not in the table."""
    parts = [re.sub(r"(\d)gb$", r"\1", part) for part in re.split(r"[\s_-]+", name.lower())]
    parts = [part for part in parts if not re.fullmatch(r"sxm\d?|pcie", part)]
    runs = {"".join(parts[a:b]) for a, b in combinations(range(len(parts) + 1), 2)}
    known = {gpu.replace("-", ""): gpu for gpu in GPUS}
    found = max(runs & known.keys(), key=len, default=None)
    if found is None:
        near = get_close_matches("".join(parts), known, n=1)
        hint = f"did you mean '{known[near[0]]}'?" if near else f"expected one of {', '.join(GPUS)}"
        raise UserError(f"gpu: '{name}' is unknown; {hint}")
    return known[found]


def known_gpu(name: str) -> Hardware:
    """The figures of one of `GPUS`; `name` and errors as `known_name`."""
    memory, tflops, bandwidth, link, pcie = GPUS[known_name(name)]
    return Hardware(
        device_memory=int(memory * 2**30),
        matmul_rate=REACHED * tflops * 1e12,
        memory_bandwidth=REACHED * bandwidth * 1e9,
        interconnect=None if link is None else REACHED * link * 1e9,
        pcie=REACHED * pcie * 1e9,
    )


def check_bf16(gpu: str | None, dtype: str) -> None:
    """Raises UserError if `model.dtype` is "bf16", which a known GPU does not compute."""
    if gpu is not None and dtype == "bf16" and known_name(gpu) in WITHOUT_BF16:
        raise UserError(f"model.dtype: 'bf16', which a {gpu} does not compute; expected fp16")


def with_memory(size: int) -> Hardware:
    """The known GPU with the nearest memory size (the first in the table of equals), with exactly
    `size` bytes. It stands for a GPU whose name is not given."""
    name = min(GPUS, key=lambda name: abs(GPUS[name][0] * 2**30 - size))
    return replace(known_gpu(name), device_memory=size)


def from_file(path: str) -> dict[str, Any]:
    """The figures in a JSON file of `benchmarks/bandwidth.py`: fields of `Hardware`, and numbers.
    Raises UserError: the file cannot be read, or holds something else."""
    try:
        found = json.loads(Path(path).expanduser().read_text())
    except OSError as error:
        raise UserError(f"hardware: '{path}': {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"hardware: '{path}' is not valid; expected JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"hardware: '{path}' is not valid; expected a JSON object")
    names = {field.name for field in fields(Hardware)}
    for name, value in found.items():
        if name not in names:
            known = ", ".join(sorted(names))
            raise UserError(f"hardware: '{path}': {name!r} is unknown; expected one of {known}")
        if not isinstance(value, int | float) or value <= 0:
            raise UserError(f"hardware: '{path}': {name} is {value!r}; expected a number above 0")
    return found


def parse_rate(text: str | float) -> float:
    """Parses a rate per second: "25GB", "25GB/s", "100TFLOPS", "100TFLOP/s" or a plain number.
    Raises ValueError: the text is none of these, or not above 0."""
    word = str(text).strip()
    match = re.fullmatch(r"([0-9.]+)\s*([TG])FLOP(?:S|/s)?", word, re.IGNORECASE)
    try:
        if match:
            rate = float(match[1]) * (1e12 if match[2].upper() == "T" else 1e9)
        elif re.fullmatch(r"[0-9.]+e[0-9+]+", word):
            rate = float(word)
        else:
            return parse_size(word.removesuffix("/s"))
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ValueError(f"{text!r}; expected a rate such as 25GB/s or 100TFLOPS")
    return rate


def device_memory_of(cfg: Any) -> int | None:
    """Bytes of `device_memory` in a training config; None if it is null. Raises UserError: it is
    not a size."""
    if cfg.device_memory is None:
        return None
    try:
        return parse_size(cfg.device_memory)
    except ValueError as error:
        raise UserError(f"device_memory: {error}") from None


def machine_memory() -> int:
    """Bytes of host memory for all processes of a run: the machine's, or less where a container or
    a job of a cluster has a limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical, memory_limit() or physical)


def available_memory() -> int:
    """Bytes of host memory that a new process can take, as Linux tells it; at most
    `machine_memory`."""
    most, file = machine_memory(), Path("/proc/meminfo")
    if not file.is_file():
        return most
    lines = file.read_text().splitlines()
    free = next(line for line in lines if line.startswith("MemAvailable"))
    return min(most, int(free.split()[1]) * 1024)
