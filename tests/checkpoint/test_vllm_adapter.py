"""Adapters for vLLM: what its loader takes is copied, what it refuses is named with the way out."""

from __future__ import annotations

from pathlib import Path
from shlex import split
from typing import Any

import pytest

from qfsdp.checkpoint.adapter_files import WEIGHTS_FILE
from qfsdp.checkpoint.export.vllm_adapter import plan_adapter
from qfsdp.checkpoint.saved_template import TEMPLATE_FILE
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.output_folder import check_output
from qfsdp.checkpoint.weights.quantize import quantize_folder
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.quantized_linear import QuantizationConfig
from tests.checkpoint.test_merge import logits, plain_model, trained
from tests.models import cpu_world
from tests.tiny import ROOT, load_recipe, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")


def exported(model: Path, adapter: object, output: Path, *words: str) -> Path:
    recipe = load_recipe("export")
    argv = ["--config", str(ROOT / "configs/export.yaml"), f"model.path={model}", "format=lora"]
    cfg = load_config(recipe.Config, [*argv, f"adapter={adapter}", f"output_dir={output}", *words])
    recipe.check(cfg)
    recipe.main(cfg)
    return output


def test_lora_goes_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PEFT computes the same from the copy; the names are those that vLLM 0.33 parses
    (`parse_fine_tuned_lora_name`)."""
    from peft import PeftModel
    from safetensors.torch import load_file

    model_dir = write_tiny_model(tmp_path / "model")
    adapter = tmp_path / "adapter"
    ours = trained(model_dir, AdapterConfig("lora", 5, 7.0), adapter, format="none")
    (adapter / TEMPLATE_FILE).write_text("{{ messages }}")
    (adapter / "README.md").write_text("a card")
    out = exported(model_dir, adapter, tmp_path / "mine")
    files = {file.name for file in out.iterdir()}
    assert files == {"adapter_config.json", WEIGHTS_FILE, TEMPLATE_FILE}
    theirs = PeftModel.from_pretrained(plain_model(model_dir), str(out))
    assert (logits(theirs) - logits(ours)).abs().max() < 1e-4
    for name in load_file(out / WEIGHTS_FILE):
        *prefix, field, weight = name.split(".")
        assert prefix[:2] == ["base_model", "model"] and weight == "weight"
        assert field in ("lora_A", "lora_B")
    spaces = plan_adapter(ModelWeights(model_dir), "my base", adapter).command(tmp_path / "a b")
    words = ["my base", "8", f"a b={tmp_path}/a b", f"{tmp_path}/a b/{TEMPLATE_FILE}"]
    assert [split(spaces)[at] for at in (2, 5, 7, 9)] == words
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"adapter for vLLM: vllm serve {model_dir} --enable-lora --max-lora-rank 8 "
        f"--lora-modules mine={out} --chat-template {out / TEMPLATE_FILE}"
    )


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_experts": 4, "head_dim": 32}
MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS}


@pytest.mark.parametrize(
    ("section", "changes", "reason"),
    [
        (AdapterConfig("dora", 5, 7.0), {}, "is DoRA, which vLLM does not load"),
        (AdapterConfig("ia3"), {}, "is IA3, which vLLM does not load"),
        (
            AdapterConfig("lora", 520, targets=["up_proj"]),
            {},
            "has rank 520, and vLLM serves at most 512",
        ),
        (AdapterConfig("lora", 2), MIXTURE, "adapts experts, which vLLM loads with options of its"),
    ],
)
def test_what_vllm_refuses_is_merged(
    section: AdapterConfig, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model, adapter = write_tiny_model(tmp_path / "model", **changes), tmp_path / "adapter"
    trained(model, section, adapter, format="none")
    with pytest.raises(UserError) as error:
        exported(model, adapter, tmp_path / "out")
    message = str(error.value)
    assert message.startswith(f"adapter: '{adapter}' {reason}")
    command = f"model.path={model} adapter={adapter} output_dir=models/merged"
    assert message.endswith(f"tune run recipes/merge --config configs/merge.yaml {command}")
    assert len(message.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    model, other = (write_tiny_model(tmp_path / str(size), hidden_size=size) for size in (192, 96))
    trained(model, AdapterConfig("lora", 5), tmp_path / "adapter", format="none")
    with pytest.raises(UserError, match=r"lora_A.weight' has shape \[5, 192\]; expected \[5, 96\]"):
        exported(other, tmp_path / "adapter", tmp_path / "out")
    with pytest.raises(
        UserError, match="adapter: None is not valid; expected the folder of an ada"
    ):
        exported(model, "null", tmp_path / "out")


def test_bases_that_are_quantized(tmp_path: Path) -> None:
    """vLLM loads those of bitsandbytes."""
    model = write_tiny_model(tmp_path / "model", vocab_size=576, intermediate_size=576)
    trained(model, AdapterConfig("lora", 5, 7.0), tmp_path / "adapter")
    weights, config = ModelWeights(model), QuantizationConfig()
    quantize_folder(weights, config, tmp_path / "bnb", cpu_world(), layout="bnb")
    quantize_folder(weights, config, tmp_path / "ours", cpu_world())
    out = exported(tmp_path / "bnb", tmp_path / "adapter", tmp_path / "out")
    assert (out / WEIGHTS_FILE).read_bytes() == (tmp_path / "adapter" / WEIGHTS_FILE).read_bytes()
    with pytest.raises(UserError, match="own layout, which vLLM does not load; expected the orig"):
        exported(tmp_path / "ours", tmp_path / "adapter", tmp_path / "mine")


def test_an_export_that_was_killed_is_made_again(tmp_path: Path) -> None:
    left = ("adapter_model.safetensors", ".adapter_config.json.1.partial")
    for name in left:
        (tmp_path / name).write_text("")
    check_output(tmp_path, left[:1])
    with pytest.raises(UserError, match="is not empty; expected a new folder"):
        check_output(tmp_path)
    (tmp_path / "adapter_config.json").write_text("")
    with pytest.raises(UserError, match="is not empty; expected a new folder"):
        check_output(tmp_path, left[:1])
