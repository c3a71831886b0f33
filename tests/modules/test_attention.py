"""Attention within documents: against a mask, and whole models on packed against padded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qfsdp.data.batch import Batch
from qfsdp.data.loader import collate
from qfsdp.data.packing import PackedDataset
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.attention import documents as document_attention
from qfsdp.modules.attention.documents import attend_documents
from qfsdp.modules.attention.self_attention import attend
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.transformer import Decoder
from tests.models import adapted_model, randomize_adapters
from tests.tiny import needs_compiler, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")
SEQ, MAX_SEQ_LEN = 40, 64
ENDS = [0, 13, 40, 40, 41, 60, 80, 85, 120, 120, 120]  # three rows, some documents empty
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral-window": {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
    "qwen2-window": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
}


# ---- the operation -----------------------------------------------------------------------------


def heads(*, heads: int = 6, kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and a gradient of the result, of three rows."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, n, SEQ, 16, generator=generator, dtype=dtype).requires_grad_(n_th < 3)
        for n_th, n in enumerate((heads, kv_heads, kv_heads, heads))
    ]


def cu_seqlens(device: str = "cpu") -> Tensor:
    return torch.tensor(ENDS, dtype=torch.int32, device=device)


def masked(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The expected result, by a mask over whole rows."""
    document = torch.searchsorted(cu_seqlens(), torch.arange(3 * SEQ), right=True).view(3, SEQ)
    mask = (document[:, :, None] == document[:, None]).tril()
    return attend(q, k, v, (mask if window is None else mask.triu(1 - window)).unsqueeze(1))


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.06)]
)
def test_equals_a_mask(window: int | None, kv_heads: int, dtype: torch.dtype, bound: float) -> None:
    q, k, v, grad = heads(kv_heads=kv_heads, dtype=dtype)
    found = attend_documents(q, k, v, cu_seqlens(), SEQ, window)
    assert found.shape == q.shape and found.dtype == dtype
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = masked(*exact, window)
    gradients = torch.autograd.grad(found, [q, k, v], grad)
    expected_gradients = torch.autograd.grad(expected, exact, grad.double())
    for mine, theirs in zip((found, *gradients), (expected, *expected_gradients), strict=True):
        assert (mine - theirs).abs().max() < bound * max(1.0, theirs.abs().max().item())


def test_operator_contract() -> None:
    """Fake results and strides of the custom ops, as torch.compile relies on them."""
    q, k, v, grad = (t.detach().transpose(1, 2).flatten(0, 1).contiguous() for t in heads())
    for window in (None, 7):
        given = (q, k, v, cu_seqlens(), window)
        torch.library.opcheck(document_attention.attend_each, given)
        torch.library.opcheck(document_attention.attend_each_backward, (grad, *given))


def test_keeps_only_its_inputs() -> None:
    q, k, v, _ = heads(dtype=torch.float32)
    kept: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        out = attend_documents(q, k, v, cu_seqlens(), SEQ)
    assert out.shape == q.shape
    assert sum(kept.values()) == sum(t.nbytes for t in (q, k, v)) + len(ENDS) * 4


def test_a_long_row_of_short_documents() -> None:
    """The whole row has 2^34 scores, its documents have 2^22."""
    q = torch.randn(1, 1, 1 << 17, 8, requires_grad=True)
    ends = torch.arange(0, (1 << 17) + 1, 32, dtype=torch.int32)
    out = attend_documents(q, q, q, ends, 1 << 17)
    out.sum().backward()
    rows = q.detach().view(-1, 1, 32, 8)
    assert torch.allclose(out.view(rows.shape), attend(rows, rows, rows, None), atol=1e-6)


def test_documents_must_cover_the_tokens() -> None:
    q, k, v, _ = heads()
    for wrong in ([0, 119], [1, 120]):
        with pytest.raises(ValueError, match=r"cu_seqlens: \d+ to \d+; expected 0 to 120"):
            attend_documents(q, k, v, torch.tensor(wrong, dtype=torch.int32), SEQ)


def stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """`varlen_attn` as torch 2.13 has it, by a mask over all tokens."""
    assert max_q == max_k == SEQ and (enable_gqa or query.shape[1] == key.shape[1])
    at = torch.arange(len(query))
    document = torch.searchsorted(cu_seq_q, at, right=True)
    ahead = at - at[:, None]
    mask = (document[:, None] == document) & (ahead <= window_size[1])
    mask &= (ahead >= -window_size[0]) | (window_size[0] < 0)
    out = attend(*(t.transpose(0, 1)[None] for t in (query, key, value)), mask)
    return out[0].transpose(0, 1)


def stand_in_2_11(q: Tensor, k: Tensor, v: Tensor, *given: Any, window_size: Any) -> Tensor:
    """`varlen_attn` as torch 2.11 has it: it is not told of groups, and its kernel takes them."""
    return stand_in(q, k, v, *given, window_size=window_size, enable_gqa=True)


@pytest.mark.parametrize("varlen", [stand_in, stand_in_2_11])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("compiled", [False, True])
def test_how_varlen_attn_is_called(
    varlen: Any, window: int | None, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    q, k, v, _ = (t.detach().transpose(1, 2).flatten(0, 1) for t in heads())
    call = document_attention._varlen
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="eager", fullgraph=True)
    expected = document_attention.attend_each(q, k, v, cu_seqlens(), window)
    torch.testing.assert_close(call(q, k, v, cu_seqlens(), SEQ, window), expected)


# ---- models ------------------------------------------------------------------------------------


def samples(vocabulary: int, count: int = 9) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for size in torch.randint(2, 40, (count,), generator=generator).tolist():
        tokens = torch.randint(1, vocabulary, (size,), generator=generator)
        made.append({"tokens": tokens, "labels": tokens.clone()})
        made[-1]["labels"][: size // 3] = -100
    return made


def padded_and_packed(vocabulary: int) -> tuple[Batch, Batch]:
    """The same samples, one per row, and several per row with a row of padding at the end."""
    rows = samples(vocabulary)
    packed = PackedDataset(rows, MAX_SEQ_LEN, seed=0)
    packs = [packed[n] for n in range(len(packed))]
    assert len(packs) < len(rows) / 2
    return (
        collate(rows, pad_id=0, max_seq_len=MAX_SEQ_LEN),
        collate(packs, pad_id=0, max_seq_len=MAX_SEQ_LEN, min_rows=len(packs) + 1),
    )


def loss_of(model: Decoder, batch: Batch) -> Tensor:
    return model(batch.tokens, batch.positions, labels=batch.labels, cu_seqlens=batch.cu_seqlens)


def check_equal(model: Decoder, packing_model: Decoder | None = None) -> None:
    """Compares the summed loss and all adapter gradients of padded and of packed rows."""
    padded, packed = padded_and_packed(model.config.vocab_size)
    assert padded.num_targets == packed.num_targets
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert trained
    results = []
    for network, batch in ((model, padded), (packing_model or model, packed)):
        loss = loss_of(network, batch)
        network.zero_grad()
        loss.backward()
        grads = {name: param.grad for name, param in network.named_parameters()}
        results.append((loss.item(), {name: grads[name] for name in trained}))
    (expected, expected_grads), (loss, grads) = results
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, want in expected_grads.items():
        got = grads[name]
        assert got is not None and want is not None and want.norm() > 0, name
        # Measured: at most 2e-6.
        assert (got - want).norm() < 2e-5 * want.norm(), name


def tiny(folder: Path, name: str = "llama", method: str = "dora") -> Decoder:
    write_tiny_model(folder, **MODELS[name])
    model = adapted_model(folder, AdapterConfig(method, 4, targets=["all-linear", "lm_head"]))
    randomize_adapters(model)
    return model


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_loss_and_gradients_are_those_of_padded_rows(
    name: str, method: str, checkpointing: Any, tmp_path: Path
) -> None:
    model = tiny(tmp_path, name, method)
    model.set_activations(ActivationConfig(checkpointing))
    check_equal(model)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        pytest.param("llama", "none", marks=pytest.mark.long),
        pytest.param("llama", "full", marks=pytest.mark.slow),
        pytest.param("mistral-window", "none", marks=pytest.mark.slow),
        pytest.param("mistral-window", "full", marks=pytest.mark.long),
    ],
)
def test_compiled_layers(name: str, checkpointing: Any, tmp_path: Path) -> None:
    model, compiled = tiny(tmp_path / "a", name), tiny(tmp_path / "b", name)
    compiled.set_activations(ActivationConfig(checkpointing))
    torch._dynamo.reset()
    for layer in compiled.model.layers:
        layer.block = torch.compile(layer.block, fullgraph=True)
    check_equal(model, compiled)


def test_other_lengths_build_nothing_new(tmp_path: Path) -> None:
    layer = tiny(tmp_path).model.layers[0]
    builds: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        builds.append(1)
        return graph.forward

    torch._dynamo.reset()
    block = torch.compile(layer.block, fullgraph=True, backend=backend)
    x, (cos, sin) = torch.randn(2, SEQ, 192), torch.randn(2, 2, SEQ, 1, 32)
    for ends in ([0, 13, 40, 80], [0, 40, 50, 80], [0, 40, 79, 80]):
        block(x, cos, sin, None, torch.tensor(ends, dtype=torch.int32))
    assert len(builds) == 1


@torch.no_grad()
def test_no_sample_sees_another(tmp_path: Path) -> None:
    model = tiny(tmp_path, "mistral-window")
    _, batch = padded_and_packed(model.config.vocab_size)
    positions, cu = batch.positions, batch.cu_seqlens
    assert positions is not None and cu is not None
    before = model(batch.tokens, positions, cu_seqlens=cu).flatten(0, 1)
    ends = cu.unique().tolist()
    for start, end in zip(ends, ends[1:], strict=False):
        tokens = batch.tokens.flatten().clone()
        tokens[start:end] = (tokens[start:end] + 1) % model.config.vocab_size
        after = model(tokens.view_as(batch.tokens), positions, cu_seqlens=cu).flatten(0, 1)
        same = (after == before).all(dim=-1)
        assert not same[start:end].any()
        assert same[:start].all() and same[end:].all()


def test_cu_seqlens_takes_positions_and_no_mask(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    _, batch = padded_and_packed(model.config.vocab_size)
    mask = torch.ones(1, 1, MAX_SEQ_LEN, MAX_SEQ_LEN, dtype=torch.bool).tril()
    for positions, given_mask in ((None, None), (batch.positions, mask)):
        with pytest.raises(ValueError, match="cu_seqlens takes positions"):
            model(batch.tokens, positions, given_mask, cu_seqlens=batch.cu_seqlens)


@torch.no_grad()
def test_smollm2(smollm2_dir: Path) -> None:
    config = DecoderConfig.from_dir(smollm2_dir)
    with torch.device("meta"):
        model = Decoder(config)
    weights = load_file(smollm2_dir / "model.safetensors")
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.float()
    padded, packed = padded_and_packed(config.vocab_size)
    assert loss_of(model, packed).item() == pytest.approx(loss_of(model, padded).item(), rel=1e-5)
