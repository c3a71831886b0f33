"""The checks of `qfsdp doctor`. A process runs several, one after the other:

    python -m qfsdp.memory.doctor.checks FOLDER RANKS SECONDS NAME ...

Each writes FOLDER/NAME.RANK.json. The process ends after the first red one, because what comes
after an error of CUDA fails too; the parent starts another for the rest.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from qfsdp.cli.files import free_bytes, nearest_existing, write_json
from qfsdp.cli.messages import first_line
from qfsdp.cli.ranks import leave_process_group
from qfsdp.memory.hardware import available_memory, machine_memory

PACKAGES = (
    "torch",
    "triton",
    "torchao",
    "torchtune",
    "safetensors",
    "transformers",
    "bitsandbytes",
)
NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "fuse.", "weka")
LEAST_MEMORY, LEAST_DISK = 2e9, 1e9  # bytes below which nothing can be trained or compiled
SENT = 64 << 20  # bytes of a copy between cards, and of an all-gather
TOLERANCE = 1e-5  # of losses in fp32 on several ranks


class NotHere(Exception):
    """This machine has not what a check is about."""


class Red(Exception):
    """A check failed.

    Args:
        advice: what to do, if more is known than the check's own advice says.
    """

    def __init__(self, text: str, advice: str | None = None) -> None:
        super().__init__(text)
        self.advice = advice


@dataclass
class Case:
    """What a check is told: the folder of results, the ranks asked for (0: one per card)."""

    folder: Path
    asked: int
    figures: dict[str, Any] = field(default_factory=dict)  # of this check, for the JSON file

    def of(self, name: str) -> dict[str, Any]:
        """The figures of a check that ran before, on one rank; empty if it was not green."""
        file = self.folder / f"{name}.0.json"
        found = json.loads(file.read_text()) if file.is_file() else {}
        return found.get("figures", {}) if found.get("state") == "green" else {}

    @property
    def ranks(self) -> int:
        """One per card; two processes without cards."""
        return self.asked or len(self.of("cards").get("cards", [])) or 2

    def device(self) -> Any:
        """Where one rank computes. Raises NotHere if there are cards that do not work."""
        import torch

        if not torch.cuda.is_available():
            return torch.device("cpu")
        if not self.of("cards"):
            raise NotHere("needs cards that work")
        return torch.device("cuda", 0)


# ---- the host ------------------------------------------------------------------------------


def host(case: Case) -> str:
    total, available = machine_memory(), available_memory()
    disk, shared = free_bytes(Path.cwd()) or 0, free_bytes(Path("/dev/shm")) or 0
    figures = {"total": total, "available": available, "disk": disk, "shared": shared}
    case.figures |= figures | {"cores": os.cpu_count(), "machine": platform.machine()}
    text = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB free, {os.cpu_count()} cores, "
    text += f"disk {disk / 1e9:.1f} GB free, /dev/shm {shared / 1e9:.1f} GB free"
    if available < LEAST_MEMORY or disk < LEAST_DISK:
        raise Red(text)
    return text


def models_cache(case: Case) -> str:
    folder = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    text = f"HF_HOME on {_file_system(case, folder)}"
    try:
        with tempfile.TemporaryDirectory(dir=nearest_existing(folder)):
            return text
    except OSError as error:
        raise Red(f"{text}: cannot be written ({error.strerror})") from None


def compiler(case: Case) -> str:
    """The compiler, and whether code can be written and loaded where inductor and Triton do so."""
    from qfsdp.tensor_subclasses.kernels import ability

    if (reason := ability.why_not()) is not None:
        raise Red(*reason.split("; ", 1))
    return f"builds and loads; {ability.FOLDER} on {_file_system(case, ability.cache_folder())}"


def _file_system(case: Case, folder: Any) -> str:
    kind = file_system(nearest_existing(folder))
    network = kind.startswith(NETWORK)
    case.figures |= {"file_system": kind, "network": network, "free": free_bytes(folder)}
    return kind + " (network)" * network


def file_system(folder: Path) -> str:
    """The type of the file system that holds an existing folder, as in /proc/mounts."""
    found, longest = "unknown", -1
    if Path("/proc/mounts").is_file():
        path = f"{folder.resolve()}/".replace("//", "/")
        for line in Path("/proc/mounts").read_text(errors="replace").splitlines():
            at, kind = line.split(" ")[1:3]
            at = at.replace("\\040", " ").rstrip("/") + "/"
            if path.startswith(at) and len(at) >= longest:  # a later mount hides an earlier one
                found, longest = kind, len(at)
    return found


# ---- packages and cards --------------------------------------------------------------------


def versions(case: Case) -> str:
    import torch

    found: dict[str, Any] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if nccl else None
    found["driver"] = next(iter(_nvidia_smi("driver_version")), None)
    case.figures |= found
    _check_versions(found)
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


def _check_versions(found: dict[str, Any]) -> None:
    """Raises Red for a version outside of the range that qfsdp is installed with."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(text) for text in metadata.requires("qfsdp") or []]
    except metadata.PackageNotFoundError:
        return
    for one in needed:
        version = found.get(one.name)
        if version and one.marker is None and not one.specifier.contains(version, prereleases=True):
            change = f"pip install '{one.name}{one.specifier}'"
            raise Red(f"{one.name} {version}; expected {one.specifier}", change)


def _nvidia_smi(query: str) -> list[str]:
    """A line per card of the driver; none without NVIDIA's driver, or if it does not answer."""
    program = shutil.which("nvidia-smi")
    command = [program or "", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return run.stdout.splitlines() if run.returncode == 0 else []


def cards(case: Case) -> str:
    """Each card's memory, and one product on each against the CPU's."""
    import torch

    driver = [] if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") else _nvidia_smi("name")
    if not torch.cuda.is_available():
        if driver:
            advice = "install a torch built for CUDA, and a driver that is as new as its CUDA"
            raise Red(f"the driver has {len(driver)} cards, torch {torch.__version__} none", advice)
        raise NotHere("no card; everything runs on the CPU")
    count = torch.cuda.device_count()
    a = torch.arange(64.0).view(8, 8)
    found = case.figures["cards"] = []
    for at in range(count):
        try:
            properties = torch.cuda.get_device_properties(at)
            free, total = torch.cuda.mem_get_info(at)
            on_card = a.to(f"cuda:{at}")
            if not torch.equal((on_card @ on_card).cpu(), a @ a):
                raise Red("a product differs from the CPU's")
        except Exception as error:
            others = ",".join(str(n) for n in range(count) if n != at) or "-1 (the CPU)"
            advice = f"without it: CUDA_VISIBLE_DEVICES={others}; `nvidia-smi` and `dmesg` say more"
            raise Red(f"card {at} of {count}: {first_line(error)}", advice) from None
        peers = [n for n in range(count) if n != at and torch.cuda.can_device_access_peer(at, n)]
        capability = f"{properties.major}.{properties.minor}"
        found.append({"name": properties.name, "free": free, "total": total, "peers": peers})
        found[-1]["capability"] = capability
    first = found[0]
    text = f"{count} x {first['name']} ({first['capability']}), "
    text += f"{min(c['free'] for c in found) / 2**30:.1f} of {first['total'] / 2**30:.1f} GiB free"
    direct = all(len(card["peers"]) == count - 1 for card in found)
    return text + (f", peer access {'of all' if direct else 'not of all'}" if count > 1 else "")


def links(case: Case) -> str:
    """Copies within the host, from it to each card and back, and from each card to the next."""
    import torch

    from qfsdp.training.throughput import best_rate

    if case.device().type == "cpu":
        a, b = torch.ones(SENT, dtype=torch.uint8), torch.ones(SENT, dtype=torch.uint8)
        case.figures["host"] = best_rate(2 * SENT, lambda: a.copy_(b), lambda: None)
        return f"host memory {case.figures['host'] / 1e9:.1f} GB/s"
    pinned = torch.ones(SENT, dtype=torch.uint8, pin_memory=True)
    held = [pinned.to(f"cuda:{at}") for at in range(torch.cuda.device_count())]

    def rate(to: torch.Tensor, source: torch.Tensor) -> float:
        def wait() -> None:
            for tensor in (to, source):
                if tensor.is_cuda:
                    torch.cuda.synchronize(tensor.device)

        return best_rate(SENT, lambda: to.copy_(source, non_blocking=True), wait)

    case.figures["host to card"] = [rate(card, pinned) for card in held]
    case.figures["card to host"] = [rate(pinned, card) for card in held]
    pairs = zip(held, held[1:] + held[:1], strict=True) if len(held) > 1 else []
    between = case.figures["card to card"] = []
    for number, (one, other) in enumerate(pairs):
        other.zero_()
        between.append(rate(other, one.fill_(number + 1)))
        if not torch.equal(other.cpu(), one.cpu()):
            raise Red(f"a copy from card {number} to the next arrives changed")
    slowest = {name: min(rates) for name, rates in case.figures.items() if rates}
    return ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in slowest.items())


# ---- what qfsdp does -----------------------------------------------------------------------


def kernels(case: Case) -> str:
    """NF4 bytes and weights of compiled kernels, bit for bit those of the plain functions."""
    import torch

    from qfsdp.tensor_subclasses import nf4
    from qfsdp.tensor_subclasses.kernels.ability import why_not

    device = case.device()
    if why_not() is not None:
        raise NotHere("4-bit kernels run uncompiled, slower")
    weight = torch.randn(577, 576, generator=torch.Generator().manual_seed(0)).to(device)
    results = []
    for eager in ("1", "0"):
        os.environ["QFSDP_EAGER_KERNELS"] = eager
        bytes_of = nf4.quantize(weight)
        given = (bytes_of.qdata, bytes_of.metadata, 576, 0, torch.float32, None)
        results.append((bytes_of.qdata, nf4.NF4Tensor.dequantize_rows(*given)))
    for plain, compiled in zip(*results, strict=True):
        differ = int((plain.view(torch.uint8) != compiled.view(torch.uint8)).sum())
        if differ:
            raise Red(f"{differ} of {plain.view(torch.uint8).numel()} bytes differ")
    return "NF4: the bits of the plain functions"


def one_rank(case: Case) -> str:
    from qfsdp.memory.doctor.steps import steps

    case.device()
    case.figures["losses"] = losses = steps(case.folder, case.ranks, 0, 1)
    if not all(after < before for before, after in losses.values()):
        raise Red(f"the loss does not fall: {losses}")
    return ", ".join(f"{kind} {a:.4f} to {b:.4f}" for kind, (a, b) in losses.items())


def gather(case: Case) -> str:
    """Numbers of every rank on every rank, and the rate."""
    import torch
    import torch.distributed as dist

    from qfsdp.distributed.world import init_world
    from qfsdp.training.throughput import gather_rate

    case.device()
    world = init_world()
    everyone = torch.empty(world.size, device=world.device)
    dist.all_gather_into_tensor(everyone, torch.full((1,), float(world.rank), device=world.device))
    if everyone.tolist() != list(range(world.size)):
        raise Red(f"rank {world.rank} got {everyone.tolist()}")
    case.figures |= {"ranks": world.size, "rate": gather_rate(SENT, world.device)}
    rate = f"{case.figures['rate'] / 1e9:.2f} GB/s sent by each"
    backend = "gloo" if world.device.type == "cpu" else "nccl"
    return f"{world.size} ranks over {backend}, {rate}"


def all_ranks(case: Case) -> str:
    from qfsdp.memory.doctor.steps import steps

    case.device()
    expected = case.of("one_rank").get("losses")
    if expected is None:
        raise NotHere("needs the step on one rank")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    case.figures["losses"] = losses = steps(case.folder, case.ranks, rank, size)
    off = max(
        abs(a - b) for kind in losses for a, b in zip(losses[kind], expected[kind], strict=True)
    )
    case.figures["off"] = off
    text = f"{size} ranks, fp32 and NF4: losses off by {off:.1e} from one rank's"
    if not off <= TOLERANCE:  # NaN too
        raise Red(f"{text}; expected at most {TOLERANCE}")
    return text


_MACHINE = (host, models_cache, versions, cards, links, compiler)
_QFSDP = (one_rank, kernels, gather, all_ranks)
CHECKS: dict[str, Callable[[Case], str]] = {one.__name__: one for one in _MACHINE + _QFSDP}


def main(words: list[str]) -> None:
    folder, ranks, seconds, *names = words
    signal.alarm(int(seconds))  # ends this process even if its parent is gone
    for name in names:
        case = Case(Path(folder), int(ranks))
        row: dict[str, Any] = {"state": "green", "advice": None, "figures": case.figures}
        try:
            row["text"] = CHECKS[name](case)
        except NotHere as reason:
            row |= {"state": "not here", "text": str(reason)}
        except Exception as error:  # whatever it is, it is one row
            kind = "" if isinstance(error, Red) else f"{type(error).__name__}: "
            row |= {"state": "red", "text": kind + first_line(error)}
            row["advice"] = getattr(error, "advice", None)
        write_json(Path(folder) / f"{name}.{os.environ.get('RANK', '0')}.json", row)
        if row["state"] == "red":
            break
    else:
        if "RANK" in os.environ:
            leave_process_group()
    os._exit(0)  # gloo's threads may abort a normal end


if __name__ == "__main__":
    main(sys.argv[1:])
