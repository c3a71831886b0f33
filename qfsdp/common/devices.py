"""Which device a run takes, why, and what a system must have.

Apple's GPUs (mps) are not taken: they have no fp64, PyTorch shards nothing over them, and our
kernels have not run there. macOS computes on the CPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from qfsdp.common.control_groups import core_limit
from qfsdp.common.errors import UserError
from qfsdp.common.terminal import warn

if TYPE_CHECKING:
    import torch

NOT_TAKEN = ("mps",)
# Variables that libraries read as they are; `huggingface_hub` reads its own as a shell would.
CACHES = (
    "HF_DATASETS_CACHE",
    "QFSDP_CACHE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TMPDIR",
)
DRIVERS = {"NVIDIA": "/proc/driver/nvidia/version", "AMD": "/sys/module/amdgpu/version"}
WHEELS = {"NVIDIA": "cu128", "AMD": "rocm6.4"}


def check_system() -> None:
    """Checks what qfsdp is built on, and calls `need_home`. Raises UserError: this Python has no
    file locks, as on Windows."""
    try:
        import fcntl  # noqa: F401
    except ImportError:
        raise UserError(
            f"{sys.platform}: this Python has no file locks (fcntl); expected Linux, macOS, or on "
            "Windows a terminal of WSL (`wsl --install`)"
        ) from None
    need_home()


def need_home() -> None:
    """Sets HOME for a user without one, as in a container that is started with a user's number.
    Also replaces a "~" at the start of the `CACHES`. A file of variables keeps it, as no shell
    reads them, and libraries would make a folder named "~" in the current one."""
    if os.path.expanduser("~") == "~":
        home = os.environ["HOME"] = f"{tempfile.gettempdir()}/home_uid_{os.getuid()}"
        warn(f"HOME: not set, and user {os.getuid()} has no home; '{home}' is taken")
    for name in CACHES:
        if os.environ.get(name, "").startswith("~/"):
            os.environ[name] = os.path.expanduser(os.environ[name])


def cores() -> int:
    """The cores that this process may use, at least 1; all of the machine where the system does not
    tell."""
    found = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux
        found = len(os.sched_getaffinity(0))
    return min(found, core_limit() or found)


def accelerator() -> torch.device | None:
    """The accelerator that runs take, without an index; None: they compute on the CPU."""
    import torch

    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None or found.type in NOT_TAKEN else found


def accelerator_count() -> int:
    """The number of visible accelerators that runs take."""
    import torch

    found = torch.accelerator.current_accelerator()
    return 0 if found is not None and found.type in NOT_TAKEN else torch.accelerator.device_count()


@lru_cache
def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums on a device: fp64, or fp32 where the device has no fp64."""
    import torch

    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def device_words() -> str:
    """The device of a run and why it is taken, in one line."""
    import torch

    if accelerator() is not None:
        return f"{torch.get_device_module().get_device_name()}, an accelerator for each rank"
    if torch.accelerator.is_available():
        return f"cpu: {NOT_TAKEN[0]} lacks fp64 and sharding, which runs need"
    return unused_driver() or "cpu: PyTorch sees no accelerator"


def unused_driver() -> str | None:
    """A line if this machine has the driver of a GPU, and PyTorch was built without it."""
    import torch

    if torch.version.cuda or torch.version.hip:
        return None
    for maker, file in DRIVERS.items():
        if Path(file).exists():
            index = f"https://download.pytorch.org/whl/{WHEELS[maker]}"
            return (
                f"cpu: this machine has a driver of {maker} GPUs, but PyTorch {torch.__version__} "
                f"is built without it; pip install --force-reinstall torch --index-url {index}"
            )
    return None
