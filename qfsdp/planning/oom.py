"""Explains in one line why a run is out of memory: where, what fills it, and what to change.

<output_dir>/oom/
    rank_0.json            memory by kind, the largest tensors, the traceback
    rank_0_memory.pickle   GPUs: every block of memory, for https://pytorch.org/memory_viz; with
                           the code that allocated it if a profiled step (`profiler.steps`) ran
"""

from __future__ import annotations

import gc
import os
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qfsdp.common.devices import accelerator
from qfsdp.common.errors import UserError
from qfsdp.common.files import write_json
from qfsdp.common.sizes import format_size, parse_size
from qfsdp.config.load import get_key
from qfsdp.planning.advice import SUGGESTIONS, TRANSIENT, less_device_memory, less_host_memory
from qfsdp.tensor_subclasses.kernels.ability import failed_build, is_failed_build
from qfsdp.training.memory_usage import IN_HOST, bytes_by_kind, peak_memory_bytes, plain_tensors
from qfsdp.training.steps import StepClock

FOLDER = "oom"
LARGEST_TENSORS = 30
LOADED = "loaded_so_far"  # the kind of all memory before there is a model

C = TypeVar("C")


@dataclass
class Run:
    """What a recipe's `main` has made so far; `main` sets the fields as it goes.

    Fields:
        model, optimizer, clock: None until they exist.
        step: the current training step; 0 before the first.
    """

    model: nn.Module | None = None
    optimizer: Optimizer | None = None
    clock: StepClock | None = None
    step: int = 0


def explain_out_of_memory(main: Callable[[C, Run], None]) -> Callable[[C], None]:
    """Decorates a recipe's `main(cfg, run)`; the result is called as `main(cfg)`.

    If the device or the host is out of memory, it raises a UserError in place of the exception: one
    line with the place, the largest kinds of tensors, and changes of the config that take less.
    Details go to `cfg.output_dir`, if the config has one. Layers or an optimizer that cannot be
    compiled are a UserError too.
    """

    @wraps(main)
    def explained(cfg: C) -> None:
        run = Run()
        try:
            main(cfg, run)
        except Exception as error:
            if is_failed_build(error):
                other = ", or compile=false" if getattr(cfg, "compile", False) else ""
                raise UserError(f"{failed_build(error)}{other}") from None
            if not is_out_of_memory(error):
                raise
            try:
                explanation = _explanation(error, cfg, run, main.__code__.co_filename)
            except Exception:  # anything can fail without memory; the first error matters
                raise error from None
            raise UserError(explanation) from None

    return explained


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory is out: an accelerator's, Python's or PyTorch's.

    PyTorch raises a plain RuntimeError for the CPU's memory, and for pinned host memory.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    words = re.search(r"can't allocate memory|not enough memory|out of memory", str(error))
    return isinstance(error, RuntimeError) and words is not None


def _explanation(error: Exception, cfg: Any, run: Run, recipe_file: str) -> str:
    device = accelerator() or torch.device("cpu")
    on_gpu = device.type != "cpu"
    kinds = _bytes_by_kind(run, device)
    where = _where(error, run, recipe_file)
    of_host = on_gpu and not isinstance(error, torch.OutOfMemoryError)
    if of_host:
        ways = less_host_memory(cfg)
    else:
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        ways = less_device_memory(cfg, kinds, ranks, on_gpu, training=run.clock is not None)
    in_validation = run.clock is not None and run.clock.now == "validation"
    if in_validation and get_key(cfg, "validation.batch_size") is not None:
        ways = chain(["validation.batch_size=null"], ways)
    advice = list(islice(ways, SUGGESTIONS))
    details = {
        "where": where,
        "error": str(error),
        "bytes_by_kind": kinds,
        "largest_tensors": largest_tensors(run.model),
        "suggestions": advice,
        "traceback": traceback.format_exception(error),
    }
    file = _write(cfg, details, device)
    largest = [f"{kind.replace('_', ' ')} {format_size(n)}" for kind, n in kinds.items()][:2]
    return (
        f"out of {'host ' * of_host}memory {where}{_requested(error)}; "
        f"largest: {', '.join(largest)}; try {'; or '.join(advice)}"
        + ("" if file is None else f"; see {file}")
    )


def _bytes_by_kind(run: Run, device: torch.device) -> dict[str, int]:
    """Bytes of memory by kind of tensor, the largest first."""
    peak = peak_memory_bytes(device)
    if run.model is None:
        return {LOADED: peak}
    kinds = bytes_by_kind(run.model, run.optimizer, device)
    on_device = sum(size for kind, size in kinds.items() if not kind.endswith(IN_HOST))
    kinds[TRANSIENT] = max(0, peak - on_device)
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def _where(error: Exception, run: Run, recipe_file: str) -> str:
    """ "at step 3, backward"; before the first step "in load_model", a function of the recipe."""
    if run.step and run.clock is not None:
        return f"at step {run.step}" + (f", {run.clock.now}" if run.clock.now else "")
    called = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [code.co_name for code in called if code.co_filename == recipe_file]
    return f"in {names[-1]}"  # at least in main


def _requested(error: Exception) -> str:
    """How much the failed allocation asked for, if the message has it."""
    found = re.search(r"allocate ([\d.]+) ?([KMGT]i?B|bytes)", str(error))
    if found is None:
        return ""
    return f", asked for {format_size(parse_size(found[1] + found[2].replace('bytes', 'B')))} more"


def largest_tensors(model: nn.Module | None) -> list[dict[str, Any]]:
    """The largest tensors of this process that Python can find, each storage once.

    Tensors that only autograd holds are not among them.
    """
    names = {}
    for name, param in model.named_parameters() if model is not None else ():
        for suffix, tensor in (("", param), (".grad", param.grad)):
            for plain in () if tensor is None else plain_tensors(tensor):
                names[plain.untyped_storage()._cdata] = name + suffix
    found: dict[int, dict[str, Any]] = {}
    # Other types are left out: fake tensors hold no memory, and isinstance() would load lazy
    # modules.
    plain_types = (Tensor, nn.Parameter)
    for tensor in [o for o in gc.get_objects() if type(o) in plain_types]:
        if _holds_memory(tensor):
            storage = tensor.untyped_storage()
            found[storage._cdata] = {
                "bytes": storage.nbytes(),
                "name": names.get(storage._cdata),
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype),
                "device": str(tensor.device),
            }
    return sorted(found.values(), key=lambda details: -details["bytes"])[:LARGEST_TENSORS]


def _holds_memory(tensor: Tensor) -> bool:
    """False for what tracing leaves behind: functional tensors around fake ones, whose sizes are
    symbols, and the wrappers of `torch.func`."""
    of_func = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if of_func or torch._is_functional_tensor(tensor):
        return False
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def _write(cfg: Any, details: dict[str, Any], device: torch.device) -> Path | None:
    """The file with the details; None if the config has no folder or the folder cannot be written,
    as the disk may be full too."""
    if not hasattr(cfg, "output_dir"):
        return None
    folder = Path(cfg.output_dir).expanduser() / FOLDER
    file = folder / f"rank_{os.environ.get('RANK', 0)}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, details)
        if device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(file.with_suffix("")) + "_memory.pickle")
    except (OSError, RuntimeError):
        return None
    return file
