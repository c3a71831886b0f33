"""LoftQ against an exact SVD, for every format, sharding and offload of the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfsdp.checkpoint import loftq
from qfsdp.checkpoint.adapter_files import adapter_parameters
from qfsdp.checkpoint.adapter_start import check_start, start_adapters
from qfsdp.checkpoint.loftq import best_product
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.quantize import quantize_folder
from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import init_adapters
from qfsdp.modules.low_rank import linear as low_rank_linear
from qfsdp.modules.low_rank.linear import (
    LowRankLinear,
    low_rank_linears,
    refresh_dora_norms,
)
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.tensor_subclasses.dtensor import whole_tensor
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from tests.models import build_meta_model, cpu_world, load_model
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")

TEXT = (
    "Water boils at a lower temperature on a mountain because the air presses less on its surface. "
    "Whoever cooks rice up there has to wait longer, although the pot looks as busy as at home."
)


def config(method: str = "lora", rank: int = 8, **more: Any) -> AdapterConfig:
    return AdapterConfig(method, rank, 12.0, init="loftq", **more)


def started(folder: Path, section: AdapterConfig, **build: Any) -> nn.Module:
    model = load_model(folder, adapter=section, **build)
    start_adapters(model, section, str(folder), seed=0)
    return model


def error_and_product(module: LowRankLinear, weight: Tensor) -> tuple[Tensor, Tensor]:
    """W - dequantize(quantized W), and scaling * B A."""
    quantized = module.weight.data
    assert isinstance(quantized, QuantizedTensor)
    error = weight.double() - quantized.dequantize().double()
    return error, module.scaling * (module.lora_B.double() @ module.lora_A.double()).detach()


@pytest.mark.long
def test_the_real_model_starts_nearer_to_the_original(smollm2_dir: Path) -> None:
    """For every shape of linear the error's norm falls as with an exact SVD. The loss and the
    divergence from the unquantized model's predictions fall too."""
    from tokenizers import Tokenizer

    weights = ModelWeights(smollm2_dir)
    model = started(smollm2_dir, config(rank=16))
    linears = dict(low_rank_linears(model))
    for name in (
        "model.layers.3.self_attn.k_proj",
        "model.layers.11.self_attn.o_proj",
        "model.layers.20.mlp.up_proj",
        "model.layers.29.mlp.down_proj",
    ):
        weight = weights.files.read(weights.plain[f"{name}.weight"])
        error, product = error_and_product(linears[name], weight)
        values = torch.linalg.svdvals(error)
        whole, best = values.norm(), values[16:].norm()
        left = (error - product).norm()
        print(f"{name}: {left / whole:.4f} of the error is left; {best / whole:.4f} at best")
        assert best / whole < 0.98
        assert whole - left > 0.99 * (whole - best)
        assert left >= best * (1 - 1e-6)
        a, b = linears[name].lora_A.detach(), linears[name].lora_B.detach()
        torch.testing.assert_close(a.norm(dim=1), b.norm(dim=0), rtol=1e-3, atol=0)
    tokens = torch.tensor([Tokenizer.from_file(f"{smollm2_dir}/tokenizer.json").encode(TEXT).ids])
    predicted = {"loftq": predictions(model, tokens)}
    init_adapters(model, seed=0)
    predicted["default"] = predictions(model, tokens)
    predicted["plain"] = predictions(load_model(smollm2_dir, format="none"), tokens)
    losses = {k: F.nll_loss(p[:-1], tokens[0, 1:]).item() for k, p in predicted.items()}
    divergence = {
        k: F.kl_div(p, predicted["plain"], log_target=True, reduction="batchmean").item()
        for k, p in predicted.items()
    }
    print(f"loss {losses}, divergence {divergence}")
    assert losses["plain"] < losses["loftq"] < losses["default"]
    assert divergence["loftq"] < 0.95 * divergence["default"]


@torch.no_grad()
def predictions(model: nn.Module, tokens: Tensor) -> Tensor:
    """Log-probabilities `[tokens, vocabulary]`."""
    return model(tokens)[0].log_softmax(dim=-1)


@pytest.mark.parametrize("format", ["nf4", "nf4_fp32_absmax", "hqq"])
def test_every_format_and_a_base_that_is_kept_quantized(format: str, tmp_path: Path) -> None:
    """The base is loaded from a quantized copy (`model.quantize_cache`); W from its source."""
    folder, quantized = write_tiny_model(tmp_path / "plain"), tmp_path / "quantized"
    weights = ModelWeights(folder)
    quantize_folder(weights, QuantizationConfig(format), quantized, cpu_world())
    model = load_model(quantized, adapter=config(), format=format)
    start_adapters(model, config(), str(folder), seed=0)
    for name, module in low_rank_linears(model):
        weight = weights.files.read(weights.plain[f"{name}.weight"])
        error, product = error_and_product(module, weight)
        values = torch.linalg.svdvals(error)
        assert (error - product).norm() < 1.001 * values[8:].norm() < 0.999 * values.norm(), name


# ---- ranks -------------------------------------------------------------------------------------

HEAD_TOO = ["all-linear", "lm_head"]
CASES: dict[str, dict[str, Any]] = {
    "lora": {"adapter": config(targets=HEAD_TOO)},
    "dora, rslora": {"adapter": config("dora", rslora=True, targets=HEAD_TOO)},
    "more rank than columns": {"adapter": config(rank=200, targets=["gate_proj"])},
    "ddp": {"adapter": config(), "sharding": {"strategy": "ddp"}},
    "cpu_offload": {"adapter": config("dora"), "sharding": {"cpu_offload": True}},
    "offload_base": {"adapter": config(), "sharding": {"offload_base": "cpu"}},
    "bf16": {"adapter": config(), "dtype": "bf16"},
}


def products(folder: Path, sharded: bool = True) -> dict[str, dict[str, Tensor]]:
    """For every case: scaling * B A, A and the magnitudes, gathered."""
    results = {}
    for case, build in CASES.items():
        build = dict(build)
        section, sharding = build.pop("adapter"), build.pop("sharding", None)
        model = started(folder, section, sharding=sharding if sharded else None, **build)
        found: dict[str, Tensor] = {}
        for name, module in low_rank_linears(model):
            a, b = whole_tensor(module.lora_A), whole_tensor(module.lora_B)
            found |= {f"{name} BA": module.scaling * b @ a, f"{name} A": a.clone()}
            if module.magnitude is not None:
                found[f"{name} magnitude"] = whole_tensor(module.magnitude).clone()
        results[case] = found
    return results


@pytest.mark.slow
def test_the_start_does_not_depend_on_ranks(tmp_path: Path) -> None:
    """Nor on where the base is. 577 rows are uneven over the ranks."""
    folder = write_tiny_model(tmp_path, shards=2)
    alone = products(folder, sharded=False)
    assert len(alone["lora"]) == 2 * 15 and len(alone["dora, rslora"]) == 3 * 15
    worst = 0.0
    for found in run_ranks(3, products, folder):
        for case, expected in alone.items():
            assert found[case].keys() == expected.keys()
            for name, value in expected.items():
                assert value.norm() > 0, f"{case}: {name}"
                difference = ((found[case][name] - value).norm() / value.norm()).item()
                worst = max(worst, difference)
                assert difference < 2e-4, f"{case}: {name}: {difference:.1e}"
    print(f"largest difference between ranks: {worst:.1e} of a tensor's norm")


def test_dora_starts_as_the_adapted_weight(tmp_path: Path) -> None:
    """Magnitudes are the norms of W + s B A, so the first output equals that of LoRA with the same
    product."""
    folder = write_tiny_model(tmp_path)
    tokens = torch.arange(48).view(1, 48)
    models = [started(folder, config(method)).eval() for method in ("lora", "dora")]
    with torch.no_grad():
        lora, dora = (model(tokens) for model in models)
        base = load_model(folder)(tokens)
    torch.testing.assert_close(dora, lora, rtol=0, atol=1e-4)
    assert (dora - base).abs().max() > 0.01
    refresh_dora_norms(models[1])
    for name, module in low_rank_linears(models[1]):
        assert module.magnitude is not None and module.weight_norm is not None
        assert torch.equal(module.magnitude, module.weight_norm), name


# ---- odd matrices ------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "cols", "true_rank"), [(40, 30, 3), (5, 90, 5), (90, 5, 5)])
def test_a_matrix_of_lower_rank_is_found_exactly(rows: int, cols: int, true_rank: int) -> None:
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(rows, true_rank, generator=generator)
    matrix = matrix @ torch.randn(true_rank, cols, generator=generator)
    u, s, v = best_product(matrix, 8, torch.Generator().manual_seed(0))
    assert u.shape == (rows, 8) and s.shape == (8,) and v.shape == (8, cols)
    torch.testing.assert_close(u * s @ v, matrix, rtol=0, atol=1e-4)
    assert torch.count_nonzero(s) == true_rank
    assert torch.count_nonzero(u[:, true_rank:]) == torch.count_nonzero(v[true_rank:]) == 0
    expected = torch.linalg.svdvals(matrix)[:true_rank]
    torch.testing.assert_close(s[:true_rank], expected, rtol=1e-4, atol=0)


def test_directions_beyond_the_rank_of_the_error_start_as_usual() -> None:
    """There A stays random and B zero: two zeros would never train."""
    module = LowRankLinear(nn.Linear(30, 20), config(rank=4))
    init_adapters(nn.ModuleDict({"q_proj": module}), seed=0)
    before = module.lora_A.detach().clone()
    matrix = torch.randn(20, 1) @ torch.randn(1, 30)
    with torch.no_grad():
        loftq.set_product(module, *best_product(matrix, 4, torch.Generator().manual_seed(0)))
    assert torch.equal(module.lora_A[1:], before[1:])
    assert not torch.equal(module.lora_A[0], before[0])
    assert torch.count_nonzero(module.lora_B[:, 1:]) == 0
    product = module.scaling * module.lora_B @ module.lora_A
    torch.testing.assert_close(product, matrix, rtol=0, atol=1e-4)
    with torch.no_grad():
        zeros = torch.zeros(20, 30)
        loftq.set_product(module, *best_product(zeros, 4, torch.Generator().manual_seed(0)))
    assert torch.count_nonzero(module.lora_B) == 0 and torch.equal(module.lora_A[1:], before[1:])


# ---- settings ----------------------------------------------------------------------------------


def test_linears_that_are_not_quantized_start_as_usual(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, tie_word_embeddings=True)
    model = started(folder, config(targets=["q_proj", "lm_head"]))
    linears = dict(low_rank_linears(model))
    assert torch.count_nonzero(linears["lm_head"].lora_B) == 0
    assert linears["lm_head"].lora_A.abs().max() > 0
    assert torch.count_nonzero(linears["model.layers.0.self_attn.q_proj"].lora_B) > 0


@pytest.mark.parametrize(
    ("module", "reads_weights"), [(loftq, "best_product"), (low_rank_linear, "held_rows")]
)
def test_a_resumed_run_computes_no_start(
    module: Any, reads_weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path)
    model = load_model(folder, adapter=config(method="dora"))
    monkeypatch.setattr(module, reads_weights, None)
    start_adapters(model, config(method="dora"), str(folder), seed=0, resumed=True)
    with pytest.raises(TypeError):
        start_adapters(model, config(method="dora"), str(folder), seed=0)


def test_the_same_seed_gives_the_same_start(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    runs = []
    for seed in (0, 0, 1):
        model = load_model(folder, adapter=config())
        start_adapters(model, config(), str(folder), seed=seed)
        runs.append({key: p.detach().clone() for key, p in adapter_parameters(model).items()})
    assert all(torch.equal(runs[0][key], value) for key, value in runs[1].items())
    assert not any(torch.equal(runs[0][key], value) for key, value in runs[2].items())


def test_a_base_without_quantization_error_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "plain")
    quantized = tmp_path / "quantized"
    quantize_folder(ModelWeights(folder), QuantizationConfig(), quantized, cpu_world())
    section = config()
    check_start(section, build_meta_model(folder, adapter=section), ModelWeights(folder))
    for path, format, message in (
        (
            quantized,
            "nf4",
            f"model.path '{quantized}' holds quantized ones; expected the folder that",
        ),
        (folder, "none", "no adapted linear is quantized; expected quantization.format=nf4, or ad"),
    ):
        model = build_meta_model(path, format, section)
        with pytest.raises(UserError) as error:
            check_start(section, model, ModelWeights(path))
        assert str(error.value).startswith("adapter.init: 'loftq' ") and message in str(error.value)
        assert len(str(error.value).splitlines()) == 1
