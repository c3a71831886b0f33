"""Rows cut into parts for several ranks: batches, and attention against that of whole rows."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from qfsdp.data.batch import Batch
from qfsdp.data.cut_rows import CutRows, counted_tokens, reach_of, row_borders, used_lengths
from qfsdp.data.loader import collate
from qfsdp.data.preferences.shared_prompts import cut_documents, share_documents
from qfsdp.distributed.context_parallel import share_rows
from qfsdp.modules.attention import cut_rows
from qfsdp.modules.attention import sinks as sink_attention
from qfsdp.modules.attention.cut_rows import attend_cut_rows
from qfsdp.modules.attention.document_lengths import document_lengths
from qfsdp.modules.attention.documents import attend_documents
from qfsdp.modules.attention.shared_prompts import attend_shared
from qfsdp.modules.attention.sinks import attend_with_sinks
from qfsdp.modules.collectives import GROUPS
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.transformer import Decoder
from tests.models import cpu_world
from tests.modules.test_sink_attention import flash_backward, flash_forward
from tests.ranks import run_ranks
from tests.tiny import TINY_CONFIG

PARTS, ROWS, WIDTH = 3, 2, 24
# Documents of two rows: cut by one border, by both, by none; empty ones; one that ends at a border.
ENDS = torch.tensor([0, 5, 5, 20, 24, 32, 35, 48, 48, 48], dtype=torch.int32)
# Documents that begin at most 6 tokens before a part.
SHORT = torch.tensor([0, 5, 10, 14, 19, 24, 31, 34, 42, 48], dtype=torch.int32)
# A part has 8 tokens: windows that hide all others, are shorter, as long, longer, and unlimited.
WINDOWS = (1, 4, 9, 10, 19, None)


def tensors() -> list[Tensor]:
    """q, k, v, sinks, and a gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, n, WIDTH, 16) for n in (6, 3, 3)] + [(6,), (ROWS, 6, WIDTH, 16)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def whole_rows(ends: Tensor, window: int | None, has_sinks: bool) -> list[Tensor]:
    """The result and the gradients of q, k, v and, if it has some, the sinks."""
    *given, grad = tensors()
    q, k, v, sinks = (t.requires_grad_() for t in given)
    if has_sinks:
        y = attend_with_sinks(q, k, v, sinks, ends, WIDTH, window)
    else:
        y = attend_documents(q, k, v, ends, WIDTH, window)
    wanted = [q, k, v, sinks] if has_sinks else [q, k, v]
    return [y.detach(), *torch.autograd.grad(y, wanted, grad)]


Cases = list[tuple[Tensor, int | None, bool]]


def own_parts(cases: Cases, pairs: bool = False, at_once: int | None = None) -> list[list[Tensor]]:
    """The same of this rank's part. With `at_once`, as many heads as have these bytes at a time."""
    cut_rows.AT_ONCE, group = at_once or cut_rows.AT_ONCE, dist.group.WORLD
    assert group is not None
    GROUPS[group.group_name] = group
    part, found = dist.get_rank(), []
    for ends, window, has_sinks in cases:
        *qkv, sinks, grad = tensors()
        q, k, v = (t.chunk(PARTS, 2)[part].clone().requires_grad_() for t in qkv)
        given = sinks.requires_grad_() if has_sinks else None
        lengths = torch.full((ROWS,), WIDTH)
        reach = WIDTH if pairs else reach_of(ends, lengths, WIDTH, PARTS)
        rows = CutRows(ends, lengths, part, PARTS, reach)
        if pairs:
            documents = share_documents(LENGTHS, SHARED)
            rows = rows._replace(prompts=cut_documents(documents, ROWS, WIDTH, part, PARTS))
        y = attend_cut_rows(q, k, v, given, rows, window, None, group.group_name)
        wanted = [q, k, v, sinks] if has_sinks else [q, k, v]
        grads = torch.autograd.grad(y, wanted, grad.chunk(PARTS, 2)[part])
        found.append([y.detach(), *grads])
    return found


def own_parts_as_on_gpus(cases: Cases, pairs: bool = False) -> list[list[Tensor]]:
    """By formulas in place of FlashAttention's kernels."""
    sink_attention.has_kernel = lambda q: True
    torch.ops.aten._flash_attention_forward = flash_forward
    torch.ops.aten._flash_attention_backward = flash_backward
    return own_parts(cases, pairs)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("compute", [own_parts, own_parts_as_on_gpus])
def test_attention_of_parts_is_that_of_whole_rows(compute: Any, pairs: bool) -> None:
    """Documents, and pairs whose prompts stand once."""
    cases = list(product((ENDS,) if pairs else (ENDS, SHORT), WINDOWS, (False, True)))
    by_rank = run_ranks(PARTS, compute, cases, pairs)
    for at, case in enumerate(cases):
        expected = whole_pairs(*case[1:]) if pairs else whole_rows(*case)
        of_parts = list(zip(*(found[at] for found in by_rank), strict=True))
        found = [torch.cat(parts, 2) for parts in of_parts[:4]]
        found += [torch.stack(parts).sum(0) for parts in of_parts[4:]]  # of sinks
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine - theirs).abs().max() < 1e-12, case


# Bytes of one head in fp64: keys and values of both rows.
ONE_HEAD = 2 * ROWS * WIDTH * 16 * 8


def test_some_heads_at_a_time_compute_the_same_bits() -> None:
    """One head, and two of three, as they are in long rows."""
    cases = list(product((ENDS,), (9, None), (False, True)))
    for pairs in (False, True):
        whole = run_ranks(PARTS, own_parts, cases, pairs)
        for heads in (1, 2):
            found = run_ranks(PARTS, own_parts, cases, pairs, heads * ONE_HEAD)
            for mine, theirs in zip(found, whole, strict=True):
                for one, other in zip(sum(mine, []), sum(theirs, []), strict=True):
                    assert one.equal(other)


def calls_of_long_rows() -> tuple[list[str], list[str]]:
    """What forward and backward do, in order, one head at a time."""
    calls: list[str] = []

    def noted(name: str, of: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            work = of(*args, **kwargs)
            return Waited(work, f"{name} ends", calls) if kwargs.get("async_op") else work

        return run

    for name in ("all_gather", "reduce_scatter", "attention", "attention_backward"):
        setattr(cut_rows, name, noted(name, getattr(cut_rows, name)))
    own_parts([(ENDS, None, False)], at_once=1)
    backward = calls.index("attention_backward") - 3
    return calls[:backward], calls[backward:]


class Waited:
    def __init__(self, work: Any, name: str, calls: list[str]) -> None:
        self.work, self.name, self.calls = work, name, calls

    def wait(self) -> None:
        self.calls.append(self.name)
        self.work.wait()


def test_the_exchange_of_the_next_heads_runs_behind_products() -> None:
    """The next heads are on their way when products begin, and gradients of keys are summed while
    the products of the next heads run."""
    forward, backward = run_ranks(PARTS, calls_of_long_rows)[0]
    first, both = "all_gather", ["all_gather ends", "attention"]
    assert forward == [first, first, *both, first, *both, *both]
    products, summed = ["all_gather ends", "attention_backward"], "reduce_scatter"
    assert backward == [
        *(first, first, *products, summed),
        *(first, *products, summed, "reduce_scatter ends"),
        *(*products, summed, "reduce_scatter ends", "reduce_scatter ends"),
    ]


# Two pairs and padding; one pair, whose prompt is cut twice, and padding.
LENGTHS, SHARED = [7, 3, 9, 2, 3, 18, 5, 1], [0, 4, 0, 8, 0, 0, 15, 0]


def whole_pairs(window: int | None, has_sinks: bool) -> list[Tensor]:
    *given, grad = tensors()
    q, k, v, sinks = (t.requires_grad_() for t in given)
    documents = share_documents(LENGTHS, SHARED)
    y = attend_shared(q, k, v, sinks if has_sinks else None, documents, WIDTH, window)
    wanted = [q, k, v, sinks] if has_sinks else [q, k, v]
    return [y.detach(), *torch.autograd.grad(y, wanted, grad)]


def batch_of_rows() -> Batch:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(0, 577, (n,), generator=generator) for n in (23, 5)]
    return collate([{"tokens": row, "labels": row} for row in rows], pad_id=0, parts=PARTS)


def loss_of(part: int | None) -> tuple[Tensor, dict[str, Tensor], int]:
    """The summed loss of a batch or of a part of it, gradients, and bytes that autograd keeps."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.from_dict(TINY_CONFIG)).double()
    model.lm_head.weight.requires_grad_(False)  # the loss keeps its gradient
    batch, kept = batch_of_rows(), dict[int, int]()
    if part is not None:
        batch = batch.cut(part, PARTS)
        share_rows(model, PARTS, cpu_world())
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(batch.tokens, batch.positions, None, batch.labels, batch.cu_seqlens)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads, sum(kept.values())


def loss_of_own_part() -> tuple[Tensor, dict[str, Tensor], int]:
    return loss_of(dist.get_rank())


def test_losses_and_gradients_of_parts_add_up() -> None:
    """No factor is needed: the loss is a sum over ranks. Each keeps a third for backward. The
    second row's last part has padding alone."""
    loss, grads, kept = loss_of(None)
    by_rank = run_ranks(PARTS, loss_of_own_part)
    assert torch.stack([one[0] for one in by_rank]).sum().item() == pytest.approx(loss.item())
    for name, grad in grads.items():
        summed = torch.stack([one[1][name] for one in by_rank]).sum(0)
        # The loss is computed in fp32.
        assert (summed - grad).abs().max() < 1e-6 * max(1.0, grad.abs().max().item()), name
    assert max(one[2] for one in by_rank) < 1.1 * kept / PARTS


def test_whole_rows_are_refused() -> None:
    model = Decoder(DecoderConfig.from_dict(TINY_CONFIG))
    model.group, batch = "some ranks", batch_of_rows()
    with pytest.raises(ValueError, match="sharding.context_parallel: whole rows"):
        model(batch.tokens, labels=batch.labels)


def test_parts_of_a_batch() -> None:
    """Labels are shifted before the cut; nothing is lost; all parts know the row's last target."""
    samples = [{"tokens": list(range(1, 8)), "labels": [-100, 2, 3, -100, 5, -100, -100]}]
    samples += [{"tokens": [9, 9], "labels": [-100, -100]}]
    whole = collate(samples, pad_id=0, parts=3)
    assert whole.tokens.shape == (2, 9)
    parts = [whole.cut(part, 3) for part in range(3)]
    assert torch.cat([part.tokens for part in parts], 1).equal(whole.tokens)
    assert torch.cat([part.labels for part in parts], 1).equal(whole.labels)
    assert parts[0].labels.tolist() == [[2, 3, -100], [-100] * 3]
    assert parts[1].positions is not None and parts[1].positions.tolist() == [[3, 4, 5]] * 2
    assert sum(part.num_tokens for part in parts) == whole.num_tokens
    for counted in (parts, [whole.to("cpu").cut(part, 3) for part in range(3)]):
        assert sum(part.num_targets for part in counted) == whole.num_targets
    tokens = [counted_tokens(part.labels, cut_of(part)) for part in parts]
    assert torch.cat(tokens, 1).equal(counted_tokens(whole.labels))
    assert used_lengths(whole.labels).tolist() == [5, 0]
    assert cut_of(parts[0]).cu_seqlens[:6].tolist() == [0, 5, 9, 9, 18, 18]


def test_how_far_documents_reach() -> None:
    """Before any part; padding, after a row's last target, reaches nothing."""
    whole = torch.tensor([WIDTH, WIDTH])
    assert reach_of(ENDS, whole, WIDTH, PARTS) == 11  # from token 16 back to 5
    assert reach_of(SHORT, whole, WIDTH, PARTS) == 6
    assert reach_of(SHORT, torch.tensor([WIDTH, 10]), WIDTH, PARTS) == 3
    assert reach_of(row_borders(whole, WIDTH), whole, WIDTH, PARTS) == 16
    assert reach_of(row_borders(torch.tensor([4, 0]), WIDTH), torch.zeros(2), WIDTH, PARTS) == 2


def test_lengths_of_documents() -> None:
    """What rotary embeddings by length ask for: those of whole documents."""
    packs = [{"tokens": [1] * 9, "labels": [1] * 9, "lengths": [4, 5]}]
    for samples, most in ((packs, 12), ([{"tokens": [1] * 7, "labels": [1] * 7}], None)):
        whole = collate(samples, pad_id=0, max_seq_len=most, parts=PARTS)
        positions = torch.arange(whole.tokens.size(1)) if most is None else whole.positions
        assert positions is not None
        positions = positions.view(1, -1)
        lengths = document_lengths(positions, whole.labels, whole.cu_seqlens)
        found = []
        for part in (whole.cut(part, PARTS) for part in range(PARTS)):
            assert part.positions is not None
            found.append(document_lengths(part.positions, part.labels, part.cu_seqlens))
        counted = counted_tokens(whole.labels)
        assert torch.cat(found, 1)[counted].equal(lengths.expand(1, whole.tokens.size(1))[counted])


def cut_of(batch: Batch) -> CutRows:
    assert isinstance(batch.cu_seqlens, CutRows)
    return batch.cu_seqlens
