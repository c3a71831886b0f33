"""The gated delta rule and the short convolution: documents of a row apart, and as transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from qfsdp.data.cut_rows import CutRows
from qfsdp.modules.collectives import GROUPS
from qfsdp.modules.gated_delta_rule import gated_delta_rule, state_space
from qfsdp.modules.hub_models.documents import OURS
from qfsdp.modules.shared_rows import SharedRows, with_tokens_before
from qfsdp.modules.short_convolution import short_convolution
from tests.ranks import run_ranks

# Of two rows. A chunk has 64 tokens: documents end at its edges, next to them, and within.
LENGTHS = [[1, 63, 1, 2, 61, 130, 1, 3, 200, 64], [200, 64, 128, 3, 65, 66]]
DOCUMENTS = torch.stack(
    [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS]
)


def _inputs(tokens: int, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values, decays from weak to strong, and steps, of two rows."""
    torch.manual_seed(seed)
    sizes = [(2, 16), (2, 16), (4, 24), (4,), (4,)]
    query, key, value, decay, step = (torch.randn(2, tokens, *size) for size in sizes)
    strengths = torch.tensor([0.01, 0.1, 1.0, 5.0])
    found = [query, key, value, -strengths * F.softplus(decay), step.sigmoid()]
    return [part.requires_grad_() for part in found]


def _apart(compute: Callable[..., Tensor], inputs: list[Tensor]) -> Tensor:
    """The results of each document alone."""
    rows = [
        torch.cat([compute(*part) for part in zip(*split, strict=True)], 1)
        for row, lengths in enumerate(LENGTHS)
        for split in [[one[row : row + 1].split(lengths, 1) for one in inputs]]
    ]
    return torch.cat(rows)


def _check_same(found: Tensor, expected: Tensor, inputs: list[Tensor], bound: float) -> None:
    """Results and gradients, relative to the largest."""
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    pairs = [(found, expected)]
    given = [
        torch.autograd.grad((one * weights).sum(), inputs, retain_graph=True)
        for one in (found, expected)
    ]
    for ours, other in pairs + list(zip(*given, strict=True)):
        assert (ours - other).abs().max() <= bound * other.abs().max()


def test_documents_of_a_row_do_not_read_each_other() -> None:
    inputs = _inputs(sum(LENGTHS[0]))
    packed = gated_delta_rule(*inputs, documents=DOCUMENTS)[0]
    alone = _apart(lambda *part: gated_delta_rule(*part)[0], inputs)
    _check_same(packed, alone, inputs, 1e-6)
    assert (gated_delta_rule(*inputs)[0] - alone).abs().max() > 0.01 * alone.abs().max()


@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_one_document_as_transformers(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the state, from which a second part goes on; strong decays lose no digits."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    inputs = _inputs(tokens)
    more: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected, state = theirs.torch_chunk_gated_delta_rule(*inputs, **more)
    found, ours = gated_delta_rule(*inputs)
    _check_same(found, expected, inputs, 1e-5)
    torch.testing.assert_close(ours, state, rtol=1e-5, atol=1e-6)
    if tokens > 1:
        first, then = zip(*(part.split([tokens - 40, 40], 1) for part in inputs), strict=True)
        begun, between = gated_delta_rule(*first)
        rest, last = gated_delta_rule(*then, state=between)
        _check_same(torch.cat([begun, rest], 1), expected, inputs, 1e-5)
        torch.testing.assert_close(last, state, rtol=1e-5, atol=1e-6)


def test_state_space_of_documents_as_transformers() -> None:
    """Each document alone through the scan of Mamba-2, with its step and its residual."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    query, key, value, step, _ = _inputs(sum(LENGTHS[0]))
    rate, bias, kept = -torch.tensor([0.01, 0.1, 1.0, 5.0]), torch.randn(4), torch.randn(4)
    more: dict[str, Any] = {"D": kept, "dt_bias": bias, "dt_softplus": True, "chunk_size": 32}

    def scan(way: Callable[..., Tensor], *parts: Tensor, **of_row: Any) -> Tensor:
        query, key, value, step = parts
        return way(value, step, rate, key, query, **more, **of_row)

    inputs = [query, key, value, step]
    ours = partial(OURS["mamba2_chunk_scan"], mamba2_chunk_scan)
    packed = scan(ours, *inputs, seq_idx=DOCUMENTS)
    _check_same(packed, _apart(partial(scan, mamba2_chunk_scan), inputs), inputs, 1e-5)
    whole = scan(mamba2_chunk_scan, *inputs, return_final_states=True)
    torch.testing.assert_close(
        scan(ours, *inputs, return_final_states=True), whole, rtol=1e-4, atol=1e-4
    )


def test_kimis_rule_is_called_for_each_document() -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    query, key, value, _, step = _inputs(sum(LENGTHS[0]))
    query, key = (part.repeat_interleave(2, 2) for part in (query, key))
    inputs = [query, key, value, -torch.rand(query.shape), step]

    def theirs(*parts: Tensor) -> Tensor:
        *given, decay, step = parts
        found: Tensor = chunk_kimi_delta_attention(*given, g=decay, beta=step)[0]
        return found

    ours = OURS["chunk_kimi_delta_attention"]
    found, _ = ours(
        chunk_kimi_delta_attention, *inputs[:3], g=inputs[3], beta=step, seq_idx=DOCUMENTS
    )
    assert torch.equal(found, _apart(theirs, inputs))


# ---- rows that ranks share -----------------------------------------------------------------------

PARTS = 3
# Borders of documents in two rows of 528 tokens, 176 for each part.
ROWS = torch.tensor([0, 1, 64, 65, 67, 300, 301, 528, 528, 700, 764, 1056], dtype=torch.int32)


def _layers(inputs: list[Tensor], documents: Any, shared: SharedRows | None) -> list[Tensor]:
    """Results of each function and gradients of its inputs, for the loss of all tokens."""
    query, key, value, decay, step = inputs
    mixed = torch.cat([query.flatten(2), value.flatten(2)], 2)
    taps = torch.linspace(-1, 1, mixed.shape[2] * 4).view(-1, 4).requires_grad_()
    if shared is None:
        smooth = short_convolution(mixed, taps, None, documents)
    else:
        own = mixed.shape[1]
        wide, documents = with_tokens_before(mixed, 3, shared)
        smooth = short_convolution(wide, taps, None, documents)[:, -own:]
        documents = None
    delta = gated_delta_rule(*inputs, documents, None, shared)[0]
    space = state_space(query, key, value, decay, documents, None, shared)[0]
    found = [smooth, delta, space]
    weights = _weights(smooth.shape[2], shared)
    loss = sum((y.flatten(2) * weights[:, :, : y.shape[2:].numel()]).sum() for y in found)
    grads = torch.autograd.grad(cast(Tensor, loss), [*inputs, taps])
    return [*(y.detach() for y in found), *grads]


def _weights(width: int, shared: SharedRows | None) -> Tensor:
    found = torch.randn(2, 528, width, generator=torch.Generator().manual_seed(3))
    return found if shared is None else found.chunk(PARTS, 1)[shared.rows.part]


def _own_parts() -> list[Tensor]:
    group = dist.group.WORLD
    assert group is not None
    GROUPS[group.group_name] = group
    rows = CutRows(ROWS, torch.zeros(2, dtype=torch.int64), dist.get_rank(), PARTS, 528)
    own = (part.detach().chunk(PARTS, 1)[dist.get_rank()] for part in _inputs(528))
    shared = SharedRows(rows, group.group_name)
    return _layers([part.clone().requires_grad_() for part in own], None, shared)


def test_parts_of_rows_are_those_of_whole_rows() -> None:
    """A document is cut by both borders; chunks of 64 tokens do not end where parts do."""
    tokens = torch.arange(1056, dtype=torch.int32).view(2, 528)
    whole = _layers(_inputs(528), torch.searchsorted(ROWS, tokens, right=True), None)
    by_rank = run_ranks(PARTS, _own_parts)
    for at, expected in enumerate(whole):
        parts = [found[at] for found in by_rank]
        found = torch.cat(parts, 1) if expected.dim() > 2 else torch.stack(parts).sum(0)
        assert (found - expected).abs().max() <= 2e-6 * expected.abs().max(), at


@pytest.mark.parametrize("taps", [1, 3, 4])
def test_convolution_of_documents(taps: int) -> None:
    values = torch.randn(2, sum(LENGTHS[0]), 8, requires_grad=True)
    weight, bias = (torch.randn(8, *size, requires_grad=True) for size in ((taps,), ()))

    def alone(part: Tensor) -> Tensor:
        found = F.conv1d(part.mT, weight.unsqueeze(1), bias, padding=taps - 1, groups=8)
        return found[..., : part.shape[1]].mT

    packed = short_convolution(values, weight, bias, DOCUMENTS)
    _check_same(packed, _apart(alone, [values]), [values, weight, bias], 1e-6)
    whole = short_convolution(values, weight, bias)
    _check_same(whole, alone(values), [values, weight, bias], 1e-6)


def test_sums_of_bf16_are_rounded_once() -> None:
    """Queries, values and taps in bf16: the results are those of fp32, rounded."""
    given = [part.detach().bfloat16() for part in _inputs(70)]
    exact = gated_delta_rule(*(part.float() for part in given), documents=DOCUMENTS[:, :70])[0]
    found = gated_delta_rule(*given, documents=DOCUMENTS[:, :70])[0]
    assert torch.equal(found, exact.bfloat16())
    values, weight = given[3], torch.randn(4, 4).bfloat16()
    exact = short_convolution(values.float(), weight.float())
    assert torch.equal(short_convolution(values, weight), exact.bfloat16())


@pytest.mark.long
def test_compiled_without_a_break() -> None:
    inputs = _inputs(150)

    def both(*parts: Tensor) -> Tensor:
        query, *rest = parts
        smooth = short_convolution(query.flatten(2), torch.ones(32, 4), None, DOCUMENTS[:, :150])
        return gated_delta_rule(smooth.view_as(query), *rest, documents=DOCUMENTS[:, :150])[0]

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    _check_same(compiled(*inputs), both(*inputs), inputs, 1e-6)
