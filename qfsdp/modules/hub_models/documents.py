"""Layers of transformers' models that carry a state along a row: each sample begins with none.

These layers call functions of their file: kernels of flash-linear-attention and causal-conv1d on
GPUs that have them, else PyTorch, which knows no samples. The layers of one model get functions of
ours instead: each `forward` is made again of the same code with other globals, so nothing in the
package changes. `seq_idx`, which transformers hands to every layer, tells a token's sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from qfsdp.modules.delta_kernel import has_kernel, in_one_row
from qfsdp.modules.gated_delta_rule import gated_delta_rule, state_space
from qfsdp.modules.shared_rows import SharedRows, with_tokens_before
from qfsdp.modules.short_convolution import short_convolution


def numbers_of_samples(positions: Tensor) -> Tensor:
    """The number of every token's sample in its row, int32, as transformers' masks find samples:
    where positions do not follow each other."""
    return F.pad(positions.diff() != 1, (1, 0)).cumsum(-1, dtype=torch.int32)


def keep_samples_apart(model: nn.Module, shared: bool = False) -> bool:
    """Gives the layers of a model of transformers functions that know samples; whether any took
    one.

    Args:
        shared: ranks share rows: the functions raise where a layer does not hand the rows on.
    """
    layers = [module for module in model.modules() if calls_ours(module)]
    for layer in layers:
        forward = inspect.unwrap(cast(FunctionType, type(layer).forward))
        known = forward.__globals__
        ours = {name: partial(OURS[name], known[name]) for name in _called_by(layer)}
        if shared:
            ours = {name: partial(_with_rows, function) for name, function in ours.items()}
        made = FunctionType(
            forward.__code__,
            known | ours,
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        made.__kwdefaults__ = forward.__kwdefaults__
        layer.forward = MethodType(made, layer)
    return bool(layers)


def calls_ours(layer: nn.Module) -> bool:
    """Whether a module of a model of transformers calls functions that know samples."""
    return bool(_called_by(layer))


def _with_rows(
    ours: Callable[..., Any], *args: Any, shared_rows: SharedRows | None = None, **more: Any
) -> Any:
    if shared_rows is None:
        raise ValueError("sharding.context_parallel: a layer does not hand the rows on")
    return ours(*args, shared_rows=shared_rows, **more)


def _called_by(layer: nn.Module) -> set[str]:
    forward = inspect.unwrap(cast(FunctionType, type(layer).forward))
    code = getattr(forward, "__code__", None)
    return set() if code is None else OURS.keys() & set(code.co_names)


def _convolution(
    theirs: Callable[..., Tensor],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    shared_rows: SharedRows | None = None,
    **_: Any,
) -> Tensor:
    """`causal_conv1d_fn`: `[batch, channels, tokens]`."""
    own = hidden_states.shape[2]
    if shared_rows is not None:
        wide, numbers = with_tokens_before(hidden_states.mT, weight.shape[1] - 1, shared_rows)
        hidden_states, seq_idx = wide.mT, numbers.int()
    if has_kernel(hidden_states, "causal_conv1d"):
        found = theirs(hidden_states, weight, bias, activation=activation, seq_idx=seq_idx)
        return found if shared_rows is None else found[..., -own:]
    from transformers.activations import ACT2FN

    found = short_convolution(hidden_states.mT, weight, bias, seq_idx).mT[..., -own:]
    return found if activation is None else ACT2FN[activation](found)


def _gated_delta_rule(
    theirs: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    shared_rows: SharedRows | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule`: `[batch, tokens, heads, ...]`."""
    if shared_rows is None and has_kernel(query, "fla"):
        more |= {"initial_state": initial_state, "output_final_state": output_final_state}
        return in_one_row(theirs, [query, key, value, g, beta], cu_seqlens, **more)
    of_row = seq_idx, initial_state, shared_rows
    found, state = gated_delta_rule(query, key, value, g, beta, *of_row)
    return found, state if output_final_state else None


def _kimi_delta_rule(
    theirs: Callable[..., Any],
    *parts: Tensor,
    seq_idx: Tensor | None = None,
    g: Tensor,
    beta: Tensor,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kimi_delta_attention`, which has a decay for each channel: one call for a sample."""
    if seq_idx is None or isinstance(seq_idx, FakeTensor):  # a dry run does not know samples
        found: tuple[Tensor, Tensor | None] = theirs(*parts, g=g, beta=beta, **more)
        return found
    rows = []
    for row, numbers in enumerate(seq_idx):
        lengths = numbers.unique_consecutive(return_counts=True)[1].tolist()
        split = [part[row : row + 1].split(lengths, 1) for part in (*parts, g, beta)]
        alone = [
            theirs(*q_k_v, g=g, beta=beta, **more)[0]
            for *q_k_v, g, beta in zip(*split, strict=True)
        ]
        rows.append(torch.cat(alone, 1))
    return torch.cat(rows), None


def _state_space(
    theirs: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
    shared_rows: SharedRows | None = None,
    **more: Any,
) -> Any:
    """`mamba2_chunk_scan`: `[batch, tokens, heads, ...]`; a state `[batch, heads, value, key]`."""
    if shared_rows is None and has_kernel(hidden_states, "mamba_ssm"):
        more |= {"D": D, "dt_bias": dt_bias, "initial_states": initial_states}
        more |= {"dt_softplus": dt_softplus, "dt_limit": dt_limit, "seq_idx": seq_idx}
        more |= {"return_final_states": return_final_states}
        return theirs(hidden_states, dt, A, B, C, **more)
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
    values = hidden_states.float()
    state = None if initial_states is None else initial_states.mT
    scaled = values * dt.unsqueeze(-1)
    found, state = state_space(C, B, scaled, A.float() * dt, seq_idx, state, shared_rows)
    found = found if D is None else found + D.unsqueeze(-1) * values
    found = found.contiguous()  # modules call `view` on it
    return (found, state.mT) if return_final_states else found


OURS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _kimi_delta_rule,
    "mamba2_chunk_scan": _state_space,
}
"""By the names by which transformers' layers call them."""
