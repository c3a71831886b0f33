"""What runs on GPUs only, on one that is pretended: the numbers of the CPU's ways."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor, nn

from qfsdp.checkpoint.state import random_state, set_random_state
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.distributed import stores
from qfsdp.distributed.stores import DeviceAhead, HostStore
from qfsdp.distributed.world import World
from qfsdp.modules import activation_offload, compute_dtype
from qfsdp.modules.attention import documents, self_attention, sinks
from qfsdp.modules.delta_kernel import has_kernel
from qfsdp.modules.experts.product import expert_product, takes_grouped
from qfsdp.tensor_subclasses import few_rows, fp8, nf4, nf4_by_bitsandbytes
from qfsdp.tensor_subclasses.plain import PlainRows
from qfsdp.training import distillation
from tests.json_lines import metric_lines
from tests.pretended_gpu import GPU, Stream, pretend
from tests.tiny import load_recipe, write_tiny_model
from tests.toy_data import TOY_CONFIG

pytestmark = pytest.mark.usefixtures("eager")


def losses(folder: Path, patch: pytest.MonkeyPatch, name: str, *words: str) -> list[float]:
    (folder / "config.yaml").write_text(TOY_CONFIG.format(folder=folder))
    recipe, run = load_recipe(), folder / name
    patch.setattr("qfsdp.training.throughput.matmul_rate", lambda *_: 1e12)  # it would take minutes
    patch.setattr("qfsdp.modules.activation_offload.SMALLEST_OFFLOADED", 1)
    # Files are written from tensors that say where they are: host memory, which is pretended too.
    patch.setattr("qfsdp.checkpoint.resume.Checkpointer._write", lambda *_: None)
    patch.setattr("qfsdp.checkpoint.resume.Checkpointer.save_result", lambda *_: None)
    given = [f"output_dir={run}", "model.dtype=bf16", "max_steps=3", "report=false", *words]
    cfg = load_config(recipe.Config, ["--config", str(folder / "config.yaml"), *given])
    recipe.main(cfg)
    lines = metric_lines(run)
    return [line["loss"] for line in lines]


@pytest.mark.parametrize(
    "words",
    [
        ["adapter.method=dora"],
        ["packed=true"],
        pytest.param(
            ["activation.offload=true", "activation.checkpointing=full"], marks=pytest.mark.long
        ),
    ],
    ids=" ".join,
)
def test_a_run_has_the_losses_of_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    write_tiny_model(tmp_path / "model")
    with compute_dtype.planned_for("cuda"):  # in bf16
        expected = losses(tmp_path, monkeypatch, "cpu", *words)
    with monkeypatch.context() as patch:
        pretend(patch)
        found = losses(tmp_path, patch, "gpu", *words)
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9)], ids=["t4", "a100", "l40s"])
def test_what_a_card_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    old, has_fp8 = capability < (8, 0), capability >= (8, 9)
    rows = torch.ones(8, 64, dtype=torch.bfloat16)
    compute_dtype.has_bf16_gpus.cache_clear()
    pretend(monkeypatch, capability)
    assert self_attention._is_old_gpu() == old
    assert documents.has_varlen(64) == sinks.has_kernel(rows) == takes_grouped(rows, 2, 8) != old
    with pytest.raises(UserError) if old else nullcontext():
        compute_dtype.compute_dtype("bf16")
    with nullcontext() if has_fp8 else pytest.raises(UserError):
        compute_dtype.check_fp8_products()
    compute_dtype.has_bf16_gpus.cache_clear()


def test_products_of_gpus_are_those_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts, in FP8, and attention of documents in fp32, for which there is no kernel."""
    torch.manual_seed(0)
    x, weight = torch.randn(24, 64).bfloat16(), torch.randn(4 * 32, 64).bfloat16()
    ends = torch.tensor([5, 5, 17, 24], dtype=torch.int32)
    q, k, v = torch.randn(2, 6, 12, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)
    cut = torch.tensor([0, 7, 12, 24], dtype=torch.int32)

    def found() -> list[Tensor]:
        x8, scale = fp8.to_fp8(x, None)
        w8, of_w = fp8.to_fp8(weight, None)
        return [
            expert_product(x, ends, weight, (), 64),
            expert_product(x, ends, weight, (), 64, chunk_bytes=1),
            fp8.product(x8[:21], w8, scale[:21], of_w.flatten(), torch.bfloat16),
            documents.attend_documents(q, k, v, cut, 12),
        ]

    expected = found()
    with monkeypatch.context() as patch:
        pretend(patch)
        made = found()
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_packed_rows_do_not_repeat_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel shares them; torch 2.11's `varlen_attn` has no word for it."""
    q, k, v = (torch.randn(2, heads, 12, 8).bfloat16() for heads in (6, 2, 2))
    cut = torch.tensor([0, 7, 12, 24], dtype=torch.int32)
    expected = documents.attend_documents(q, k, v, cut, 12)
    pretend(monkeypatch)
    kernel, shapes = torch.nn.attention.varlen.varlen_attn, []

    def told(q: Tensor, k: Tensor, *rest: Any, enable_gqa: bool, **how: Any) -> Tensor:
        assert enable_gqa
        return not_told(q, k, *rest, **how)

    def not_told(q: Tensor, k: Tensor, *rest: Any, **how: Any) -> Tensor:
        shapes.append(k.shape)
        return kernel(q, k, *rest, **how)

    for one in (told, not_told):
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", one)
        found = documents.attend_documents(q, k, v, cut, 12)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert shapes == [(24, 2, 8)] * 2


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_teacher_that_has_written_leaves_its_memory(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last of its rows and the student's first."""
    done: list[str] = []
    cache = SimpleNamespace(lacks=lambda _: True, of=None, tokens=None, top_k=4)
    cache.fill = lambda *_: done.append("filled")
    for name in ("TeacherCache", "CachedTeacher", "of_teacher"):
        monkeypatch.setattr(distillation, name, lambda *_: cache)
    monkeypatch.setattr(distillation, "load_for_inference", lambda *_: nn.Linear(1, 1))
    monkeypatch.setattr(distillation, "shared_tokens", lambda _: 1)
    monkeypatch.setattr(
        distillation, "Teacher", lambda *_: SimpleNamespace(most_likely=lambda *_: None)
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("freed"))
    of_teacher = SimpleNamespace(model=1, quantization=1, adapter=None, logprobs="cache")
    world = World(GPU if on_gpu else torch.device("cpu"))
    cfg = SimpleNamespace(teacher=of_teacher, distillation=None)
    assert distillation.load_teacher(cfg, world, None, 1) is cache
    assert done == (["filled", "freed"] if on_gpu else ["filled"])


def test_operators_for_cpus_are_not_asked_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor imported; kernels of recurrent layers are, where their package is installed."""

    def fails(*_: Any) -> Any:
        pytest.fail("asked for an operator of CPUs")

    assert not has_kernel(torch.ones(2), "torch")
    pretend(monkeypatch)
    assert has_kernel(torch.ones(2), "torch") and not has_kernel(torch.ones(2), "no_such_package")
    weight = nf4.quantize(torch.randn(64, 128))
    model = nn.Module()
    model.weight = nn.Parameter(weight, requires_grad=False)
    monkeypatch.setattr(nf4_by_bitsandbytes, "LEAST_WEIGHTS", 1)
    for module, name in ((nf4_by_bitsandbytes, "_operator"), (few_rows, "_is_right")):
        monkeypatch.setattr(module, name, fails)
    assert not nf4_by_bitsandbytes.use_for(model)
    few_rows.use_for(model)
    x = torch.ones(1, 128, dtype=torch.bfloat16)
    with few_rows.generating():
        assert few_rows.product(x, model.weight) is None


def test_random_states_of_both_devices_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    before = random_state(GPU)
    first = torch.rand(3)
    set_random_state(before, GPU)
    assert set(before) == {"cpu", "device"} and torch.equal(torch.rand(3), first)


def test_units_are_copied_ahead_in_memory_of_the_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory of the copy's own stream would be free only when the device has come so far: hosts ran
    15 to 25 layers ahead."""
    pretend(monkeypatch)
    ahead, weights, within, made = DeviceAhead(GPU), [], [], []
    empty, leave = stores.place, Stream.__exit__
    monkeypatch.setattr(Stream, "__enter__", lambda stream: within.append(stream))
    monkeypatch.setattr(Stream, "__exit__", lambda stream, *_: leave(within.pop()))
    monkeypatch.setattr(stores, "place", lambda w: (made.append([*within]), empty(w))[1])
    for layer in range(3):
        of_meta = PlainRows.empty(2, 8, torch.bfloat16, "meta").keep_in(HostStore(layer, ahead))
        weight = torch.empty_like(of_meta, device="cpu")
        weight.qdata.fill_(layer)
        weights.append(weight)
    for _ in range(3):
        for layer, weight in enumerate(weights):
            assert (weight.fetch().qdata == layer).all()
    assert len(made) == 10 and not any(made)


def test_activations_wait_for_the_stream_that_computes_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not for the one that computed when the run began (trl#7195), and every number comes back."""
    pretend(monkeypatch)
    monkeypatch.setattr(activation_offload, "SMALLEST_OFFLOADED", 1)
    computing, waited_for = [Stream()], list[Stream]()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: computing[-1])
    monkeypatch.setattr(Stream, "wait_stream", lambda _, other: waited_for.append(other))
    x = torch.randn(4, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(x.tanh().exp().tanh().exp().tanh().exp().sum(), x)
    offload, y = activation_offload.Offload(), x
    for _ in range(3):
        with offload.layer([x]):
            y = y.tanh().t().exp().t()  # a view of a storage is copied with it
        computing.append(Stream())
    assert waited_for == computing[1:3]
    y.sum().backward()
    assert set(waited_for[2:]) == {computing[3]} and x.grad is not None
    assert torch.equal(x.grad, expected)
