"""Packed rows on an accelerator: `varlen_attn` against one document at a time, and whole models;
flash-linear-attention where it is installed. `make test-gpu`; needs torch, safetensors and pytest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import load_base
from qfsdp.data.batch import Batch
from qfsdp.data.loader import collate
from qfsdp.data.packing import PackedDataset
from qfsdp.data.preferences.shared_prompts import SharedDocuments, share_documents
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import init_adapters
from qfsdp.modules.attention import documents as document_attention
from qfsdp.modules.attention.documents import attend_documents
from qfsdp.modules.attention.shared_prompts import attend_shared
from qfsdp.modules.attention.sinks import attend_with_sinks, attention, attention_backward
from qfsdp.modules.delta_kernel import delta_kernel, in_one_row
from qfsdp.modules.gated_delta_rule import gated_delta_rule
from qfsdp.modules.low_rank.linear import refresh_dora_norms
from qfsdp.modules.transformer import Decoder
from tests.models import build_meta_model
from tests.on_gpu import GPU, needs_gpu
from tests.tiny import needs_compiler, write_tiny_model

pytestmark = needs_gpu
SEQ, ENDS = 512, [0, 1, 300, 300, 512, 900, 1024, 1536, 1536, 1536]  # three rows


def heads(dtype: torch.dtype, kv_heads: int, head_dim: int) -> list[Tensor]:
    """Random q, k, v and a gradient of the result."""
    generator = torch.Generator(GPU).manual_seed(0)
    return [
        torch.randn(3, n, SEQ, head_dim, generator=generator, device=GPU).to(dtype)
        for n in (8, kv_heads, kv_heads, 8)
    ]


def document_by_document(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The same in plain fp32 products, with autograd."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (t.transpose(1, 2).flatten(0, 1).transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(groups, dim=0) for t in (k, v))
    parts = []
    for start, end in zip(ENDS, ENDS[1:], strict=False):
        part = slice(start, end)
        seen = torch.ones(end - start, end - start, dtype=torch.bool, device=GPU).tril()
        if window is not None:
            seen = seen.triu(1 - window)
        scores = q[:, part] @ k[:, part].mT * q.shape[-1] ** -0.5
        parts.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, part])
    return torch.cat(parts, dim=1).transpose(0, 1).unflatten(0, (3, SEQ)).transpose(1, 2)


def with_gradients(given: list[Tensor], window: int | None, exact: bool) -> list[Tensor]:
    q, k, v = (t.detach().clone().requires_grad_() for t in given[:3])
    if exact:
        out = document_by_document(q, k, v, window)
    else:
        ends = torch.tensor(ENDS, dtype=torch.int32, device=GPU)
        out = attend_documents(q, k, v, ends, SEQ, window)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v], given[3])]


def check(dtype: torch.dtype, kv_heads: int, head_dim: int, window: int | None) -> None:
    given = heads(dtype, kv_heads, head_dim)
    found = with_gradients(given, window, exact=False)
    expected = with_gradients([t.float() for t in given], window, exact=True)
    bound = 1e-5 if dtype == torch.float32 else 0.02  # bf16 has 8 bits
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype and mine.shape == theirs.shape
        assert (mine.float() - theirs).norm() < bound * theirs.norm()


@pytest.fixture
def full_fp32() -> None:
    """Turns TF32 off, which has 10 bits; an environment may have turned it on."""
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("full_fp32")
@pytest.mark.parametrize("window", [None, 2, 64, 10_000])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 64), (2, 64), (2, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equals_one_document_at_a_time(
    dtype: torch.dtype, kv_heads: int, head_dim: int, window: int | None
) -> None:
    check(dtype, kv_heads, head_dim, window)


@pytest.mark.usefixtures("full_fp32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 64])
def test_the_last_queries_of_documents(window: int | None, dtype: torch.dtype) -> None:
    """As of a part of cut rows: some documents have keys and no queries, one has its last queries.
    Keys without queries get gradients of zero."""
    first, given = 1000, heads(dtype, 2, 64)
    q, k, v, grad = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in given)
    grad[:first] = 0
    given[3] = grad.unflatten(0, (3, SEQ)).transpose(1, 2)
    y, *wanted = with_gradients([t.float() for t in given], window, exact=True)
    y, of_q, of_k, of_v = (t.transpose(1, 2).flatten(0, 1) for t in (y, *wanted))
    keys = torch.tensor(ENDS, dtype=torch.int32, device=GPU)
    queries = (keys - first).clamp(min=0)
    how = (keys, len(q) - first, SEQ, window, 64**-0.5)
    out, total = attention(q[first:], k, v, None, queries, *how)
    grads = attention_backward(grad[first:], q[first:], k, v, queries, out, total, *how)
    bound = 1e-5 if dtype == torch.float32 else 0.02
    for mine, theirs in zip((out, *grads), (y[first:], of_q[first:], of_k, of_v), strict=True):
        assert (mine.float() - theirs).norm() < bound * theirs.norm()
    assert not grads[1][:900].any() and not grads[2][:900].any()


@pytest.mark.usefixtures("full_fp32")
@pytest.mark.parametrize("window", [None, 64])
def test_without_varlen(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs older than FlashAttention's kernel need this."""
    monkeypatch.setattr(document_attention, "has_varlen", lambda head_dim: False)
    check(torch.bfloat16, 2, 64, window)


@pytest.mark.usefixtures("full_fp32")
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sinks(dtype: torch.dtype, window: int | None) -> None:
    """FlashAttention's kernels, and formulas for blocks of queries, against those in fp64."""
    sinks = torch.randn(8, generator=torch.Generator(GPU).manual_seed(1), device=GPU).to(dtype)
    given, results = [*heads(dtype, 2, 64), sinks], []
    for made in (given, [t.double() for t in given]):
        q, k, v, grad, logits = (t.detach().requires_grad_() for t in made)
        ends = torch.tensor(ENDS, dtype=torch.int32, device=GPU)
        out = attend_with_sinks(q, k, v, logits, ends, SEQ, window)
        results.append([out, *torch.autograd.grad(out, [q, k, v, logits], grad)])
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == dtype and mine.shape == theirs.shape
        assert (mine - theirs).norm() < (1e-5 if dtype == torch.float32 else 0.02) * theirs.norm()


@pytest.mark.usefixtures("full_fp32")
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prompts_that_stand_once(dtype: torch.dtype, window: int | None, with_sinks: bool) -> None:
    """Of pairs in three rows, against fp64, whose documents go one after the other."""
    documents = share_documents([300, 150, 62, 400, 100, 12, 512], [0, 250, 0, 0, 399, 0, 0])
    documents = SharedDocuments(*(t.to(GPU) for t in documents))
    given, results = [*heads(dtype, 2, 64), torch.linspace(-2, 2, 8, device=GPU).to(dtype)], []
    for made in (given, [t.double() for t in given]):
        q, k, v, grad, logits = (t.detach().requires_grad_() for t in made)
        inputs = [q, k, v, logits] if with_sinks else [q, k, v]
        out = attend_shared(q, k, v, logits if with_sinks else None, documents, SEQ, window)
        results.append([out, *torch.autograd.grad(out, inputs, grad)])
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == dtype and mine.shape == theirs.shape
        assert (mine - theirs).norm() < (1e-5 if dtype == torch.float32 else 0.02) * theirs.norm()


def padded_and_packed() -> tuple[Batch, Batch]:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(8, 100, (20,), generator=generator).tolist()
    tokens = [torch.randint(1, 577, (size,), generator=generator) for size in sizes]
    rows = [{"tokens": t, "labels": t} for t in tokens]
    packed = PackedDataset(rows, 256, seed=0)
    packs = [packed[n] for n in range(len(packed))]
    return (
        collate(rows, pad_id=0, max_seq_len=256).to(GPU),
        collate(packs, pad_id=0, max_seq_len=256, min_rows=len(packs) + 1).to(GPU),
    )


def load(folder: Path, dtype: str) -> Decoder:
    model = build_meta_model(folder, adapter=AdapterConfig("dora", rank=4), dtype=dtype)
    load_base(model, ModelWeights(folder), GPU)
    init_adapters(model, seed=0)
    torch.manual_seed(7)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.03)
    refresh_dora_norms(model)
    return model


def loss_and_gradients(model: Decoder, batch: Batch) -> tuple[float, list[Tensor]]:
    trained = [param for param in model.parameters() if param.requires_grad]
    loss = model(batch.tokens, batch.positions, labels=batch.labels, cu_seqlens=batch.cu_seqlens)
    loss = loss / batch.num_targets
    return loss.item(), list(torch.autograd.grad(loss, trained))


@needs_compiler
@pytest.mark.usefixtures("full_fp32")
@pytest.mark.parametrize(
    ("dtype", "of_loss", "of_gradients"), [("fp32", 1e-5, 1e-4), ("bf16", 0.01, 0.1)]
)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("window", [None, 16])
def test_packed_loss_and_gradients_are_those_of_padded_rows(
    dtype: str,
    of_loss: float,
    of_gradients: float,
    checkpointing: str,
    compiled: bool,
    window: int | None,
    tmp_path: Path,
) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": window} if window else {}
    folder = write_tiny_model(tmp_path, **changes)
    padded, packed = padded_and_packed()
    expected, expected_gradients = loss_and_gradients(load(folder, dtype), padded)
    model = load(folder, dtype)
    model.set_activations(ActivationConfig(checkpointing))  # type: ignore[arg-type]
    if compiled:
        torch._dynamo.reset()
        for layer in model.model.layers:
            layer.block = torch.compile(layer.block, fullgraph=True)
    loss, gradients = loss_and_gradients(model, packed)
    assert loss == pytest.approx(expected, rel=of_loss)
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        assert (mine - theirs).norm() < of_gradients * theirs.norm()


@pytest.mark.parametrize("packed", [False, True])
def test_flash_linear_attention_computes_the_gated_delta_rule(packed: bool) -> None:
    """Its kernels, which uncompiled layers call where it is installed, against ours in fp32."""
    pytest.importorskip("fla")
    generator = torch.Generator(GPU).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(3, SEQ, *shape, generator=generator, device=GPU)

    parts = [drawn(2, 64), drawn(2, 64), drawn(4, 128)]  # two value heads of each key head
    steps = [-torch.rand_like(drawn(4)), torch.rand_like(drawn(4))]
    ends = torch.tensor(ENDS, dtype=torch.int32, device=GPU) if packed else None
    tokens = torch.arange(3 * SEQ, device=GPU)
    documents = None if ends is None else torch.bucketize(tokens, ends, right=True).view(3, SEQ)
    weights = drawn(4, 128)

    def result(rule: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        given = [part.to(torch.bfloat16).to(dtype) for part in parts] + steps
        given = [part.detach().requires_grad_() for part in given]
        found = rule(*given)
        return [found.detach(), *torch.autograd.grad(found, given, weights.to(found.dtype))]

    def theirs(*given: Tensor) -> Tensor:
        kernel = delta_kernel(given[2])
        assert kernel is not None
        return in_one_row(kernel, given, ends, use_qk_l2norm_in_kernel=True)[0]

    def ours(*given: Tensor) -> Tensor:
        query, key, value, decay, step = given
        return gated_delta_rule(query, key, value, decay, step, documents)[0]

    expected = result(ours, torch.float32)
    for mine, other in zip(result(theirs, torch.bfloat16), expected, strict=True):
        assert (mine.float() - other).norm() < 0.03 * other.norm()
