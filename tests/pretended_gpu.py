"""A GPU that is pretended: tensors say that they are on it, and all is computed on the CPU.

So every branch for GPUs runs, with the numbers of the CPU. What only a GPU has is replaced:
streams and events, which do nothing, and attention of documents, which is computed one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

GPU = torch.device("cuda", 0)
REAL: Callable[[Tensor], torch.device] = torch._C.TensorBase.device.__get__
MAKERS = ["empty", "zeros", "ones", "full", "arange", "tensor", "as_tensor", "linspace", "eye"]
MAKERS += ["rand", "randn", "randint", "triu_indices"]
MAKERS += ["empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "empty_strided"]
METHODS = ["to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"]


class Stream:
    """A stream or an event: all is done when it is asked for."""

    device = GPU

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def record_event(self, *_: Any) -> Stream:
        return self

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def wait(self, *_: Any) -> None:
        pass

    record = synchronize = wait_event = wait_stream = wait


def on_host(value: Any) -> Any:
    """A device as the CPU has it."""
    asked = isinstance(value, str) and value.startswith("cuda")
    return "cpu" if asked or isinstance(value, torch.device) and value.type == "cuda" else value


def made_on_host(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return fn(*map(on_host, args), **{name: on_host(value) for name, value in kwargs.items()})

    return made


def varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, _: Tensor, longest: int, *__: Any, **how: Any
) -> Tensor:
    before = how["window_size"][0]
    found = []
    for start, end in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        assert end - start <= longest
        mask = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        mask = mask if before < 0 else mask.triu(-before)
        parts = [t[start:end].transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
        scale, share = how.get("scale"), q.shape[1] != k.shape[1]  # as torch 2.11: it is not told
        y = F.scaled_dot_product_attention(*parts, mask, enable_gqa=share, scale=scale)
        found.append(y[0].transpose(0, 1))
    return torch.cat(found)


def scaled_mm(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, out_dtype: Any) -> Tensor:
    assert a.size(0) % 16 == 0 and b.stride(0) == 1  # as a GPU wants them
    return ((a.float() @ b.float()) * of_a * of_b).to(out_dtype)


def pretend(patch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """Lasts until `patch` is undone."""
    for name in MAKERS:
        patch.setattr(torch, name, made_on_host(getattr(torch, name)))
    for name in METHODS:
        patch.setattr(Tensor, name, made_on_host(getattr(Tensor, name)))
    patch.setattr(Tensor, "device", property(lambda t: GPU if REAL(t).type == "cpu" else REAL(t)))
    patch.setattr(Tensor, "is_cuda", property(lambda t: t.device.type == "cuda"))
    patch.setattr(Tensor, "pin_memory", lambda t, *_: t)
    patch.setattr(Tensor, "record_stream", lambda *_: None)
    generator = torch.Generator
    patch.setattr(torch, "Generator", lambda device="cpu": generator(on_host(device)))
    patch.setattr(torch, "Stream", Stream)
    patch.setattr(torch, "Event", Stream)
    rng = {"get_rng_state": lambda _: torch.get_rng_state()}
    rng["set_rng_state"] = lambda state, _: torch.set_rng_state(state)
    module = SimpleNamespace(Event=Stream, get_device_name=lambda *_: "pretended", **rng)
    patch.setattr(torch, "get_device_module", lambda *_: module)
    answers: dict[str, Any] = {"is_available": True, "device_count": 1, "current_device_index": 0}
    answers |= {"max_memory_allocated": 1 << 30, "max_memory_reserved": 1 << 31}
    answers |= {"reset_peak_memory_stats": None, "set_device_index": None, "synchronize": None}
    answers |= {"current_stream": Stream(), "current_accelerator": GPU}
    for name, value in answers.items():
        patch.setattr(torch.accelerator, name, lambda *_, value=value, **__: value)
    answers = {"is_available": True, "get_device_capability": capability, "synchronize": None}
    answers |= {"get_device_name": "pretended", "is_bf16_supported": capability >= (8, 0)}
    answers |= {"mem_get_info": (1 << 34, 1 << 34), "current_device": 0, "device_count": 1}
    for name, value in answers.items():
        patch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    patch.setattr(torch, "_scaled_mm", scaled_mm)
    patch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
