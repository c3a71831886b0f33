"""The dtype that a model computes in: `model.dtype`, or fp32 on a CPU without bf16 products."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qfsdp.common.devices import accelerator
from qfsdp.common.errors import UserError, speaks_for_all

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
REPORTED = "QFSDP_FP32_REPORTED"  # in the environment, where the ranks of a run inherit it
# Values of oneDNN's ONEDNN_MAX_CPU_ISA that allow AVX-512, but not its bf16 instructions.
_ISA_WITHOUT_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")
planned_device: str | None = None


def compute_dtype(name: str) -> torch.dtype:
    """The dtype in which a model with `model.dtype: <name>` computes.

    On a CPU without bf16 products "bf16" gives fp32. PyTorch multiplies bf16 there at 1 to 30
    GFLOP/s, and fp32 at 80 to 245 (two cores, AVX2 and AVX-512). The first call that does so
    prints one line per run. A CPU computes "fp16" as asked, but
    products take 4 to 28 times as long as in fp32 (one core of Zen 4): it is there to try out a few
    steps of what a GPU will run.

    Args:
        name: "bf16", "fp16" or "fp32".

    Raises:
        UserError: "bf16" on a GPU without it (before compute capability 8.0).
    """
    if name == "bf16" and (kind := device_kind()) == "cpu" and not has_bf16_products():
        _report()
        return torch.float32
    if name == "bf16" and kind == "cuda" and planned_device is None and not has_bf16_gpus():
        gpu = torch.cuda.get_device_name()
        raise UserError(f"model.dtype: 'bf16', which a {gpu} does not compute; expected fp16")
    return COMPUTE_DTYPES[name]


@contextmanager
def planned_for(device: str) -> Iterator[None]:
    """Within it, `compute_dtype` answers for a run on "cpu" or "cuda", whatever this machine has.
    Estimates build their models within it."""
    global planned_device
    before, planned_device = planned_device, device
    try:
        yield
    finally:
        planned_device = before


@functools.cache
def has_bf16_products() -> bool:
    """Whether this CPU multiplies bf16 matrices faster than fp32 ones.

    oneDNN's own answer is right on Arm. On x86-64 it is also true for AVX-512 without
    `avx512_bf16` (Skylake to Ice Lake), where bf16 does 30 GFLOP/s and fp32 245. The environment
    variable ONEDNN_MAX_CPU_ISA can take instructions away from oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        return True
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _ISA_WITHOUT_BF16:
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@functools.cache
def has_bf16_gpus() -> bool:
    """Whether this machine's GPUs multiply bf16 matrices. PyTorch emulates it on older ones, slower
    than fp32."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def check_fp8_products() -> None:
    """Checks that products in FP8 run here: on GPUs from compute capability 8.9. With
    QFSDP_EMULATE_FP8=1 a CPU computes the same numbers in fp32, slower than bf16. Raises UserError:
    they do not."""
    if planned_device is not None or os.environ.get("QFSDP_EMULATE_FP8") == "1":
        return
    here = "a CPU"
    if device_kind() == "cuda":
        if torch.cuda.get_device_capability() >= (8, 9):
            return
        here = f"a {torch.cuda.get_device_name()}"
    raise UserError(f"quantization.compute: 'fp8', which {here} does not multiply; expected bf16")


def device_kind() -> str:
    if planned_device is not None:
        return planned_device
    found = accelerator()
    return "cpu" if found is None else found.type


def _report() -> None:
    if speaks_for_all() and REPORTED not in os.environ:
        os.environ[REPORTED] = "1"
        print("model.dtype: this CPU has no bf16 products; computing in fp32", flush=True)
