"""Tests that need an accelerator (`make test-gpu`).

They need torch, safetensors and pytest, and compare with bitsandbytes where it is installed.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import load_base
from qfsdp.checkpoint.weights.quantize import quantize_folder
from qfsdp.config.component import Component
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import init_adapters
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.low_rank.linear import refresh_dora_norms
from qfsdp.modules.quantized_linear import QuantizationConfig, linear
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses import nf4
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor
from tests.models import build_meta_model, summed_cross_entropy
from tests.on_gpu import GPU, IS_CUDA, allocated_bytes, forget_peak, needs_gpu, peak_bytes
from tests.tiny import write_tiny_model

pytestmark = needs_gpu
SHAPES = [(577, 576), (1023, 4096), (300, 577), (1024, 28672), (4096, 4096)]


def random_weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Kernels of the CPU would take a minute to build."""
    with mock.patch.dict(os.environ, QFSDP_EAGER_KERNELS="1"):
        yield


@pytest.mark.parametrize("format", ["nf4", "hqq", "mxfp4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize_has_the_bits_of_the_cpu(shape: tuple[int, int], format: str) -> None:
    on_gpu = FORMATS[format].empty(*shape, torch.bfloat16, GPU)
    on_gpu.quantize_(random_weight(*shape).to(GPU))
    on_cpu, rows = on_gpu.to("cpu"), slice(100, 250)
    for dtype in (torch.float32, torch.bfloat16):
        with uncompiled():
            expected = on_cpu.dequantize(dtype)
        assert torch.equal(on_gpu.dequantize(dtype).cpu(), expected)
        assert torch.equal(on_gpu[rows].dequantize(dtype).cpu(), expected[rows])


@pytest.mark.parametrize("shape", SHAPES)
def test_hqq_equals_that_of_the_cpu(shape: tuple[int, int]) -> None:
    """Except values between two codes: fused multiply-adds round once, to the other code."""
    weight = random_weight(*shape)
    found = []
    for device in (torch.device("cpu"), GPU):
        quantized = FORMATS["hqq"].empty(*shape, torch.bfloat16, device)
        with uncompiled() if device.type == "cpu" else nullcontext():
            quantized.quantize_(weight.to(device))
        found.append(quantized.qdata.cpu())
    assert (found[0] != found[1]).float().mean() < 1e-4


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[1] % 64 == 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = random_weight(*shape, dtype=dtype).to(GPU)
    ours = nf4.quantize(weight)
    packed, state = functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    code_bytes = shape[1] // 2
    assert torch.equal(ours.qdata[:, :code_bytes].flatten(), packed.flatten())
    assert torch.equal(ours.scales, state.state2.absmax)
    assert torch.equal(ours.offset, state.offset)
    # Of 448,000 absmax of fp32 weights one had the neighbouring code on an H200.
    others = ours.qdata[:, code_bytes:].flatten() != state.absmax.flatten()
    assert others.sum() <= (len(others) // 200_000 if dtype == torch.float32 else 0)
    away = ours.dequantize(dtype) != functional.dequantize_4bit(packed, state)
    assert torch.equal(away.view(-1, 64).any(1), others)


@pytest.mark.parametrize("compile", [False, True])
def test_linear_and_its_gradient(compile: bool) -> None:
    weight = nf4.quantize(random_weight(1024, 4096).to(GPU))
    x = torch.randn(64, 4096, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    plain = x.detach().clone().requires_grad_()
    multiply = torch.compile(linear, fullgraph=True) if compile else linear
    y, expected = multiply(x, weight), plain @ weight.dequantize().T
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, plain.grad)


def load(folder: Path, device: torch.device, method: str) -> Decoder:
    config = AdapterConfig(method, rank=4, targets=["all-linear", "lm_head"])
    model = build_meta_model(folder, adapter=config)
    load_base(model, ModelWeights(folder), device)
    init_adapters(model, seed=0)
    return model


def losses(model: Decoder, tokens: Tensor, steps: int) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    history = []
    for _ in range(steps):
        loss = summed_cross_entropy(model(tokens)[:, :-1], tokens[:, 1:]) / tokens.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        refresh_dora_norms(model)
        history.append(loss.item())
    return history


@pytest.mark.parametrize("layout", ["plain", "qfsdp", "bnb"])
@pytest.mark.parametrize("storage", ["gpu", "cpu"])
def test_loading(layout: Any, storage: str, tmp_path: Path) -> None:
    """Every layout gives the same bytes, on the device and, through it, in host memory."""
    folder = write_tiny_model(tmp_path / "source", intermediate_size=576)
    world, config = World(GPU), QuantizationConfig("nf4", ["all-linear", "lm_head"])
    if layout != "plain":
        quantize_folder(ModelWeights(folder), config, tmp_path / "quantized", world, layout)
    source = load_file(folder / "model.safetensors")
    folder = folder if layout == "plain" else tmp_path / "quantized"
    model = build_meta_model(folder)
    sharding = ShardingConfig(cpu_offload=storage == "cpu")
    load_base(model, ModelWeights(folder), GPU, sharding)
    for name, param in base_parameters(model):
        assert param.device.type == (GPU.type if storage == "gpu" else "cpu")
        if not isinstance(param.data, QuantizedTensor):
            assert torch.equal(param.cpu(), source[name]), name
            continue
        expected = nf4.quantize(source[name].to(GPU))
        assert torch.equal(param.data.qdata.cpu(), expected.qdata.cpu()), name
        for mine, theirs in zip(param.data.metadata, expected.metadata, strict=True):
            assert torch.equal(mine.cpu(), theirs.cpu()), name


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("compile", [False, True])
def test_training_equals_the_cpu(method: str, compile: bool, tmp_path: Path) -> None:
    """Eight fp32 updates of a tiny model.

    The bound is 1e-3, because second-level codes may differ between devices: one absmax in 700,
    as with bitsandbytes.
    """
    folder = write_tiny_model(tmp_path / "model")
    tokens = torch.randint(0, 577, (2, 48), generator=torch.Generator().manual_seed(0))
    on_gpu = load(folder, GPU, method)
    if compile:
        on_gpu.compile_layers()
    expected = losses(load(folder, torch.device("cpu"), method), tokens, steps=8)
    assert losses(on_gpu, tokens.to(GPU), steps=8) == pytest.approx(expected, abs=1e-3)
    assert expected[-1] < expected[0] - 0.05


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_a_base_elsewhere_trains_the_same(method: str, tmp_path: Path) -> None:
    """An offloaded base gives the losses of a resident one and takes less memory.

    It lies in host memory, on disk, or is offloaded with all else. With one process `DeviceAhead`
    copies ahead.
    """
    from qfsdp.distributed.gradients import trainable_parameters
    from qfsdp.distributed.sharding import shard_model
    from qfsdp.distributed.world import init_world
    from qfsdp.training.optimizer import build_optimizer

    source = write_tiny_model(
        tmp_path / "source",
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=12,
        num_attention_heads=8,
    )
    folder = tmp_path / "quantized"
    config = QuantizationConfig("nf4", ["all-linear", "lm_head"])
    quantize_folder(ModelWeights(source), config, folder, World(GPU))
    tokens = torch.randint(0, 577, (2, 64), generator=torch.Generator().manual_seed(0)).to(GPU)
    found = {}
    for name, sharding in {
        "resident": ShardingConfig(),
        "host": ShardingConfig(offload_base="cpu"),
        "disk": ShardingConfig(offload_base="disk", ring_memory="64MiB"),
        "all": ShardingConfig(cpu_offload=True),
    }.items():
        world = init_world(sharding)
        model = build_meta_model(folder, adapter=AdapterConfig(method, rank=4), dtype="bf16")
        shard_model(model, sharding, world)
        load_base(model, ModelWeights(folder), GPU, sharding)
        init_adapters(model, seed=0)
        adamw = Component("torch.optim.AdamW", {"lr": 1e-3, "fused": True})
        optimizer = build_optimizer(adamw, trainable_parameters(model))
        forget_peak()
        history = []
        for _ in range(5):
            loss = model(tokens, labels=tokens) / tokens.numel()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            refresh_dora_norms(model)
            history.append(loss.item())
        found[name] = (history, peak_bytes())
        del model, optimizer, loss
        forget_peak()
    print({name: f"{peak / 1e6:.0f} MB" for name, (_, peak) in found.items()})
    losses, peak = found["resident"]
    for name, (history, used) in found.items():
        assert history == pytest.approx(losses, abs=2e-2), name
        assert name == "resident" or used < 0.7 * peak or not IS_CUDA, name


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_estimate_is_what_a_step_takes(method: Any, checkpointing: Any, tmp_path: Path) -> None:
    """Compares peak bytes of the dry run with the allocator's, within the bound of the CPU."""
    from qfsdp.data.batch import Batch
    from qfsdp.distributed.gradients import trainable_parameters
    from qfsdp.modules.activations import ActivationConfig
    from qfsdp.planning.estimate import estimate
    from qfsdp.training.optimizer import build_optimizer
    from qfsdp.training.steps import StepClock
    from tests.tiny import load_recipe

    folder = write_tiny_model(
        tmp_path,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=6,
        num_attention_heads=8,
        vocab_size=32000,
    )
    recipe: Any = load_recipe()
    cfg = recipe.Config(
        output_dir="unused",
        model=recipe.ModelConfig(str(folder)),
        tokenizer=None,
        dataset=None,
        optimizer=Component("torch.optim.AdamW", {"lr": 1e-4, "fused": True}),
        adapter=AdapterConfig(method, rank=16),
        activation=ActivationConfig(checkpointing),
        batch_size=4,
        max_seq_len=256,
    )
    expected = estimate(recipe.build_model, recipe.train_step, cfg, world_size=1)
    gc.collect()  # frees models of other tests
    if IS_CUDA:
        torch._C._cuda_clearCublasWorkspaces()  # the estimate counts them
    before = allocated_bytes()
    world = World(GPU)
    model = recipe.load_model(cfg, world)
    optimizer = build_optimizer(cfg.optimizer, trainable_parameters(model))
    tokens = torch.randint(0, 32000, (4, 256), device=GPU)
    batch, clock = Batch(tokens, tokens, tokens.numel()), StepClock(GPU)
    for step in range(3):
        if step == 1:
            forget_peak()
        recipe.train_step(model, optimizer, None, [batch], 1.0, world, clock)
    measured = peak_bytes() - before
    if not IS_CUDA:
        return
    error = expected.peak / measured - 1
    print(f"{expected.peak / 1e6:.1f} MB of {measured / 1e6:.1f}: {error:+.3f} {expected.at_peak}")
    assert -0.01 < error < 0.06


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FP8 products of CUDA")
def test_products_in_fp8_equal_emulated_ones() -> None:
    from qfsdp.tensor_subclasses import fp8

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8 products")
    weight, found = nf4.quantize(random_weight(512, 768).to(GPU)), []
    x, grad = random_weight(33, 768) * 50, random_weight(33, 512) * 50
    for device in ("cpu", GPU):
        there = weight.to(device)
        parts = (there.qdata, there.metadata, "nf4")
        with uncompiled() if device == "cpu" else nullcontext():
            y = fp8.forward_product(x.to(device), *parts, 0, None)
            found.append((y, fp8.backward_product(grad.to(device), *parts, 768, 0, None)))
    for on_cpu, on_gpu in zip(*found, strict=True):
        assert (on_gpu.cpu() - on_cpu).norm() < 5e-3 * on_cpu.norm()
