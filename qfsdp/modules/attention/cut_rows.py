"""Attention of rows that ranks share: each rank has the queries of its part of a row.

Keys and values of the group are gathered, and a part's queries attend to those up to its own end:

    rank 0   queries 0 .. 3   keys 0 .. 3
    rank 1   queries 4 .. 7   keys 0 .. 7

A document that is cut has all its keys here, and its last queries. The ops of `sinks` compute
that, on GPUs by FlashAttention's kernel. Only as many tokens before a part are gathered as its
window or its documents reach, if these are fewer than a part.

Autograd keeps a rank's own keys and values. Backward gathers again, and the gradients of gathered
keys and values are summed where they belong (reduce-scatter). Exchange is inside of the two custom
ops: it is repeated where a layer is computed again, and compiled layers have no break. Every rank
of a group runs every exchange, whatever its part holds.

Long rows go through some heads at a time (`AT_ONCE`). While the products of some run, keys and
values of the next arrive, and gradients of those before are summed. So a step waits for the first
gather and the last sum only, and a rank holds gathered keys and values of few heads. Most memory is
saved in FlashAttention's backward pass, which has gradients of keys for every head of the queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qfsdp.data.cut_rows import CutRows
from qfsdp.modules.attention.sinks import attention, attention_backward, gradients
from qfsdp.modules.collectives import GROUPS, reduce_scatter
from qfsdp.tensor_subclasses.dtensor import all_gather
from qfsdp.tensor_subclasses.kernels.custom_op import custom_op

AT_ONCE = 1 << 26  # bytes of keys and values that are gathered at once; of one head, if it has more
T = TypeVar("T")
Pending = Callable[[], Sequence[Tensor]]
"""Waits for what has begun."""


def attend_cut_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    rows: CutRows,
    window: int | None,
    scale: float | None,
    group: str,
) -> Tensor:
    """Causal grouped-query attention within the documents of whole rows. Collective, and so is its
    backward.

    Args:
        q: `[batch, heads, own, head_dim]`, the queries of this rank's part of each row.
        k, v: the same with `kv_heads` heads, a divisor of `heads`.
        sinks: `[heads]`, logits, or None.
        window, scale: as of `attend_documents`.
        group: name of the ranks that share the rows, in `GROUPS`; rank i has part i.

    Returns:
        q's shape and dtype.
    """
    batch, _, own, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    documents = (rows.cu_seqlens, None, None) if rows.prompts is None else rows.prompts[:3]
    how = (batch, rows.part, rows.reach, window, scale, group)
    out = _AttendCutRows.apply(q, k, v, sinks, *documents, *how)
    return out.unflatten(0, (batch, own)).transpose(1, 2)


class _AttendCutRows(torch.autograd.Function):
    """Attention `[tokens, heads, head_dim]`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        cu_seqlens: Tensor,
        cu_keys: Tensor | None,
        sources: Tensor | None,
        batch: int,
        part: int,
        reach: int,
        window: int | None,
        scale: float,
        group: str,
    ) -> Tensor:
        ctx.how = batch, part, reach, window, scale, group
        out, total = _attend(q, k, v, sinks, cu_seqlens, cu_keys, sources, *ctx.how)
        ctx.save_for_backward(q, k, v, sinks, cu_seqlens, out, total, cu_keys, sources)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *gradients(ctx, grad, _attend_backward), *(None,) * 9


@custom_op("qfsdp::attend_cut_rows")
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    cu_keys: Tensor | None,
    sources: Tensor | None,
    batch: int,
    part: int,
    reach: int,
    window: int | None,
    scale: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    """The results of `sinks.attention` for a part's queries. With `cu_keys` and `sources`, those of
    `CutPrompts`, `cu_seqlens` is its `cu_queries`."""
    seen = Reach(batch, len(q) // batch, part, _before(reach, window, cu_keys), group)
    some, of_q = seen.heads_at_once(q, k)
    how, found = seen.how(cu_seqlens, cu_keys), []
    arriving = one_ahead(seen.gather(*own) for own in _split(some, k, v))
    logits = [None] * k.shape[1] if sinks is None else sinks.split(of_q)
    for queries, own_sinks in zip(q.split(of_q, 1), logits, strict=False):
        keys, values = next(arriving)
        if sources is not None:
            keys, values = keys.index_select(0, sources), values.index_select(0, sources)
        found.append(attention(queries, keys, values, own_sinks, *how, window, scale))
        del keys, values  # before others are gathered
    outs, totals = zip(*found, strict=True)
    return _joined(outs, 1), _joined(totals, 0)


@custom_op("qfsdp::attend_cut_rows_backward")
def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    total: Tensor,
    cu_keys: Tensor | None,
    sources: Tensor | None,
    batch: int,
    part: int,
    reach: int,
    window: int | None,
    scale: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of this part, over the queries of all parts."""
    seen = Reach(batch, len(q) // batch, part, _before(reach, window, cu_keys), group)
    some, of_q = seen.heads_at_once(q, k)
    bounds, *how = seen.how(cu_seqlens, cu_keys)
    arriving = one_ahead(seen.gather(*own) for own in _split(some, k, v))
    of_queries = []

    def of_heads(grad: Tensor, q: Tensor, out: Tensor, total: Tensor) -> Pending:
        keys, values = next(arriving)
        shape = keys.shape
        if sources is not None:
            keys, values = keys.index_select(0, sources), values.index_select(0, sources)
        mine, *of_seen = attention_backward(
            grad, q, keys, values, bounds, out, total, *how, window, scale
        )
        of_queries.append(mine)
        del keys, values  # their gradients are as large
        if sources is not None:  # at most two numbers are added up, in any order
            of_seen = [t.new_zeros(shape).index_add_(0, sources, t) for t in of_seen]
        return seen.scatter(*of_seen)

    given = zip(*(t.split(of_q, 1) for t in (grad, q, out)), total.split(of_q), strict=True)
    summed = list(one_ahead(of_heads(*heads) for heads in given))
    of_k, of_v = (_joined(found, 1) for found in zip(*summed, strict=True))
    return _joined(of_queries, 1), of_k, of_v


def _before(reach: int, window: int | None, cu_keys: Tensor | None) -> int:
    """How many tokens before a part its queries see. A prompt may stand in a row farther ahead than
    the window of the answer that shares it."""
    return reach if window is None or cu_keys is not None else min(reach, window - 1)


def one_ahead(begun: Iterable[Callable[[], T]]) -> Iterator[T]:
    """The results of functions that wait for what has begun: each when the next has begun too. Has
    no reference to a result."""
    more, waiting = iter(begun), list[Callable[[], T]]()
    while waiting := [*waiting, *islice(more, 2 - len(waiting))]:
        yield waiting.pop(0)()


def _split(heads: int, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Some heads of each tensor `[tokens, heads, head_dim]` at a time."""
    return zip(*(tensor.split(heads, 1) for tensor in tensors), strict=True)


def _joined(found: tuple[Tensor, ...] | list[Tensor], dim: int) -> Tensor:
    return found[0] if len(found) == 1 else torch.cat(found, dim)


class Reach:
    """The keys that the queries of a part see: some of earlier parts, and its own.

    Args:
        own: tokens of this part in each of `batch` rows.
        before: how many tokens before a part are seen, at most, the same in all parts.

    Fields:
        sent: how many of its last tokens in a row every part sends.
        first: the first part whose tokens are seen.
        keys: how many tokens of a row are seen.
    """

    def __init__(self, batch: int, own: int, part: int, before: int, group: str) -> None:
        self.batch, self.own, self.part, self.group = batch, own, part, GROUPS[group]
        self.parts = self.group.size()
        self.sent = min(own, before)
        self.first = max(0, part - -(-before // own))
        self.keys = own + (part - self.first) * self.sent

    def heads_at_once(self, q: Tensor, k: Tensor) -> tuple[int, int]:
        """How many heads of k, and so of q, go through attention at once: as many on all ranks."""
        one_head = 2 * self.parts * self.batch * self.sent * k.shape[2] * k.itemsize
        some = max(1, min(k.shape[1], AT_ONCE // max(1, one_head)))
        return some, some * q.shape[1] // k.shape[1]

    def gather(self, *own: Tensor) -> Pending:
        """Begins to gather keys and values. Returns a function that waits for those that are seen,
        each `[batch * keys, kv_heads, head_dim]`. Collective."""
        heads = [one.size(1) for one in own]
        both = torch.cat(own, 1).unflatten(0, (self.batch, self.own))
        if not self.sent:
            return lambda: both.flatten(0, 1).split(heads, 1)
        sent = both[:, self.own - self.sent :].contiguous()
        received = sent.new_empty(self.parts, *sent.shape)
        work = all_gather(received.flatten(0, 1), sent, group=self.group, async_op=True)

        def wait() -> Sequence[Tensor]:
            work.wait()
            if self.sent == self.own:  # a view where there is one row
                seen = received[self.first : self.part + 1].transpose(0, 1).flatten(1, 2)
            else:
                before = received[self.first : self.part].transpose(0, 1).flatten(1, 2)
                seen = torch.cat([before, both], 1)
            return seen.flatten(0, 1).split(heads, 1)

        return wait

    def scatter(self, *of_seen: Tensor) -> Pending:
        """Begins to sum the gradients of this part's keys and values over the ranks that see them.
        Returns a function that waits for them. Collective."""
        heads, earlier = [grad.size(1) for grad in of_seen], self.part - self.first
        given = [grad.unflatten(0, (self.batch, -1)) for grad in of_seen]
        mine = torch.cat([grad[:, -self.own :] for grad in given], 2)
        if not self.sent:
            return lambda: [grad.contiguous() for grad in mine.flatten(0, 1).split(heads, 1)]
        shape = (self.parts, self.batch, self.sent, *mine.shape[2:])
        sent = mine.new_zeros(shape)
        for grad, of_heads in zip(given, sent.split(heads, 3), strict=True):
            before = grad[:, : -self.own].unflatten(1, (earlier, self.sent))
            of_heads[self.first : self.part] = before.transpose(0, 1)
        received = mine.new_empty(shape[1:])
        work = reduce_scatter(received, sent.flatten(0, 1), group=self.group, async_op=True)

        def wait() -> Sequence[Tensor]:
            work.wait()
            mine[:, self.own - self.sent :] += received
            return [grad.contiguous() for grad in mine.flatten(0, 1).split(heads, 1)]

        return wait

    def how(self, cu_seqlens: Tensor, cu_keys: Tensor | None) -> tuple[Tensor, Tensor, int, int]:
        """The arguments of `sinks.attention` that say which queries and keys are whose."""
        if cu_keys is not None:
            return cu_seqlens, cu_keys, self.own, self.keys
        width, stop = self.own * self.parts, (self.part + 1) * self.own
        rows = cu_seqlens // width

        def borders(tokens: int) -> Tensor:
            """How many of the last `tokens` before `stop` in each row stand before a border."""
            within = (cu_seqlens - rows * width - (stop - tokens)).clamp(0, tokens)
            return (rows * tokens + within).int()

        return borders(self.own), borders(self.keys), self.own, self.keys


@torch.library.register_fake("qfsdp::attend_cut_rows")
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[1::-1], dtype=exact)


@torch.library.register_fake("qfsdp::attend_cut_rows_backward")
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
