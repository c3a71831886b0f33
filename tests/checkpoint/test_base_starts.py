"""PiSSA and OLoRA: the part of the base that moves, the rest, and the adapter that is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from qfsdp.checkpoint.adapter_files import load_adapter, read_adapter_config, save_adapter
from qfsdp.checkpoint.adapter_start import check_start, start_adapters
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.quantize import quantize_folder
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.reference import as_reference
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.low_rank.linear import (
    low_rank_linears,
    refresh_dora_norms,
)
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.tensor_subclasses.dtensor import local_part, local_rows, whole_tensor
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from tests.models import adapted_model, build_meta_model, cpu_world, load_model
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")

TOKENS = torch.arange(48).view(1, 48)


def config(init: Any, method: Any = "lora", **more: Any) -> AdapterConfig:
    return AdapterConfig(method, 8, 12.0, init=init, **more)


def started(folder: Path, section: AdapterConfig, **build: Any) -> nn.Module:
    model = load_model(folder, adapter=section, **build)
    start_adapters(model, section, str(folder), seed=0)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("starts") / "model")


@pytest.mark.long
@torch.no_grad()
def test_what_moves_and_what_is_left(folder: Path) -> None:
    """PiSSA's product has nearly all of the norm that rank 8 can have; OLoRA's factors are those of
    a QR decomposition. The model is the same; an NF4 base gets smaller errors."""
    stored = load_file(folder / "model.safetensors")
    base = load_model(folder, format="none")(TOKENS)
    usual = (load_model(folder)(TOKENS) - base).norm()
    for section in (config("pissa"), config("olora"), config("pissa", "dora", rslora=True)):
        model = started(folder, section, format="none")
        assert (model(TOKENS) - base).abs().max() < 3e-5
        for name, module in low_rank_linears(model):
            weight = stored[f"{name}.weight"]
            product = module.scaling * module.lora_B @ module.lora_A
            torch.testing.assert_close(module.weight + product, weight, rtol=0, atol=1e-6)
            if section.init == "pissa":
                best = torch.linalg.svdvals(weight)[:8].norm()
                assert 0.998 * best < product.norm() < 1.0001 * best, name
            else:
                q, r = torch.linalg.qr(weight)
                torch.testing.assert_close(module.lora_A, r[:8], rtol=0, atol=1e-5)
                torch.testing.assert_close(module.lora_B, q[:, :8], rtol=0, atol=1e-5)
        assert (started(folder, section)(TOKENS) - base).norm() < 0.95 * usual


@torch.no_grad()
def test_the_reference_is_the_start(folder: Path) -> None:
    model = started(folder, config("pissa"), format="none")
    before = model(TOKENS)
    for _, module in low_rank_linears(model):
        module.lora_A.mul_(1.1)
    assert (model(TOKENS) - before).abs().max() > 0.1
    with as_reference(model):
        assert torch.equal(model(TOKENS), before)


@pytest.mark.parametrize("method", ["lora", "dora"])
@torch.no_grad()
def test_the_written_adapter_is_of_the_base_itself(
    method: str, folder: Path, tmp_path: Path
) -> None:
    """Twice the rank, the same scaling; rounded to bf16 it loses little of what was trained."""
    section = config("pissa", method)
    if method == "dora":
        section = replace(section, rslora=True, rank_pattern={"q_proj": 4})
    model = started(folder, section, format="none")
    numbers = 1e-3 * torch.randn(8, 1, generator=torch.Generator().manual_seed(1))
    for _, module in low_rank_linears(model):
        change = numbers[: len(module.lora_A)]
        module.lora_A.add_(change)
        module.lora_B.add_(change.t())
        if module.magnitude is not None:
            module.magnitude.mul_(1.02)
    refresh_dora_norms(model)
    save_adapter(model, section, str(folder), tmp_path, cpu_world())
    written = read_adapter_config(tmp_path)
    assert written.rank == 16 and written.scaling == pytest.approx(section.scaling, rel=1e-12)
    loaded = adapted_model(folder, written, format="none")
    load_adapter(loaded, tmp_path)
    refresh_dora_norms(loaded)
    expected = model(TOKENS)
    assert (loaded(TOKENS) - expected).abs().max() < 3e-5
    for (name, module), (_, trained) in zip(
        low_rank_linears(loaded), low_rank_linears(model), strict=True
    ):
        kept = trained.lora_B @ trained.lora_A - trained.start["lora_B"] @ trained.start["lora_A"]
        rounded = module.lora_B.bfloat16().double() @ module.lora_A.bfloat16().double()
        assert (rounded - kept).norm() < 4e-3 * kept.norm(), name


# ---- ranks -------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "pissa": {"adapter": config("pissa")},
    "olora": {"adapter": config("olora", "dora")},
    "plain": {"adapter": config("pissa"), "format": "none"},
    "ddp": {"adapter": config("olora"), "sharding": {"strategy": "ddp"}},
    "cpu_offload": {"adapter": config("pissa", "dora"), "sharding": {"cpu_offload": True}},
    "offload_base": {"adapter": config("pissa"), "sharding": {"offload_base": "cpu"}},
}


def states(folder: Path, sharded: bool = True) -> dict[str, dict[str, Tensor]]:
    """For every case the start, and this rank's rows of the base (as a slice and numbers)."""
    found: dict[str, dict[str, Tensor]] = {}
    for case, given in CASES.items():
        build = dict(given)
        section, sharding = build.pop("adapter"), build.pop("sharding", None)
        model = started(folder, section, sharding=sharding if sharded else None, **build)
        found[case] = of_case = {}
        for name, module in low_rank_linears(model):
            for field, param in module.start.items():
                of_case[f"{name}.{field}"] = whole_tensor(param).clone()
        for name, param in base_parameters(model):
            held, local = local_rows(param), local_part(param)
            if isinstance(local, QuantizedTensor):
                local = local.fetch().dequantize()
            of_case[f"{name} {held.start} {held.stop}"] = local.clone()
    return found


@pytest.mark.long
def test_the_start_does_not_depend_on_ranks(tmp_path: Path) -> None:
    """Nor on where the base is. Numbers at the edge of two codes of NF4 may get either."""
    folder = write_tiny_model(tmp_path, shards=2)
    alone = states(folder, sharded=False)
    for found in run_ranks(3, states, folder):
        for case, values in found.items():
            for name, value in values.items():
                stem, *held = name.split()
                expected = next(v for k, v in alone[case].items() if k.split()[0] == stem)
                expected = expected[slice(*map(int, held))] if held else expected
                difference = (value - expected).norm() / expected.norm()
                assert difference < (2e-3 if held else 2e-4), f"{case}: {name}: {difference:.1e}"


# ---- mistakes ----------------------------------------------------------------------------------


def test_what_it_cannot_start_is_refused(folder: Path, tmp_path: Path) -> None:
    quantize_folder(ModelWeights(folder), QuantizationConfig(), tmp_path, cpu_world())
    for path, section, message in (
        (tmp_path, config("pissa"), "init: 'pissa' needs the original weights, and model.path '"),
        (
            folder,
            config("olora", targets=["q_proj", "lm_head"]),
            "init: 'olora' has no start for "
            "lm_head; expected adapter.init=default, or adapter.targets without it",
        ),
        (
            folder,
            replace(config("pissa"), rank=65),
            "adapter.rank: 65; expected at most 64, the "
            "smaller side of model.layers.0.self_attn.k_proj, with init pissa",
        ),
    ):
        with pytest.raises(UserError) as error:
            check_start(section, build_meta_model(path, adapter=section), ModelWeights(path))
        assert message in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(InvalidField, match="dropout: 0.1 is not valid; expected 0, as init pissa"):
        config("pissa", dropout=0.1).check()
