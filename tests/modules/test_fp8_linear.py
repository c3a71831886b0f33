"""`quantization.compute: fp8`: adapted linears, their gradients, what is refused, and training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qfsdp.common.errors import InvalidField, UserError
from qfsdp.modules import compute_dtype
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.low_rank.linear import LowRankLinear, low_rank_linears
from qfsdp.modules.quantized_linear import QuantizationConfig, QuantizedLinear, quantize_linears
from qfsdp.tensor_subclasses import fp8, nf4
from tests.ranks import run_ranks
from tests.tiny import load_recipe, recipe_config, write_tiny_model

ROWS, COLS, TOKENS = 96, 128, 40
SIZES = {"vocab_size": 512, "intermediate_size": 384}  # 16 divides them


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFSDP_EMULATE_FP8", "1")
    monkeypatch.setenv("QFSDP_EAGER_KERNELS", "1")


def adapted(method: str, in_fp8: bool, dropout: float = 0.0) -> LowRankLinear:
    torch.manual_seed(0)
    weight = nf4.quantize(torch.randn(ROWS, COLS) * 0.05, torch.float32)
    base = QuantizedLinear(weight, torch.randn(ROWS), in_fp8)
    linear = LowRankLinear(base, AdapterConfig(method, 8, 16, dropout))  # type: ignore[arg-type]
    for param in (linear.lora_A, linear.lora_B):
        nn.init.normal_(param, std=0.05)
    if linear.magnitude is not None and linear.weight_norm is not None:
        nn.init.uniform_(linear.magnitude, 0.9, 1.1)
        nn.init.uniform_(linear.weight_norm, 0.9, 1.1)
    return linear.train()


def by_hand(linear: LowRankLinear, x: Tensor) -> Tensor:
    """The same in plain operations, with rounded weights and tokens, in fp32."""
    weight = linear.weight.data
    parts = (weight.qdata, weight.metadata, weight.format)  # type: ignore[attr-defined]
    w8, w_scale = fp8.frozen_weight_fp8(*parts, COLS, 0)
    x8, x_scale = fp8.to_fp8(x, None)
    base = (x8.float() * x_scale) @ (w8.float() * w_scale.unsqueeze(1)).t()
    y = base + linear.scaling * (x @ linear.lora_A.t()) @ linear.lora_B.t()
    if linear.magnitude is not None:
        y = y * linear.magnitude / linear.weight_norm
    return y + linear.bias  # type: ignore[no-any-return]


def with_gradients(linear: LowRankLinear, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(1)  # of the dropout
    y = linear(x)
    trained = {name: p for name, p in linear.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(y, [x, *trained.values()], grad)
    return {"y": y.detach(), "x": found[0]} | dict(zip(trained, found[1:], strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.usefixtures("emulated")
def test_outputs_and_gradients(method: str, dropout: float) -> None:
    x, grad = torch.randn(2, TOKENS // 2, COLS), torch.randn(2, TOKENS // 2, ROWS)
    found = with_gradients(adapted(method, True, dropout), x, grad)
    exact = with_gradients(adapted(method, False, dropout), x, grad)
    assert found.keys() == exact.keys() and len(found) == (5 if method == "dora" else 4)
    for name, expected in exact.items():
        error = (found[name] - expected).norm() / expected.norm()
        # Gradients of A and B do not pass through W.
        exactly = name in ("lora_A", "lora_B")
        assert error < 1e-5 if exactly else 0.001 < error < 0.05, (name, error)
    if not dropout:
        with torch.no_grad():
            expected = by_hand(adapted(method, True), x.flatten(0, 1)).view_as(found["y"])
        assert torch.allclose(found["y"], expected, atol=1e-5)


@pytest.mark.usefixtures("emulated")
def test_a_linear_without_adapter() -> None:
    linear, x = adapted("lora", True), torch.randn(TOKENS, COLS, requires_grad=True)
    plain = QuantizedLinear(linear.weight.data, None, True)
    exact = linear.weight.data.dequantize()  # type: ignore[attr-defined]
    y = plain(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert 0.01 < (y - x @ exact.t()).norm() / y.norm() < 0.05
    assert (dx - torch.ones(TOKENS, ROWS) @ exact).norm() / dx.norm() < 0.05


def built(folder: Path, **quantization: Any) -> nn.Module:
    from tests.models import Decoder, DecoderConfig

    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dir(folder))
    config = QuantizationConfig(compute="fp8", **quantization)
    config.check()
    quantize_linears(model, config)
    return model


def test_what_is_refused_and_what_stays_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path / "fits", **SIZES)
    with pytest.raises(UserError, match="compute: 'fp8', which a CPU does not multiply; expected"):
        built(folder)
    monkeypatch.setattr(compute_dtype, "device_kind", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(UserError, match="which a NVIDIA A100 does not multiply; expected bf16"):
        built(folder)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    model = built(folder, targets=["all-linear", "lm_head"])
    linears = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert [name for name, m in linears.items() if not m.fp8] == ["lm_head"] and len(linears) == 15
    with pytest.raises(InvalidField, match="compute"):
        built(folder, format="hqq")
    odd = write_tiny_model(tmp_path / "odd")
    with pytest.raises(UserError, match=r"mlp\.gate_proj has 577 x 192 weights, which 16 does not"):
        built(odd)


def train(folder: Path, cases: list[dict[str, Any]]) -> list[tuple[list[float], int]]:
    """Losses of every case's updates by the recipe's functions, and the linears in FP8."""
    from qfsdp.data import Batch
    from qfsdp.distributed.gradients import trainable_parameters
    from qfsdp.distributed.strategy import ShardingConfig
    from qfsdp.training.steps import StepClock

    recipe, found = load_recipe(), []
    for case in cases:
        sharding = ShardingConfig(wrap=case.get("wrap", "decoder_layer"))
        world = recipe.init_world(sharding)
        cfg = recipe_config(
            recipe,
            folder,
            dtype=case.get("dtype", "fp32"),
            quantization=QuantizationConfig(compute=case["compute"]),
            adapter=AdapterConfig(case.get("method", "dora"), 8, 16),
            sharding=sharding,
            seed=case.get("seed", 0),
        )
        model = recipe.load_model(cfg, world)
        lr = case.get("lr", 2e-4)
        optimizer = torch.optim.AdamW(trainable_parameters(model), lr=lr, eps=1e-6)
        tokens = torch.randint(512, (4, 48), generator=torch.Generator().manual_seed(3))
        tokens = tokens[world.rank :: world.size]
        batch, clock = Batch(tokens, tokens.roll(-1, 1), tokens.numel()), StepClock(world.device)
        losses = []
        for _ in range(case.get("updates", 4)):
            metrics = recipe.train_step(model, optimizer, None, [batch], 1.0, world, clock)
            losses.append(metrics["loss"])
        found.append((losses, sum(m.fp8 for _, m in low_rank_linears(model))))
    return found


@pytest.mark.usefixtures("emulated")
def test_sharded_equals_unsharded(tmp_path: Path) -> None:
    """The scales of a row and of a token need nothing of other ranks. But a rounding in fp32 may
    turn a token's number to its neighbour in e4m3, 6 % away: the promise of 1e-5 does not hold."""
    folder = write_tiny_model(tmp_path, **SIZES)
    cases = [{"compute": "fp8", "wrap": wrap} for wrap in ("decoder_layer", "linear")]
    alone = train(folder, [cases[0], {"compute": "bf16"}, cases[0]])
    assert alone[0][1] == 14 and alone[1][1] == 0
    (losses, _), (in_bf16, _), (again, _) = alone
    assert again == losses  # bit for bit, as a resumed run needs
    assert losses != in_bf16 and losses == pytest.approx(in_bf16, abs=0.05)
    for of_wrap, count in run_ranks(2, train, folder, cases)[0]:
        print([f"{a - b:.1e}" for a, b in zip(of_wrap, losses, strict=True)])
        assert count == 14 and of_wrap[0] == pytest.approx(losses[0], abs=1e-5)
        assert of_wrap == pytest.approx(losses, abs=2e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_50_updates_learn_what_bf16_learns(tmp_path: Path) -> None:
    """The loss falls as in bf16, and ends a little higher: 0.005 to 0.010 for each of six seeds."""
    folder = write_tiny_model(tmp_path, **SIZES)
    case = {"compute": "bf16", "updates": 50, "dtype": "bf16", "lr": 2e-3}
    for seed in range(2):
        both = [case | {"seed": seed, "compute": compute} for compute in ("fp8", "bf16")]
        in_fp8, in_bf16 = (losses for losses, _ in train(folder, both))
        print(f"seed {seed}: {in_fp8[0]:.4f}, then fp8 {in_fp8[-1]:.4f}, bf16 {in_bf16[-1]:.4f}")
        assert in_fp8[0] > 6 and in_fp8[-1] < 0.2
        assert in_fp8[-1] == pytest.approx(in_bf16[-1], abs=0.012)


def test_the_estimate_of_a_gpu(tmp_path: Path) -> None:
    """A dry run for a GPU needs none; the weight and its transposed copy have a byte a weight."""
    from qfsdp.planning.estimate import estimate

    recipe: Any = load_recipe()
    folder = write_tiny_model(tmp_path, **SIZES | {"hidden_size": 384, "num_hidden_layers": 1})
    cfg = recipe_config(
        recipe,
        folder,
        dtype="bf16",
        optimizer=recipe.Component("torch.optim.AdamW", {"lr": 1e-3}),
        max_seq_len=64,
    )
    functions = (recipe.build_model, recipe.train_step)
    in_bf16 = estimate(*functions, cfg, 1)
    in_fp8 = estimate(*functions, replace(cfg, quantization=QuantizationConfig(compute="fp8")), 1)
    assert in_fp8.steady == in_bf16.steady
    assert 0.9 * in_bf16.peak < in_fp8.peak < 1.1 * in_bf16.peak
