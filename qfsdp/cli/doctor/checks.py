"""The checks of `qfsdp doctor`, in the order of its table. A process runs several:

    python -m qfsdp.cli.doctor.checks FOLDER RANKS SECONDS NAME ...

Each writes FOLDER/NAME.RANK.json. The process ends after the first red one, because what comes
after an error of CUDA fails too; the parent starts another for the rest. torch is imported by those
that need it: a broken one is among the things to find.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from qfsdp.common.devices import cores
from qfsdp.common.files import free_bytes, nearest_existing, write_json
from qfsdp.common.messages import first_line
from qfsdp.launch.ranks import leave_process_group
from qfsdp.planning.hardware import available_memory, machine_memory

PACKAGES = ("triton", "torchao", "torchtune", "safetensors", "transformers", "bitsandbytes")
NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "fuse.", "weka")
LEAST_MEMORY, LEAST_DISK = 2e9, 1e9  # bytes below which nothing can be trained or compiled
SENT = 64 << 20  # bytes of a copy between cards, and of an all-gather
TOLERANCE = 1e-5  # of losses in fp32 on several ranks


class NotHere(Exception):
    """This machine has not what a check is about."""


class Red(Exception):
    """A check failed; `advice` says what to do, if more is known than the check's own advice."""

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
        return found["figures"] if found.get("state") == "green" else {}

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


class Check(NamedTuple):
    """A row: its function, which returns its text, its title, and advice if it is red."""

    run: Callable[[Case], str]
    title: str
    advice: str
    when: str


CHECKS: dict[str, Check] = {}


def check(title: str, advice: str, when: str = "first") -> Callable[[Any], Any]:
    """Makes a function one of `CHECKS`; `when`: "first", "ranks" (one process each), or "last"."""

    def made(run: Callable[[Case], str]) -> Callable[[Case], str]:
        CHECKS[run.__name__] = Check(run, title, advice, when)
        return run

    return made


@check("host memory, disk", "close other programs, free the disk; docs/guide/memory.md")
def host(case: Case) -> str:
    total, available = machine_memory(), available_memory()
    disk, shared = free_bytes(Path.cwd()) or 0, free_bytes(Path("/dev/shm")) or 0
    figures = {"total": total, "available": available, "disk": disk, "shared": shared}
    case.figures |= figures | {"cores": cores(), "machine": platform.machine()}
    text = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB free, {cores()} cores, "
    text += f"disk {disk / 1e9:.1f} GB free, /dev/shm {shared / 1e9:.1f} GB free"
    if available < LEAST_MEMORY or disk < LEAST_DISK:
        raise Red(text)
    return text


@check("cache of models", "set HF_HOME to a folder that you can write to")
def models_cache(case: Case) -> str:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    folder = Path(os.environ.get("HF_HOME") or caches / "huggingface").expanduser()
    text = f"HF_HOME on {_file_system(case, folder)}"
    try:
        with tempfile.TemporaryDirectory(dir=nearest_existing(folder)):
            return text
    except OSError as error:
        raise Red(f"{text}: cannot be written ({error.strerror})") from None


def _file_system(case: Case, folder: Any) -> str:
    kind = (_lines("df", "--output=fstype", str(nearest_existing(folder))) or ["unknown"])[-1]
    network = kind.startswith(NETWORK)
    case.figures |= {"file_system": kind, "network": network, "free": free_bytes(folder)}
    return kind + " (network)" * network


def _lines(program: str, *words: str) -> list[str]:
    """What a program prints; nothing if it is missing, fails or does not answer."""
    try:
        run = subprocess.run([program, *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return run.stdout.splitlines() if run.returncode == 0 else []


@check("versions", "install qfsdp again in a fresh environment: pip install .")
def versions(case: Case) -> str:
    """Raises Red for a version outside of the range that qfsdp is installed with."""
    import torch
    from packaging.requirements import Requirement

    found: dict[str, Any] = {"python": platform.python_version()}
    installed = {one.name: one.version for one in metadata.distributions()}
    found |= {name: installed.get(name) for name in PACKAGES}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if nccl else None
    found["driver"] = next(iter(_nvidia_smi("driver_version")), None)
    case.figures |= found
    for text in metadata.requires("qfsdp") or [] if "qfsdp" in installed else []:
        one, version = Requirement(text), found.get(Requirement(text).name)
        if version and one.marker is None and not one.specifier.contains(version, prereleases=True):
            change = f"pip install '{one.name}{one.specifier}'"
            raise Red(f"{one.name} {version}; expected {one.specifier}", change)
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


def _nvidia_smi(query: str) -> list[str]:
    """A line per card of the driver."""
    return _lines("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")


@check("cards", "`nvidia-smi` says whether the driver sees them; try another torch")
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
    found = case.figures["cards"] = []
    for at in range(count):
        try:
            found.append(_card(at, count))
        except Exception as error:
            others = ",".join(str(n) for n in range(count) if n != at) or "-1 (the CPU)"
            advice = f"without it: CUDA_VISIBLE_DEVICES={others}; `nvidia-smi` and `dmesg` say more"
            raise Red(f"card {at} of {count}: {first_line(error)}", advice) from None
    first, free = found[0], min(card["free"] for card in found) / 2**30
    text = f"{count} x {first['name']} ({first['capability']}), "
    text += f"{free:.1f} of {first['total'] / 2**30:.1f} GiB free"
    direct = all(len(card["peers"]) == count - 1 for card in found)
    return text + (f", peer access {'of all' if direct else 'not of all'}" if count > 1 else "")


def _card(at: int, count: int) -> dict[str, Any]:
    import torch

    properties, a = torch.cuda.get_device_properties(at), torch.arange(64.0).view(8, 8)
    free, total = torch.cuda.mem_get_info(at)
    if not torch.equal((a.to(f"cuda:{at}") @ a.to(f"cuda:{at}")).cpu(), a @ a):
        raise Red("a product differs from the CPU's")
    peers = [n for n in range(count) if n != at and torch.cuda.can_device_access_peer(at, n)]
    capability = f"{properties.major}.{properties.minor}"
    card = {"name": properties.name, "capability": capability, "free": free, "total": total}
    return card | {"peers": peers}


@check("links", "look for other programs with `nvidia-smi`; try NCCL_P2P_DISABLE=1")
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
    between = case.figures["card to card"] = []
    for number, one in enumerate(held if len(held) > 1 else []):
        other = held[(number + 1) % len(held)].zero_()
        between.append(rate(other, one.fill_(number + 1)))
        if not torch.equal(other.cpu(), one.cpu()):
            raise Red(f"a copy from card {number} to the next arrives changed")
    slowest = {name: min(rates) for name, rates in case.figures.items() if rates}
    return ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in slowest.items())


@check("QDoRA, one rank", "training would fail too: report it with output=FILE")
def one_rank(case: Case) -> str:
    from qfsdp.cli.doctor.steps import steps

    case.device()
    case.figures["losses"] = losses = steps(case.folder, case.ranks, 0, 1)
    if not all(after < before for before, after in losses.values()):
        raise Red(f"the loss does not fall: {losses}")
    return ", ".join(f"{kind} {a:.4f} to {b:.4f}" for kind, (a, b) in losses.items())


@check("compiler", "install g++; set TORCHINDUCTOR_CACHE_DIR to a local folder")
def compiler(case: Case) -> str:
    """The compiler, and whether code can be written and loaded where inductor and Triton do so."""
    from qfsdp.tensor_subclasses.kernels import ability

    if (reason := ability.why_not()) is not None:
        raise Red(*reason.split("; ", 1))
    return f"builds and loads; {ability.FOLDER} on {_file_system(case, ability.cache_folder())}"


@check(
    "all-gather",
    "NCCL_DEBUG=INFO says more; try NCCL_P2P_DISABLE=1, "
    "GLOO_SOCKET_IFNAME=lo, in a container --shm-size=8g",
    "ranks",
)
def gather(case: Case) -> str:
    from qfsdp.distributed.world import init_world
    from qfsdp.training.throughput import gather_rate

    case.device()
    world = init_world()
    case.figures |= {"ranks": world.size, "rate": gather_rate(SENT, world.device)}
    backend = "gloo" if world.device.type == "cpu" else "nccl"
    return f"{world.size} ranks over {backend}, {case.figures['rate'] / 1e9:.2f} GB/s sent by each"


@check("QDoRA, all ranks", "do not trust several ranks here: report with output=FILE", "ranks")
def all_ranks(case: Case) -> str:
    from qfsdp.cli.doctor.steps import steps

    case.device()
    expected = case.of("one_rank").get("losses")
    if expected is None:
        raise NotHere("needs the step on one rank")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    case.figures["losses"] = losses = steps(case.folder, case.ranks, rank, size)
    pairs = [zip(losses[kind], expected[kind], strict=True) for kind in losses]
    off = case.figures["off"] = max(abs(a - b) for pair in pairs for a, b in pair)
    text = f"{size} ranks, fp32 and NF4: losses off by {off:.1e} from one rank's"
    if not off <= TOLERANCE:  # NaN too
        raise Red(f"{text}; expected at most {TOLERANCE}")
    return text


@check("compiled kernels", "QFSDP_EAGER_KERNELS=1 goes without; report it", "last")
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
        plain, compiled = plain.view(torch.uint8), compiled.view(torch.uint8)
        if differ := int((plain != compiled).sum()):
            raise Red(f"{differ} of {plain.numel()} bytes differ")
    return "NF4: the bits of the plain functions"


def main(words: list[str]) -> None:
    folder, ranks, seconds, *names = words
    signal.alarm(int(seconds))  # ends this process even if its parent is gone
    for name in names:
        case = Case(Path(folder), int(ranks))
        row: dict[str, Any] = {"state": "green", "advice": None, "figures": case.figures}
        try:
            row["text"] = CHECKS[name].run(case)
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
