"""FLOPs against PyTorch's counter; times of phases; the rate of matrix products."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import profile
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.progress import Progress
from qfsdp.data.batch import IGNORE_INDEX
from qfsdp.data.cut_rows import CutRows
from qfsdp.data.loader import collate
from qfsdp.data.preferences.shared_prompts import cut_documents, share_documents
from qfsdp.distributed.world import World
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.modules.transformer import Decoder
from qfsdp.training.steps import StepClock
from qfsdp.training.throughput import (
    Meter,
    StepFlops,
    _attended,
    document_lengths,
    matmul_rate,
    step_flops,
    utilization,
)
from tests.models import load_model
from tests.ranks import run_ranks
from tests.tiny import TINY_CONFIG, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")
CPU = torch.device("cpu")
ROWS, SEQ, WIDTH = 3, 40, 192
aten = torch.ops.aten

SETUPS: dict[str, tuple[AdapterConfig | None, dict[str, Any]]] = {
    "lora": (AdapterConfig("lora", rank=5), {}),
    "dora": (AdapterConfig("dora", rank=5), {}),
    "head": (AdapterConfig("dora", rank=5, targets=["all-linear", "lm_head"]), {}),
    "dropout": (AdapterConfig("lora", rank=5, dropout=0.5), {}),
    "some": (AdapterConfig("lora", rank=5, targets=["v_proj", "down_proj"]), {}),
    "late": (AdapterConfig("lora", rank=5, targets=["down_proj"]), {}),
    "ia3": (AdapterConfig("ia3"), {}),
    "ia3, late": (AdapterConfig("ia3", targets=["down_proj"]), {}),
    "fused": (AdapterConfig("dora", rank=5), {"architectures": ["Phi3ForCausalLM"]}),
    "nothing frozen": (None, {}),
    "nothing frozen, tied": (None, {"tie_word_embeddings": True}),
}


def plain_adapted_linears(
    x: Tensor,
    weights: list[Tensor],
    a: list[Tensor],
    b: list[Tensor],
    scaling: float,
    ratios: list[Tensor],
    magnitudes: list[Tensor],
    dropped: Tensor | None,
    ready: None,
    fp8: bool,
) -> list[Tensor]:
    """Adapted linears in plain operations, whose gradient PyTorch computes and counts."""
    inner = x if dropped is None else dropped
    factors = zip(weights, a, b, strict=True)
    made = [x @ weight.T + scaling * (inner @ one.T) @ other.T for weight, one, other in factors]
    if not magnitudes:
        return made
    return [y * (m / m.detach()) for y, m in zip(made, magnitudes, strict=True)]


def attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


def attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


# PyTorch registers these formulas only for the kernels of GPUs.
CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


def counted(model: Decoder, tokens: Tensor, labels: Tensor) -> tuple[int, int]:
    """FLOPs of linears and of attention in a real forward and backward pass."""
    counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    # Full checkpointing without early stop: these plain operations would leave out less than ours.
    selective = model.parts.layers[0].checkpointing == "selective"
    with counter, set_checkpoint_early_stop(selective):
        model(tokens, labels=labels).backward()
    by_op: dict[Any, int] = dict(counter.get_flop_counts()["Global"])
    attention = sum(by_op.pop(op, 0) for op in CPU_ATTENTION)
    return sum(by_op.values()), attention


def adapted_numbers(linear: Any) -> int:
    """Of B, if there is one."""
    return linear.lora_B.numel() if hasattr(linear, "lora_B") else 0


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("name", SETUPS)
def test_flops_equal_those_that_pytorch_counts(
    name: str, checkpointing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qfsdp.modules.low_rank.product.adapted_linears", plain_adapted_linears)
    adapter, changes = SETUPS[name]
    model = Decoder(DecoderConfig.from_dict(TINY_CONFIG | changes))
    if adapter is not None:
        add_adapters(model, adapter)
        init_adapters(model, seed=0)
    model.set_activations(ActivationConfig(checkpointing))
    tokens = torch.randint(0, 577, (ROWS, SEQ))
    labels = torch.randint(0, 577, (ROWS, SEQ)).masked_fill_(torch.rand(ROWS, SEQ) < 0.4, -100)
    targets = int((labels != IGNORE_INDEX).sum())

    linears, attention = counted(model, tokens, labels)
    flops = step_flops(model, [SEQ] * ROWS, targets)

    # PyTorch counts all pairs of tokens; we count those that a causal kernel computes.
    attention = attention * (SEQ + 1) // (2 * SEQ)
    spared = 0
    if checkpointing == "full" and (adapter is None or adapter.method != "dora"):
        # A layer's last product is not made again (`test_activations`), where backward gets to it.
        last = model.model.layers[-1].mlp.down_proj
        numbers = last.weight.numel() + (0 if adapter is None else adapted_numbers(last))
        spared = 2 * ROWS * SEQ * numbers * 2
    assert flops.hardware == linears + attention - spared
    if checkpointing != "full":
        product = 2 * ROWS * SEQ * (SEQ + 1) // 2 * WIDTH  # in the attention of one layer
        with_backward = 1 if "late" in name else 2  # backward ends at the first down_proj
        assert attention == product * (2 * 2 + 5 * with_backward)
        assert flops.model == flops.hardware - product * with_backward
    else:
        model.set_activations(ActivationConfig("none"))
        assert flops.model == step_flops(model, [SEQ] * ROWS, targets).model
        assert flops.hardware > 1.2 * flops.model


@pytest.mark.parametrize("lengths", [[40, 40, 40], [1, 7, 3, 29, 80], [120]])
@pytest.mark.parametrize("window", [None, 1, 16, 64, 500])
def test_attention_sees_its_document_and_window(lengths: list[int], window: int | None) -> None:
    changes: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dict(TINY_CONFIG | changes))
    pairs = 0
    for length in lengths:
        seen = torch.ones(length, length).tril()
        pairs += int((seen if window is None else seen.triu(1 - window)).sum())
    # In documents of one token each token attends only to itself; the difference is attention.
    alone, flops = step_flops(model, [1] * 120, 9), step_flops(model, lengths, 9)
    assert flops.model - alone.model == (pairs - 120) * 2 * WIDTH * 6 * 2
    assert flops.hardware - alone.hardware == (pairs - 120) * 2 * WIDTH * 7 * 2


def quantized_model_flops(folder: Path, world: int) -> StepFlops:
    model = load_model(
        folder, wrap="linear" if world > 1 else "decoder_layer", adapter=AdapterConfig(rank=5)
    )
    return step_flops(model, [33, 7], 20)


def test_quantized_and_sharded_models_have_the_flops_of_plain_ones(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    with torch.device("meta"):
        plain = Decoder(DecoderConfig.from_dict(TINY_CONFIG))
    quantize_linears(plain, QuantizationConfig("none"))
    add_adapters(plain, AdapterConfig(rank=5))
    expected = step_flops(plain, [33, 7], 20)
    assert quantized_model_flops(tmp_path, 1) == expected
    assert run_ranks(2, quantized_model_flops, tmp_path, 2) == [expected, expected]


def test_flops_of_models_of_transformers(tmp_path: Path) -> None:
    """Those of our decoder but for attention, here of documents of one token; and the gradients of
    a first layer's input, which may be wanted by another linear."""
    write_tiny_model(tmp_path, num_hidden_layers=6)
    ways = ("native", "transformers")
    models = [ModelConfig(str(tmp_path), "fp32", implementation=way).build() for way in ways]  # type: ignore[arg-type]
    for model in models:
        quantize_linears(model, QuantizationConfig("none"))
        add_adapters(model, AdapterConfig(rank=5))
    ours, theirs = (step_flops(model, [1] * 40, 20) for model in models)
    assert theirs.forward == pytest.approx(ours.forward, rel=1e-3)
    assert theirs.model == pytest.approx(ours.model, rel=0.02)


def test_document_lengths() -> None:
    samples = [{"tokens": list(range(1, n)), "labels": list(range(1, n))} for n in (6, 12)]
    assert document_lengths(collate(samples, pad_id=0)) == [16, 16]
    packs = [
        {"tokens": [1] * 9, "labels": [1] * 9, "lengths": [4, 5]},
        {"tokens": [1] * 12, "labels": [1] * 12, "lengths": [12]},
    ]
    whole = collate(packs, pad_id=0, max_seq_len=12)
    assert document_lengths(whole) == [4, 5, 3, 12]
    first, second = (document_lengths(whole.cut(part, 2)) for part in range(2))
    assert first == [4, 2, 6] and second == [5, -2, 3, 12, -6]
    for window in (None, 3):
        parts = _attended(first, window) + _attended(second, window)
        assert parts == _attended([4, 5, 3, 12], window)


def test_lengths_of_cut_pairs() -> None:
    """No part computes the queries of a prompt again for the second answer."""
    documents, found = share_documents([7, 3, 2], [0, 4, 0]), []
    empty = collate([], pad_id=0, max_seq_len=12, min_rows=1)
    for part in range(2):
        cut = empty.cut(part, 2)
        assert isinstance(cut.cu_seqlens, CutRows)
        rows = cut.cu_seqlens._replace(prompts=cut_documents(documents, 1, 12, part, 2))
        found += document_lengths(replace(cut, cu_seqlens=rows))
    assert found == [6, 7, 7, 2, -6, -4]
    assert _attended(found, None) == _attended([7, 7, -4, 2], None)


def test_phases_add_up_and_are_read_once() -> None:
    clock, since = StepClock(CPU), time.perf_counter()
    for _ in range(2):
        with clock.phase("forward"):
            time.sleep(0.02)
        with clock.phase("backward"), clock.phase("inner"):
            time.sleep(0.03)
    elapsed, spent = time.perf_counter() - since, clock.seconds()
    assert set(spent) == {"forward", "backward", "inner"}
    assert spent["forward"] >= 0.04 and spent["inner"] >= 0.06
    assert spent["inner"] <= spent["backward"] <= elapsed - spent["forward"]
    assert clock.seconds() == {}
    with clock.phase("logging"):
        clock.seconds()  # an open phase counts for the next call
    assert list(clock.seconds()) == ["logging"]


def test_a_phase_that_raises_is_not_counted() -> None:
    clock = StepClock(CPU)
    with pytest.raises(KeyError), clock.phase("data"):
        raise KeyError
    assert "data" not in clock.seconds()


def test_phases_are_ranges_in_a_trace() -> None:
    clock = StepClock(CPU)
    with profile(acc_events=True) as trace:
        for _ in range(3):
            with clock.phase("forward"):
                torch.ones(8) @ torch.ones(8)
    (event,) = (event for event in trace.key_averages() if event.key == "forward")
    assert event.count == 3


def test_matmul_rate_is_that_of_the_fastest_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake clock: the first product takes 1 s, the next 0.1 s; then 0.3 s are over."""
    moments = iter([0.0, *(0.0, 1.0), 0.2, *(0.2, 0.3), 0.4])
    monkeypatch.setattr("qfsdp.training.throughput.time.perf_counter", lambda: next(moments))
    assert matmul_rate.__wrapped__(CPU, torch.float32) == pytest.approx(2 * 1024**3 / 0.1)


def test_utilization() -> None:
    assert utilization(StepFlops(600, 800, 200), seconds=2.0, rate=1000.0) == {
        "model_flops_utilization": 0.3,
        "hardware_flops_utilization": 0.4,
    }


def test_utilization_is_at_most_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the rate was measured while the device was slow."""
    monkeypatch.setattr("qfsdp.training.throughput.matmul_rate", lambda *_: 1.0)
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dict(TINY_CONFIG))
    meter = Meter(model, World(CPU), StepClock(CPU))
    now = iter([0.0, 2.0, 2.0, 6.0, 6.0])  # a step of 2 s, and one of 4 s
    monkeypatch.setattr("qfsdp.training.throughput.time.perf_counter", lambda: next(now))
    meter._start()
    found = []
    for _ in range(2):
        meter.add([collate([{"tokens": [1] * 8, "labels": [1] * 8}], pad_id=0)])
        found.append(meter.read()["hardware_flops_utilization"])
    assert found == [1.0, 0.5], "the best step is the rate from then on"


def test_the_first_time_of_a_phase_is_told_if_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def tell(text: str) -> AbstractContextManager[None]:
        told.append(text)
        return nullcontext()

    monkeypatch.setattr("qfsdp.training.steps.long_wait", tell)
    monkeypatch.setattr("qfsdp.common.progress.NOW", Progress(step=3))
    clock = StepClock(CPU)
    for _ in range(2):
        with clock.phase("forward"), clock.phase("inner"):
            pass
    assert told == ["step 3: forward", "step 3: inner"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_phases_on_a_gpu_do_not_wait() -> None:
    device = torch.device("cuda", 0)
    assert matmul_rate(device, torch.bfloat16) > 0
    clock = StepClock(device)
    torch.cuda.synchronize()
    with clock.phase("forward"):
        torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    assert not torch.cuda.current_stream().query(), "the phase has waited for the device"
    assert clock.seconds()["forward"] > 0.1
