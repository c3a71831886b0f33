"""Several adapters joined to one, as PEFT's `add_weighted_adapter` joins them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qfsdp.checkpoint.adapter_config_file import CONFIG_FILE, WEIGHTS_FILE
from qfsdp.checkpoint.adapter_files import (
    check_adapter,
    load_adapter,
    read_adapter_config,
    save_adapter,
)
from qfsdp.checkpoint.join import best_factors
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.config.load import load_config
from qfsdp.hub.download import _names
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.low_rank.linear import low_rank_linears
from tests.models import adapted_model, cpu_world, randomize_adapters
from tests.peft_oracle import run_peft
from tests.ranks import run_ranks
from tests.tiny import ROOT, load_recipe, run_recipe, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")

WEIGHTS = {"a": 0.7, "b": -0.4, "c": 1.5}
ADAPTERS = {
    "a": AdapterConfig("lora", 5, 7.0),
    "b": AdapterConfig("lora", 5, 10.0, targets=["q_proj", "up_proj", "lm_head"], rslora=True),
    "c": AdapterConfig("lora", 5, 2.0, targets=["v_proj"], layers=[1]),
    "low": AdapterConfig("lora", 3, 9.0, targets=["q_proj", "down_proj"]),
    "dora": AdapterConfig("dora", 5, 7.0, targets=["q_proj"]),
}
CASES = {
    "linear": ("abc", "linear", {}),
    "ties": ("abc", "ties", {"density": 0.3}),
    "dare_linear": ("ab", "dare_linear", {"density": 0.4}),
    "dare_ties": ("abc", "dare_ties", {"density": 0.6}),
    "svd": (["a", "low"], "svd", {}),
    "svd 4": (["b", "low"], "svd", {"svd_rank": 4}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model, and adapters with values as after training."""
    folder = tmp_path_factory.mktemp("join")
    write_tiny_model(folder / "model")
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        model = adapted_model(folder / "model", config, format="none")
        randomize_adapters(model)
        for param in model.parameters():
            if param.requires_grad:
                param.data.mul_(
                    1 + 0.5 * torch.sin(torch.arange(param.numel()) + seed).view_as(param)
                )
        save_adapter(model, config, str(folder / "model"), folder / name, cpu_world())
    return folder


def joined(folder: Path, names: Any, output: Path, *words: str) -> Path:
    parts = [{"path": str(folder / name), "weight": WEIGHTS.get(name, 0.6)} for name in names]
    argv = ["--config", str(ROOT / "configs/join.yaml"), f"adapters={json.dumps(parts)}"]
    run_recipe("merge", [*argv, f"output_dir={output}", *words])
    return output


def products(adapter: Path) -> dict[str, Tensor]:
    """The product of every linear, times its scale."""
    tensors = load_file(adapter / WEIGHTS_FILE)
    written = json.loads((adapter / CONFIG_FILE).read_text())
    assert written["r"] == written["lora_alpha"] and not written["use_rslora"]
    assert written.get("rank_pattern", {}) == written.get("alpha_pattern", {})
    return {
        key: tensors[key.replace("lora_A", "lora_B")] @ a
        for key, a in tensors.items()
        if "lora_A" in key
    }


# PEFT starts the new adapter at random, so the seed of dare is set after that.
SCRIPT = """
import json
import peft

result, weights = {}, json.loads(arguments[1])
for name, (adapters, method, settings) in json.loads(arguments[0]).items():
    adapters = list(adapters)
    model = peft.PeftModel.from_pretrained(base_model(), f"{folder}/{adapters[0]}", adapters[0])
    for adapter in adapters[1:]:
        model.load_adapter(f"{folder}/{adapter}", adapter)
    tuner = model.base_model
    inject = tuner.inject_adapter
    def seeded(*args, **kwargs):
        inject(*args, **kwargs)
        torch.manual_seed(3)
    tuner.inject_adapter = seeded
    given = [weights.get(adapter, 0.6) for adapter in adapters]
    tuner.add_weighted_adapter(adapters, given, "joined", method, **settings)
    found = {}
    for key, module in model.named_modules():
        if hasattr(module, "lora_A") and "joined" in module.lora_A:
            product = module.lora_B["joined"].weight @ module.lora_A["joined"].weight
            found[f"{key}.lora_A.weight"] = product.detach()
    result[name] = found
torch.save(result, f"{folder}/result.pt")
"""


@pytest.mark.long
def test_every_method_is_that_of_peft(folder: Path, tmp_path: Path) -> None:
    base = load_file(folder / "model/model.safetensors")
    tokens = torch.zeros(1, 1, dtype=torch.long)
    words = json.dumps(CASES), json.dumps(WEIGHTS)
    theirs = run_peft(SCRIPT, folder / "model", base, tokens, folder, *words)
    for name, (adapters, method, settings) in CASES.items():
        keys = {"svd_rank": "joined_rank"}
        given = [f"{keys.get(key, key)}={value}" for key, value in settings.items()]
        words = [f"method={method}", "into=adapter", "seed=3", *given]
        ours = products(joined(folder, adapters, tmp_path / name, *words))
        assert ours.keys() == theirs[name].keys(), name
        worst = max((ours[k] - p).abs().max().item() for k, p in theirs[name].items())
        print(f"{name}: {len(ours)} products differ by {worst:.1e}")
        assert worst < 2e-6, name
        assert max(product.abs().max().item() for product in ours.values()) > 0.03


@pytest.mark.long
def test_into_the_base_on_two_ranks(folder: Path, tmp_path: Path) -> None:
    words = ["joined_rank=13", "dtype=fp32", "model.dtype=fp32", "quantization.format=none"]
    run_ranks(2, joined, folder, ["a", "b", "low"], tmp_path / "model", *words)
    merged = load_file(tmp_path / "model/model.safetensors")
    base = load_file(folder / "model/model.safetensors")
    expected = dict(base)
    for name in ("a", "b", "low"):
        tensors = load_file(folder / name / WEIGHTS_FILE)
        for key, a in tensors.items():
            if "lora_A" in key:
                scale = WEIGHTS.get(name, 0.6) * ADAPTERS[name].scaling
                weight = key.removeprefix("base_model.model.").replace("lora_A.", "")
                product = scale * tensors[key.replace("lora_A", "lora_B")] @ a
                expected[weight] = expected[weight] + product
    for name, value in merged.items():
        assert (value - expected[name]).abs().max() < 2e-6, name
    assert (merged["lm_head.weight"] - base["lm_head.weight"]).abs().max() > 0.01
    assert (tmp_path / "model_adapter" / CONFIG_FILE).is_file()


def test_dare_keeps_a_share_and_the_mean(folder: Path, tmp_path: Path) -> None:
    words = ["method=dare_linear", "into=adapter", "density=0.25"]
    one, two, other = (
        load_file(joined(folder, "a", tmp_path / at, *words, f"seed={seed}") / WEIGHTS_FILE)
        for seed, at in ((0, "one"), (0, "again"), (1, "other"))
    )
    whole = load_file(folder / "a" / WEIGHTS_FILE)
    numbers = torch.cat([tensor.flatten() for tensor in one.values()])
    assert (numbers != 0).float().mean() == pytest.approx(0.25, abs=0.01)
    factor = (WEIGHTS["a"] * ADAPTERS["a"].scaling) ** 0.5
    before = torch.cat([whole[key].flatten() for key in one]) * factor
    kept = numbers != 0
    assert torch.allclose(numbers[kept], 4 * before[kept])
    assert all(torch.equal(two[key], value) for key, value in one.items())
    assert not all(torch.equal(other[key], value) for key, value in one.items())


def test_factors_beyond_the_rank_of_the_sum() -> None:
    torch.manual_seed(0)
    a, b = [torch.randn(2, 7), torch.randn(1, 7)], [torch.randn(5, 2), torch.randn(5, 1)]
    whole = 0.5 * b[0] @ a[0] - 2.0 * b[1] @ a[1]
    for rank in (1, 2, 3, 6):
        best_a, best_b = best_factors(a, b, [0.5, -2.0], rank)
        assert best_a.shape == (rank, 7) and best_b.shape == (5, rank)
        u, s, v = torch.linalg.svd(whole, full_matrices=False)
        assert torch.allclose(best_b @ best_a, (u * s)[:, :rank] @ v[:rank], atol=1e-5)


@pytest.mark.parametrize(
    "names, words, message",
    [
        (
            ["a", "low"],
            ["method=linear"],
            r"adapters\[1\]: rank 3, and adapters\[0\] has rank 5 \(",
        ),
        (["a", "dora"], [], r"adapters\[1\]: '.*dora' is DoRA; expected LoRA"),
        (["a", "other"], [], r"adapters\[1\]: '.*/other' was trained over 'org/x', and '"),
        (["a", "none"], [], r"none does not exist"),
        (["a"], ["adapter=x"], "adapter: 'x' is not valid; expected a folder, or null and several"),
        ([], [], "adapter: None is not valid; expected a folder, or null and several `adapters`"),
        (["a"], ["density=0"], "density: 0.0 is not valid; expected a share above 0, at most 1"),
        (["a"], ["joined_rank=4", "method=ties"], "joined_rank: 4 is not valid; expected null, or"),
        (["a"], ["method=tie"], "method: 'tie' is not valid"),
    ],
)
def test_mistakes_are_one_line(
    names: list[str], words: list[str], message: str, folder: Path, tmp_path: Path
) -> None:
    other = folder / "other"
    if not other.is_dir():
        other.mkdir()
        (other / WEIGHTS_FILE).symlink_to(folder / "a" / WEIGHTS_FILE)
        written = json.loads((folder / "a" / CONFIG_FILE).read_text())
        text = json.dumps(written | {"base_model_name_or_path": "org/x"})
        (other / CONFIG_FILE).write_text(text)
    with pytest.raises((InvalidField, UserError), match=message) as error:
        joined(folder, names, tmp_path / "out", *words)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_over_a_quantized_folder(folder: Path, tmp_path: Path) -> None:
    """The adapter is that of the plain folder: both have the same linears."""
    words = [f"model.path={folder}/model", f"output_dir={tmp_path}/nf4"]
    run_recipe("quantize", ["--config", str(ROOT / "configs/quantize.yaml"), *words])
    plain = joined(folder, ["a", "low"], tmp_path / "plain", "into=adapter")
    words = ["into=adapter", f"model.path={tmp_path}/nf4"]
    other = joined(folder, ["a", "low"], tmp_path / "other", *words)
    assert (other / WEIGHTS_FILE).read_bytes() == (plain / WEIGHTS_FILE).read_bytes()


def test_names_on_the_hub_are_found() -> None:
    """Each by its place in the list, so that it is downloaded before the run."""
    recipe = load_recipe("merge")
    argv = ["--config", str(ROOT / "configs/join.yaml"), "model.path=org/base"]
    parts = "adapters=[{path: org/one}, {path: org/two@main, weight: 2}]"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe.Config, "below", lambda tree: {})
        cfg = load_config(recipe.Config, [*argv, parts])
    assert _names(cfg) == {
        "org/base": ("model.path", "model"),
        "org/one": ("adapters.0", "adapter"),
        "org/two@main": ("adapters.1", "adapter"),
    }
    assert [part.weight for part in cfg.adapters] == [1.0, 2.0]


def test_ranks_of_their_own_are_joined_and_read(folder: Path, tmp_path: Path) -> None:
    """PEFT's result of such adapters cannot be loaded (huggingface/peft#3737)."""
    config = AdapterConfig(
        "lora", 5, 7.0, targets=["q_proj", "v_proj"], rslora=True, rank_pattern={"q_proj": 3}
    )
    model = adapted_model(folder / "model", config, format="none")
    randomize_adapters(model)
    save_adapter(model, config, str(folder / "model"), tmp_path / "own", cpu_world())
    output = joined(tmp_path, ["own", "own"], tmp_path / "joined", "method=linear", "into=adapter")
    found = read_adapter_config(output)
    again = adapted_model(folder / "model", found, format="none")
    check_adapter(found, output, again)
    load_adapter(again, output)
    for name, module in low_rank_linears(again):
        assert (module.lora_A.size(0), module.scaling) == (3 if "q_proj" in name else 5, 1.0)
        before = model.get_submodule(name)
        whole = (2 * 0.6**0.5) ** 2 * before.scaling * before.lora_B @ before.lora_A
        assert torch.allclose(module.lora_B @ module.lora_A, whole, atol=1e-6)
