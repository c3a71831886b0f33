"""A run that is out of memory says in one line where, of what, and what to change.

<output_dir>/oom/
    rank_0.json            what was held by kind, the largest tensors, the traceback
    rank_0_memory.pickle   GPUs: every block of memory, to be read at
                           https://pytorch.org/memory_viz; who allocated it, if a profiled step
                           (`profiler.steps`) was running
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qfsdp.cli.config import get_key
from qfsdp.cli.errors import UserError
from qfsdp.cli.sizes import format_size, parse_size
from qfsdp.modules.transformer import Decoder
from qfsdp.training.memory_usage import (
    IN_HOST,
    OPTIMIZER,
    bytes_by_kind,
    peak_memory_bytes,
    plain_tensors,
)
from qfsdp.training.throughput import StepClock

FOLDER = "oom"
LARGEST_TENSORS = 30
SUGGESTIONS = 3
SMALL_SHARE = 0.1  # of all memory: what takes no more is not worth a change
REST = "activations_and_temporaries"

CPU = torch.device("cpu")

T = TypeVar("T")


@contextmanager
def explain_oom(cfg: Any) -> Iterator[None]:
    """To be entered around a run: loading, training, all of it.

    Whatever it has made so far, model, optimizer, clock, and the step it is at, is taken from the
    frames that the exception came through.

    Args:
        cfg: its config; `output_dir` says where to write.

    Raises:
        UserError: instead of an exception that says that memory is out, on a device or of the host.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        try:
            explanation = _explanation(error, cfg)
        except Exception:  # without memory anything can fail, and must not hide what did first
            raise error from None
        raise UserError(explanation) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says so: of an accelerator, of Python, or of PyTorch on the CPU, which
    raises a plain RuntimeError, as it does where no host memory can be pinned."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = re.search(r"can't allocate memory|not enough memory|out of memory", str(error))
    return isinstance(error, RuntimeError) and said is not None


def _explanation(error: Exception, cfg: Any) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    model = _local(frames, Decoder)
    device = torch.accelerator.current_accelerator(check_available=True) or CPU
    kinds = {} if model is None else bytes_by_kind(model, _local(frames, Optimizer), device)
    held = sum(size for kind, size in kinds.items() if not kind.endswith(IN_HOST))
    kinds[REST] = max(0, peak_memory_bytes(device) - held)
    kinds = dict(sorted(kinds.items(), key=lambda item: -item[1]))
    where = _where(frames, cfg)
    of_host = device.type != "cpu" and not isinstance(error, torch.OutOfMemoryError)
    training = _local(frames, StepClock) is not None
    ways = less_host_memory(cfg) if of_host else less_memory(cfg, kinds, device, training)
    advice = list(ways)[:SUGGESTIONS]
    facts = {
        "where": where,
        "error": str(error),
        "bytes_by_kind": kinds,
        "largest_tensors": largest_tensors(model),
        "suggestions": advice,
        "traceback": traceback.format_exception(error),
    }
    written = _write(Path(cfg.output_dir).expanduser() / FOLDER, facts, device)
    most = [f"{kind.replace('_', ' ')} {format_size(size)}" for kind, size in kinds.items()]
    return (
        f"out of {'host ' * of_host}memory {where}{_asked(error)}; largest: {', '.join(most[:2])}; "
        f"try {'; or '.join(advice)}{written}"
    )


def _local(frames: list[FrameType], kind: type[T]) -> T | None:
    """The first local variable of that kind, from the outermost frame on."""
    values = (value for frame in frames for value in frame.f_locals.values())
    return next((value for value in values if isinstance(value, kind)), None)


def _where(frames: list[FrameType], cfg: Any) -> str:
    """ "at step 3, backward", or the function of the recipe, before there are steps."""
    for frame in frames:
        clock, step = _local([frame], StepClock), frame.f_locals.get("step")
        if clock is not None and isinstance(step, int):
            return f"at step {step}" + (f", {clock.now}" if clock.now else "")
    recipe = inspect.getfile(type(cfg))
    names = [frame.f_code.co_name for frame in frames if frame.f_code.co_filename == recipe]
    return f"in {names[-1]}" if names else "at the start"


def _asked(error: Exception) -> str:
    found = re.search(r"allocate ([\d.]+) ?([KMGT]i?B|bytes)", str(error))
    if found is None:
        return ""
    return f", asked for {format_size(parse_size(found[1] + found[2].replace('bytes', 'B')))} more"


def largest_tensors(model: nn.Module | None) -> list[dict[str, Any]]:
    """The largest that Python knows of, every storage once; what only autograd keeps is not
    among them."""
    names = {}
    for name, param in model.named_parameters() if model is not None else ():
        for of, tensor in (("", param), (".grad", param.grad)):
            for plain in () if tensor is None else plain_tensors(tensor):
                names[plain.untyped_storage()._cdata] = name + of
    found: dict[int, dict[str, Any]] = {}
    # No other types: fake tensors hold nothing, and lazy modules wake up if they are asked.
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
    return sorted(found.values(), key=lambda facts: -facts["bytes"])[:LARGEST_TENSORS]


def _holds_memory(tensor: Tensor) -> bool:
    """Not so what tracing may leave behind: functional tensors around fake ones, which have
    symbols for sizes, and the wrappers of `torch.func`."""
    of_func = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if of_func or torch._is_functional_tensor(tensor):
        return False
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def _write(folder: Path, facts: dict[str, Any], device: torch.device) -> str:
    """Where it can be read, for the end of a sentence; nothing if the disk is full as well."""
    file = folder / f"rank_{os.environ.get('RANK', 0)}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(facts, indent=2))
        if device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(file.with_suffix("")) + "_memory.pickle")
    except (OSError, RuntimeError):
        return ""
    return f"; see {file}"


# ---- advice --------------------------------------------------------------------------------


def less_memory(
    cfg: Any, kinds: dict[str, int], device: torch.device, training: bool
) -> Iterator[str]:
    """Changes of a config that take less device memory, the one that costs least first.

    Args:
        kinds: what is held, by kind.
        training: it was no memory of loading.
    """
    get, total = partial(get_key, cfg), sum(kinds.values())
    on_gpu, ranks = device.type != "cpu", int(os.environ.get("WORLD_SIZE", 1))
    if training and kinds[REST] > SMALL_SHARE * total:
        if get("activation.checkpointing") in ("none", "selective"):
            yield "activation.checkpointing=full"
        if (get("batch_size") or 1) > 1:
            yield _smaller_batches(cfg)
        if on_gpu and get("activation.offload") is False:
            yield "activation.offload=true"
    if ranks > 1 and get("sharding.strategy") in ("shard_grad_op", "ddp"):
        yield "sharding.strategy=full_shard"
    if kinds.get(OPTIMIZER, 0) > SMALL_SHARE * total and "8bit" not in str(get("optimizer")):
        yield "optimizer._component_=torchao.optim.AdamW8bit"
    nothing_offloaded = get("sharding.offload_base") == "none" and not get("sharding.cpu_offload")
    if on_gpu and nothing_offloaded and get("sharding.strategy") != "ddp":
        yield "sharding.offload_base=cpu"
    if ranks > 1 and get("sharding.wrap") == "decoder_layer":
        yield "sharding.wrap=linear"
    if on_gpu and nothing_offloaded and get("sharding.strategy") != "ddp":
        yield "sharding.cpu_offload=true"
    if training:
        yield "a smaller max_seq_len"
    yield "more ranks"


def less_host_memory(cfg: Any) -> Iterator[str]:
    """Changes that take less host memory, where the device is another."""
    if get_key(cfg, "activation.offload"):
        yield "activation.offload=false"
    if get_key(cfg, "sharding.offload_base") == "cpu":
        yield "sharding.offload_base=disk"
    if get_key(cfg, "sharding.offload_base") == "disk":
        yield "a smaller sharding.ring_memory"
    if get_key(cfg, "sharding.cpu_offload"):
        yield "sharding.cpu_offload=false"
    yield "fewer ranks on this machine"


def _smaller_batches(cfg: Any) -> str:
    """As many samples in a step, in more micro-batches."""
    size, count = get_key(cfg, "batch_size") or 1, get_key(cfg, "gradient_accumulation_steps") or 1
    smaller = size // 2 if size % 2 == 0 else 1
    return f"batch_size={smaller} gradient_accumulation_steps={count * size // smaller}"
