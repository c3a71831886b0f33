"""Recurrences that layers compute in place of attention, chunk by chunk, for packed rows.

A head has a state S of `[key, value]` numbers, which is zero before the first token of each
document. With a decay g_t <= 0 the state space of Mamba-2 (arXiv 2405.21060) is

    S_t = exp(g_t) S_{t-1} + k_t v_t^T      o_t = S_t^T q_t

and the gated delta rule of Gated DeltaNet (arXiv 2412.06464), with steps b_t and unit q_t and k_t,

    S_t = exp(g_t) S_{t-1} + b_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T      o_t = S_t^T q_t

A chunk is computed at once, as in section 3.3 of the latter. With c_i the sum of g up to token i of
the chunk, P_ij = exp(c_i - c_j) for j <= i, and S the state before the chunk:

    (I + tril(b_i k_i k_j P_ij, -1)) [W | U] = [b_i exp(c_i) k_i | b_i v_i]
    u = U - W S         o = exp(c_i) q S + (q_i k_j P_ij) u
    S' = exp(c_last) S + (exp(c_last - c_j) k_j)^T u

and with u = v in the state space. Documents change only factors that lie between 0 and 1. With d_i
the document of token i, and p that of the token before the chunk: P_ij is 0 unless d_i = d_j;
exp(c_i), which reads S, unless d_i = p; exp(c_last - c_j), which writes S', unless d_j = d_last;
exp(c_last) unless d_last = p.

All is computed in fp32. Only the states are computed one chunk after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from qfsdp.modules.shared_rows import SharedRows, gathered
from qfsdp.tensor_subclasses.kernels.custom_op import custom_op

CHUNK = 64  # tokens
EPSILON = 1e-6  # below the root of the length of queries and keys, as in flash-linear-attention


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    step: Tensor,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    shared: SharedRows | None = None,
) -> tuple[Tensor, Tensor]:
    """The results of all tokens, and the state after the last one.

    Args:
        query, key: `[batch, tokens, key heads, key]`, of any length: they are made units, and
            queries then divided by the root of `key`. A key head serves as many value heads, which
            follow each other, as there are more of them.
        value: `[batch, tokens, value heads, value]`.
        decay: `[batch, tokens, value heads]`, at most 0. step: likewise, between 0 and 1.
        documents: integers `[batch, tokens]`: a token reads those of its own number only. Equal
            numbers follow each other. None: a row is one document.
        state: fp32 `[batch, value heads, key, value]`, of the first document; None: zero.
        shared: the rows, where each rank has a part of them; in place of `documents` and `state`.
            It is then collective, and so is its backward; the state after the last token has no
            gradient.

    Returns:
        `[batch, tokens, value heads, value]` in the dtype of `value`; fp32, as `state`.
    """
    parts = (_chunks(part, key.shape[2]) for part in (query, key, value, step.unsqueeze(-1)))
    queries, keys, values, steps = parts
    decays = _decays(decay, documents, key.shape[2], shared)
    queries, keys = _unit(queries) * key.shape[-1] ** -0.5, _unit(keys)
    sides = torch.cat([keys * (decays.reads * steps), values * steps], -1)
    solved = torch.linalg.solve_triangular(
        (keys @ keys.mT) * (decays.pairs * steps), sides, upper=False, unitriangular=True
    )
    read, new = solved.split([key.shape[-1], value.shape[-1]], -1)
    return _results(queries, keys, read, new, decays, value, state, shared)


def next_state(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, step: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` of one more token of each row: its arguments without `tokens`."""
    of_head = value.shape[1] // key.shape[1]
    query, key = (_unit(part.float()).repeat_interleave(of_head, 1) for part in (query, key))
    state = state * decay.exp()[..., None, None]
    error = value.float() - (state * key.unsqueeze(-1)).sum(-2)
    state = state + key.unsqueeze(-1) * (error * step.unsqueeze(-1)).unsqueeze(-2)
    found = (state * query.unsqueeze(-1)).sum(-2) * key.shape[-1] ** -0.5
    return found.to(value.dtype), state


def state_space(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    shared: SharedRows | None = None,
) -> tuple[Tensor, Tensor]:
    """As `gated_delta_rule`, with queries and keys as they are (C and B of Mamba-2)."""
    queries, keys, values = (_chunks(part, key.shape[2]) for part in (query, key, value))
    decays = _decays(decay, documents, key.shape[2], shared)
    return _results(queries, keys, None, values, decays, value, state, shared)


class _Decays(NamedTuple):
    """exp(c_i) and exp(c_last - c_j), `[chunks, batch, key heads, value heads of it, CHUNK, 1]`;
    P_ij; and exp(c_last), `[..., 1, 1]`."""

    reads: Tensor
    writes: Tensor
    pairs: Tensor
    keeps: Tensor


def _decays(
    decay: Tensor, documents: Tensor | None, key_heads: int, shared: SharedRows | None
) -> _Decays:
    if shared is not None:  # with the number of the token before this part
        documents = shared.rows.documents(decay.shape[1], 1)
    # Differences of large sums would lose digits in fp32.
    sums = _chunks(decay.unsqueeze(-1), key_heads).double().cumsum(-2)
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=decay.device).tril()
    reads = sums.float().exp()
    if documents is not None:
        first, documents = documents[:, :1], documents[:, -decay.shape[1] :]
        more = documents[:, -1:].expand(-1, -documents.shape[1] % CHUNK)
        numbers = torch.cat([documents, more], 1).unflatten(1, (-1, CHUNK)).transpose(0, 1)
        before = torch.cat([first.unsqueeze(0), numbers[:-1, :, -1:]])
        reads = reads * (numbers == before)[:, :, None, None, :, None]
        seen = seen & (numbers.unsqueeze(-1) == numbers.unsqueeze(-2))[:, :, None, None]
    pairs = (sums - sums.mT).float().masked_fill(~seen, -torch.inf).exp()
    return _Decays(reads, pairs[..., -1:, :].mT, pairs, reads[..., -1:, :])


def _chunks(part: Tensor, key_heads: int) -> Tensor:
    """`[batch, tokens, heads, size]` -> fp32 `[chunks, batch, key heads, value heads of it or 1,
    CHUNK, size]`, with zeros after the last token."""
    part = F.pad(part, (0, 0, 0, 0, 0, -part.shape[1] % CHUNK)).float()
    part = part.unflatten(1, (-1, CHUNK)).movedim((1, 3), (0, 2)).contiguous()
    return part.unflatten(2, (key_heads, -1))


def _unit(part: Tensor) -> Tensor:
    return part * torch.rsqrt((part * part).sum(-1, keepdim=True) + EPSILON)


def _results(
    queries: Tensor,
    keys: Tensor,
    read: Tensor | None,
    new: Tensor,
    decays: _Decays,
    value: Tensor,
    state: Tensor | None,
    shared: SharedRows | None,
) -> tuple[Tensor, Tensor]:
    """The results from W (None: zero) and U of all chunks. Products of queries and keys are
    computed once for all value heads that share them."""
    batch, tokens, heads, width = value.shape
    if state is None:
        state = new.new_zeros(batch, heads, keys.shape[-1], width)
    flat = [part.flatten(1, 3) for part in (new, keys * decays.writes, decays.keeps)]
    read = None if read is None else read.flatten(1, 3)
    written, states, last = _States.apply(read, *flat, state.float().flatten(0, 1), shared)
    reads, attends = queries * decays.reads, (queries @ keys.mT) * decays.pairs
    found = reads.flatten(1, 3) @ states + attends.flatten(1, 3) @ written
    found = found.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)
    return found[:, :tokens].to(value.dtype), last.unflatten(0, (batch, heads))


class _States(torch.autograd.Function):
    """u and S of all chunks, and the state after the last one: u = U - W S, S' = c S + K^T u.

    A part of a row that ranks share does to the state what a chunk does: S_out = M S_in + U. It
    runs once from zero for U, then from the state that M and U of all earlier parts give. Gradients
    of states come from later parts likewise, times M^T. So M itself needs no gradient.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        reads: Tensor | None,
        new: Tensor,
        keys: Tensor,
        keeps: Tensor,
        state: Tensor,
        shared: SharedRows | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = run_chunks(reads, new, keys, keeps, state)
        ctx.shared, effects = shared, None
        if shared is not None:
            effects, ends = (
                gathered(part, shared) for part in (_effect(reads, keys, keeps), found[2])
            )
            for effect, end in zip(effects[: shared.rows.part], ends, strict=False):
                state = _through(effect, state) + end
            if shared.rows.part:
                found = run_chunks(reads, new, keys, keeps, state)
        ctx.save_for_backward(reads, keys, keeps, *found[:2], effects)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        *saved, effects = ctx.saved_tensors
        of_written, of_states, of_state = grads
        if ctx.shared is None:
            return _given(saved[0], run_chunks_back(of_written, of_states, of_state, *saved))
        of_state = torch.zeros_like(of_state)
        found = run_chunks_back(of_written, of_states, of_state, *saved)
        starts, later = gathered(found[4], ctx.shared), ctx.shared.rows.part + 1
        for effect, start in zip(reversed(effects[later:]), reversed(starts[later:]), strict=True):
            of_state = _through(effect.mT, of_state) + start
        if later < len(starts):
            found = run_chunks_back(of_written, of_states, of_state, *saved)
        return _given(saved[0], found)


def _given(reads: Tensor | None, found: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    return (None if reads is None else found[0], *found[1:], None)


# Custom ops, as attention is: compiled layers are one graph for rows of any length. Results are
# contiguous, as the compiler is told, whatever layout it gives to arguments.


@custom_op("qfsdp::delta_chunks")
def run_chunks(
    reads: Tensor | None, new: Tensor, keys: Tensor, keeps: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """u and S of all chunks, and the state after the last one."""
    states = new.new_empty(len(new), *state.shape)
    written = new.new_empty(new.shape)
    for at in range(len(new)):
        states[at] = state
        own = new[at]
        written[at] = own if reads is None else torch.baddbmm(own, reads[at], state, alpha=-1)
        state = torch.baddbmm(state * keeps[at], keys[at].mT, written[at])
    return written, states, state


@custom_op("qfsdp::delta_chunks_backward")
def run_chunks_back(
    of_written: Tensor,
    of_states: Tensor,
    of_state: Tensor,
    reads: Tensor | None,
    keys: Tensor,
    keeps: Tensor,
    written: Tensor,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of all arguments of `run_chunks`; no numbers where `reads` is None."""
    of_new, of_next = (part.new_empty(part.shape) for part in (written, states))
    for at in reversed(range(len(keys))):
        of_next[at] = of_state
        of_new[at] = torch.baddbmm(of_written[at], keys[at], of_state)
        of_state = of_states[at] + of_state * keeps[at]
        if reads is not None:
            of_state = torch.baddbmm(of_state, reads[at].mT, of_new[at], alpha=-1)
    of_reads = of_new.new_empty(0) if reads is None else -(of_new @ states.mT)
    of_keeps = (states * of_next).sum_to_size(keeps.shape)
    return of_reads, of_new, written @ of_next.mT, of_keeps.contiguous(), of_state.contiguous()


@torch.library.register_fake("qfsdp::delta_chunks")
def _(reads: Any, new: Tensor, keys: Tensor, keeps: Tensor, state: Tensor) -> Any:
    shapes = (new.shape, (len(new), *state.shape), state.shape)
    return tuple(new.new_empty(shape) for shape in shapes)


@torch.library.register_fake("qfsdp::delta_chunks_backward")
def _(of_written: Any, of_states: Any, of_state: Any, reads: Any, *saved: Tensor) -> Any:
    keys, keeps, written, _ = (part.new_empty(part.shape) for part in saved)
    of_reads = written.new_empty(0 if reads is None else reads.shape)
    return of_reads, written, keys, keeps, of_state.new_empty(of_state.shape)


def _effect(reads: Tensor | None, keys: Tensor, keeps: Tensor) -> Tensor:
    """M of all chunks, `[heads, key, key]`; in the state space a factor, `[heads, 1, 1]`."""
    if reads is None:
        return keeps.prod(0)
    effect = torch.eye(keys.shape[-1], device=keys.device, dtype=keys.dtype)
    effect = effect.expand(keys.shape[1], -1, -1)
    for at in range(len(keys)):
        of_reads = reads[at] @ effect
        effect = torch.baddbmm(effect * keeps[at], keys[at].mT, of_reads, alpha=-1)
    return effect


def _through(effect: Tensor, state: Tensor) -> Tensor:
    return effect * state if effect.shape[-1] == 1 else effect @ state
