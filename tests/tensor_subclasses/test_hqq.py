"""HQQ equals the hqq package; also row shards and odd columns, which the package does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.hqq_parity import dequantized_by_package, of_package, parts
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.quantize import quantize_folder
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.quantized_linear import QuantizationConfig, linear
from qfsdp.tensor_subclasses import four_bit, hqq, hqq_solver
from qfsdp.tensor_subclasses.dtensor import gather_rows, local_rows
from qfsdp.tensor_subclasses.four_bit import BLOCK
from qfsdp.tensor_subclasses.hqq import HQQTensor
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from tests.models import adapted_model, cpu_world, loaded, randomize_adapters
from tests.modules.test_adapters import loss_and_gradients
from tests.ranks import run_ranks
from tests.recipes.test_sharded_equals_unsharded import train
from tests.tiny import ROOT, load_recipe, needs_compiler, write_tiny_model

DTYPES = (torch.float32, torch.bfloat16)
HEAD_TOO = ["all-linear", "lm_head"]


def random_weight(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def quantize(weight: Tensor, **options: Any) -> QuantizedTensor:
    """`weight` in HQQ, on the same device."""
    quantized = HQQTensor.empty(*weight.shape, weight.dtype, weight.device)
    quantized.quantize_(weight, **options)
    return quantized


def package_with_fp16_scales(weight: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Codes, scales and zeros of the package in its stored dtypes, and the weights it computes."""
    pytest.importorskip("hqq.core.quantize", reason="the oracle: pip install hqq")
    codes, scales, zeros = of_package(weight)
    held = (codes, scales.half(), zeros.half())
    return held, dequantized_by_package(*held)


def differences(weight: Tensor) -> tuple[int, int, int, float]:
    """Number of codes, scales and zeros that differ from the package; largest weight error."""
    ours = quantize(weight)
    theirs, values = package_with_fp16_scales(weight)
    counts = [int((a != b).sum()) for a, b in zip(parts(ours), theirs, strict=True)]
    return *counts, (ours.dequantize(torch.float32) - values).abs().max().item()


# ---- the package's numbers ---------------------------------------------------------------------


@pytest.mark.usefixtures("eager")
def test_numbers_are_those_of_the_package_on_a_real_model(smollm2_dir: Path) -> None:
    """The linears of one layer. Because the package sums in fp32, a few zeros differ by one fp16
    step; everything else is equal. (`benchmarks/hqq_parity.py` compares all 210 linears.)"""
    source, totals = ModelWeights(smollm2_dir).files, torch.zeros(4)
    names = [n for n in source.tensors if "layers.10." in n and n.endswith("_proj.weight")]
    for name in names:
        weight = source.read(source.tensors[name])
        (codes, scales, zeros), _ = package_with_fp16_scales(weight)
        ours = parts(quantize(weight))
        assert torch.equal(ours[1], scales), name
        assert (ours[2] - zeros).abs().max() <= 1 / 32, name  # another code changes the zero
        other = [(ours[0] != codes).sum(), (ours[2] != zeros).sum()]
        totals += torch.tensor([*other, codes.numel(), zeros.numel()])
    print(f"SmolLM2, layer 10: other codes and zeros {totals.tolist()}")
    assert len(names) == 7 and totals[0] <= 3 and totals[1] < totals[3] / 5000


SHAPES = [(1, 64), (3, 64), (7, 128), (192, 576), (577, 576), (65, 4096)]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_equal_those_of_the_package(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert differences(random_weight(*shape, dtype=dtype)) == (0, 0, 0, 0.0)


def with_zero_rows_and_groups() -> Tensor:
    weight = random_weight(300, 256)
    weight[5] = 0
    weight[10:20, 64:128] = 0
    return weight


UNUSUAL = {
    "zero rows and groups": with_zero_rows_and_groups(),
    "all zero": torch.zeros(10, 128),
    "one constant": torch.full((100, 128), 0.37),
    "all of one sign": random_weight(64, 128).abs() + 1,
    "a range too small": random_weight(64, 128) * 1e-4 + 1,
    "small ranges": random_weight(64, 128) * 3e-3,
    "errors that are shrunk": random_weight(64, 128) * 1000,
    "heavy tails": random_weight(64, 128) / random_weight(64, 128, seed=1).abs().clamp(min=1e-4),
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_numbers_equal_those_of_the_package(name: str) -> None:
    assert differences(UNUSUAL[name]) == (0, 0, 0, 0.0)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("cols", [1, 2, 63, 65, 130, 577])
def test_odd_columns_equal_the_packages_for_the_filled_row(cols: int) -> None:
    weight = random_weight(33, cols)
    start = cols // BLOCK * BLOCK
    last = weight[:, start:]
    filled = torch.cat([weight[:, :start], last.repeat(1, BLOCK)[:, :BLOCK]], dim=1)
    odd, ((codes, scales, zeros), values) = quantize(weight), package_with_fp16_scales(filled)
    assert odd.qdata.shape == (33, -(-cols // 2) + 4 * -(-cols // BLOCK))
    found = parts(odd)
    assert torch.equal(found[0], codes[:, :cols])
    assert torch.equal(found[1], scales) and torch.equal(found[2], zeros)
    assert torch.equal(odd.dequantize(torch.float32), values[:, :cols])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(odd.dequantize(dtype), values[:, :cols].to(dtype))


@pytest.mark.usefixtures("eager")
def test_error_is_less_than_without_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 weights, at 4.5 bits each."""
    weight = random_weight(512, 512, dtype=torch.bfloat16)
    solved = quantize(weight)
    assert 8 * solved.qdata.nbytes / weight.numel() == 4.5
    monkeypatch.setattr(hqq_solver, "STEPS", 0)
    plain = quantize(weight)
    errors = [(w.dequantize(torch.float32) - weight.float()).abs().mean() for w in (solved, plain)]
    assert errors[0] < 0.99 * errors[1]


# ---- kernels -----------------------------------------------------------------------------------


@pytest.mark.long
@needs_compiler
def test_compiled_kernels_give_the_bits_of_the_plain_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = random_weight(577, 577)
    compiled = quantize(weight)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    values = compiled.dequantize(torch.bfloat16)
    scale = torch.rand(570) + 0.5
    scaled = HQQTensor.dequantize_rows(compiled.qdata[7:], [], 577, 7, torch.float32, scale)
    for module in (four_bit, hqq, hqq_solver):  # used uncompiled only
        monkeypatch.setattr(module, "KERNEL_CHUNK", 20 * 640)
    monkeypatch.setattr("qfsdp.tensor_subclasses.kernels.compiled.can_compile", lambda: False)
    plain = quantize(weight)
    assert torch.equal(compiled.qdata, plain.qdata)
    assert torch.equal(values, plain.dequantize(torch.bfloat16))
    expected = HQQTensor.dequantize_rows(plain.qdata[7:], [], 577, 7, torch.float32, scale)
    assert torch.equal(scaled, expected)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("cols", [128, 130])
def test_rows_can_be_scaled(cols: int) -> None:
    weight, scale = quantize(random_weight(33, cols)), torch.rand(33) + 0.5
    args = (weight.qdata, weight.metadata, cols, 0, torch.bfloat16)
    scaled = HQQTensor.dequantize_rows(*args, scale)
    expected = weight.dequantize(torch.float32) * scale.unsqueeze(1)
    torch.testing.assert_close(scaled.float(), expected, rtol=2**-8, atol=0)
    ones = HQQTensor.dequantize_rows(*args, torch.ones(33))
    assert torch.equal(ones, weight.dequantize(torch.bfloat16))


@pytest.mark.usefixtures("eager")
def test_quantized_in_pieces_or_whole() -> None:
    """A piece is a view of memory that the next piece overwrites."""
    weight, memory = random_weight(100, 130), torch.empty(40, 130)

    def pieces() -> Any:
        for rows in weight.split(40):
            yield memory[: len(rows)].copy_(rows)

    in_pieces = HQQTensor.empty(100, 130, torch.float32, "cpu")
    in_pieces.quantize_(pieces())
    assert torch.equal(in_pieces.qdata, quantize(weight).qdata)


# ---- gradients ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager")
def test_gradient_of_a_linear() -> None:
    weight = quantize(random_weight(33, 130))
    x = torch.randn(5, 7, 130, requires_grad=True)
    y = linear(x, weight)
    expected = x @ weight.dequantize().t()
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, x, grad)[0])
    assert found.abs().max() > 0.1


@pytest.mark.usefixtures("eager")
def test_gradients_equal_those_of_the_model_with_plain_weights(tmp_path: Path) -> None:
    adapter = AdapterConfig("dora", rank=5, alpha=7.0, targets=HEAD_TOO)
    model = adapted_model(write_tiny_model(tmp_path), adapter, format="hqq")
    randomize_adapters(model)
    tokens = torch.randint(0, 577, (2, 40), generator=torch.Generator().manual_seed(1))
    logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    expected_loss, expected = loss_and_gradients(model, tokens)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys() and len(found) == 3 * (2 * 7 + 1)
    for name, grad in expected.items():
        assert (found[name].double() - grad).norm() < 1e-4 * grad.norm(), name


# ---- weights that cannot be quantized ----------------------------------------------------------


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38, 1e7])
def test_weights_without_finite_scales_are_named(value: float) -> None:
    """A range above 15 * 65504 has no scale in fp16."""
    weight = random_weight(9, 65)
    weight[5, 64] = weight[5, 0] = weight[7, 0] = value
    message = r"^q_proj: row 5 holds NaN, infinity or numbers too large for scales in fp16; "
    with pytest.raises(ValueError, match=message):
        quantize(weight, name="q_proj")


# ---- row shards --------------------------------------------------------------------------------


def stops_depend_on_all_rows() -> Tensor:
    """A weight whose halves and thirds alone stop the solver after other steps than the whole."""
    return random_weight(33, 130, seed=2)


def shard_of(weight: Tensor, **options: Any) -> tuple[slice, Tensor]:
    """This rank's rows of a weight, quantized by all ranks together."""
    param = distribute_tensor(torch.empty(len(weight), 1), cpu_world().mesh, [Shard(0)])
    rows = local_rows(param)
    shard = HQQTensor.empty(*weight.shape, weight.dtype, "cpu")[rows]
    shard.quantize_(weight[rows], gather_rows=lambda mine: gather_rows(param, mine), **options)
    return rows, shard.qdata


def trained(source: Path, folder: Path, offloads: tuple[str, ...]) -> list[dict[str, Any]]:
    case = {"method": "dora", "wrap": "decoder_layer", "split": (6, 1), "steps": 3}
    case |= {"format": "hqq"}
    cases = [case | {"folder": str(folder), "sharding": {"offload_base": o}} for o in offloads]
    return train(source, [case, *cases])


def on_ranks(source: Path, folder: Path) -> dict[str, Any]:
    """Results of one rank."""
    weight = stops_depend_on_all_rows()
    rows, found = shard_of(weight)
    weight[30, 3] = float("nan")
    with pytest.raises(ValueError) as error:
        shard_of(weight, name="q_proj")
    runs = trained(source, folder, ("cpu", "disk")) if cpu_world().size == 2 else []
    model = loaded(source, format="hqq")
    return {"rows": rows, "qdata": found, "error": str(error.value), "model": model, "runs": runs}


@pytest.mark.long
@pytest.mark.usefixtures("eager")
def test_several_ranks_equal_one(tmp_path: Path) -> None:
    """The bytes of shards, the error for NaN on one rank, and losses with the base offloaded."""
    source, folder = write_tiny_model(tmp_path / "source", shards=3), tmp_path / "quantized"
    quantize_folder(ModelWeights(source), QuantizationConfig("hqq", HEAD_TOO), folder, cpu_world())
    whole, model = quantize(stops_depend_on_all_rows()).qdata, loaded(source, format="hqq")
    stored = loaded(folder, format="hqq")
    assert all(torch.equal(stored[name][0], bytes_[0]) for name, bytes_ in model.items())
    for size in (2, 3):
        alone = [quantize(rows).qdata for rows in stops_depend_on_all_rows().split(-(-33 // size))]
        assert not torch.equal(torch.cat(alone), whole), "the number of steps must differ"
        for found in run_ranks(size, on_ranks, source, folder):
            assert torch.equal(found["qdata"], whole[found["rows"]])
            assert found["error"].startswith("q_proj: row 30 holds NaN")
            for name, (bytes_, *_) in model.items():
                assert torch.equal(found["model"][name][0], bytes_), name
            losses = [run["losses"] for run in found["runs"]]
            assert all(of_run == losses[0] and of_run[2] < of_run[0] for of_run in losses)
    assert len(model) == 2 * (7 + 2) + 3


# ---- recipes -----------------------------------------------------------------------------------


def test_bitsandbytes_layout_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    recipe = load_recipe("quantize")
    argv = ["--config", str(ROOT / "configs/quantize.yaml"), f"model.path={tmp_path}"]
    argv += [f"output_dir={tmp_path}/x", "quantization.format=hqq", "layout=bnb"]
    message = "^layout: 'bnb' is for NF4, and quantization.format is 'hqq'; expected layout=qfsdp$"
    with pytest.raises(UserError, match=message):
        recipe.check(load_config(recipe.Config, argv))
