"""Models of transformers, merged with an adapter: PEFT's merge of the same adapter."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qfsdp.checkpoint.adapter_files import WEIGHTS_FILE, save_adapter
from qfsdp.checkpoint.weights.convert import stored_whole
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.safetensors_folder import SINGLE
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.hub_models.config import Implementation
from qfsdp.modules.low_rank.adapted import adapted_linears
from tests import hub_models
from tests.hub_models import built
from tests.models import cpu_world
from tests.modules.test_hub_models import batch
from tests.peft_oracle import dequantized_base
from tests.tiny import ROOT, load_recipe, run_recipe

IA3_TARGETS = {"lfm2": "w2", "gpt2": "c_attn", "falcon": "query_key_value"}

pytestmark = pytest.mark.usefixtures("eager")


def words(recipe: str, folder: Path, *more: str, by: Implementation = "transformers") -> list[str]:
    """The shipped config of a recipe for the model in `folder`."""
    given = [f"model.path={folder}/model", f"model.implementation={by}"]
    given += [f"output_dir={folder}/out", *more]
    return ["--config", str(ROOT / f"configs/{recipe}.yaml"), *given]


@pytest.mark.parametrize("method", ["dora", pytest.param("ia3", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", hub_models.PARAMETERS)
def test_a_merged_folder_equals_pefts_merge(name: str, method: Any, tmp_path: Path) -> None:
    check_merge(name, method, tmp_path, "transformers")


@pytest.mark.parametrize(
    "name",
    ["qwen3_5_whole", pytest.param("qwen3_5", marks=pytest.mark.long)],
)
def test_one_of_our_own_layers_of_two_kinds_does_too(name: str, tmp_path: Path) -> None:
    """Of a whole model all other tensors, also those that predict further tokens, are kept."""
    check_merge(name, "dora", tmp_path, "native")


def check_merge(name: str, method: Any, tmp_path: Path, by: Implementation) -> None:
    from peft import PeftModel

    reference: Any = hub_models.save_hub_model(name, tmp_path / "model")
    adapter = hub_models.adapter_of(name)
    if method == "ia3":
        adapter = AdapterConfig("ia3", targets=[IA3_TARGETS.get(name, "down_proj")])
        if name in ("deepseek_v3", "qwen3_5_moe", "glm4_7"):  # its down_proj also names experts
            adapter = AdapterConfig("ia3", targets=["o_proj"])
    model = built(tmp_path / "model", adapter, implementation=by)
    save_adapter(model, adapter, str(tmp_path / "model"), tmp_path / "adapter", cpu_world())
    given = ["dtype=fp32", "model.dtype=fp32", f"adapter={tmp_path}/adapter"]
    run_recipe("merge", words("merge", tmp_path, *given, by=by))

    held = dequantized_base(model)
    reference.load_state_dict(held, strict=False)
    peft: Any = PeftModel.from_pretrained(reference, str(tmp_path / "adapter"))
    expected = peft.merge_and_unload().eval()
    merged, info = type(reference).from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = expected.state_dict()
    for key, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, theirs[key], atol=1e-6, rtol=1e-5, msg=key)
    tokens, _ = batch()
    with torch.no_grad():
        ours = model(tokens)
        torch.testing.assert_close(merged.eval()(tokens).logits, ours, atol=1e-4, rtol=1e-5)

    before, after = (load_file(tmp_path / folder / SINGLE) for folder in ("model", "out"))
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    weights = ModelWeights(tmp_path / "model", by)
    linears = model.linears if by == "transformers" else [n for n, _ in adapted_linears(model)]
    held_in = [stored_whole(weights, f"{name}.weight").shapes for name in linears]
    assert changed == {key for shapes in held_in for key in shapes}
    written = [json.loads((tmp_path / f / "config.json").read_text()) for f in ("model", "out")]
    assert written[0]["architectures"] == written[1]["architectures"]
    before, after = (config.get("text_config") or {} for config in written)
    before.pop("dtype", None)
    assert after == (before | {"torch_dtype": "float32"} if before else {})


def test_a_merge_of_a_plain_base_keeps_the_bytes_of_all_others(tmp_path: Path) -> None:
    hub_models.save_hub_model("lfm2", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text()) | {"time_step_limit": [0.0, math.inf]}  # Nemotron-H
    file.write_text(json.dumps(config))
    adapter = AdapterConfig("lora", rank=4, alpha=8, targets=["w1"])
    model = built(tmp_path / "model", adapter)
    save_adapter(model, adapter, str(tmp_path / "model"), tmp_path / "adapter", cpu_world())
    given = [f"adapter={tmp_path}/adapter", "quantization.format=none"]
    run_recipe("merge", words("merge", tmp_path, *given))
    before, after = (load_file(tmp_path / folder / SINGLE) for folder in ("model", "out"))
    for key, tensor in before.items():
        adapted = key.endswith(".w1.weight")
        assert after[key].dtype == (torch.bfloat16 if adapted else torch.float32)
        assert adapted or torch.equal(after[key], tensor)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("dtype") == "float32" and written.pop("torch_dtype") == "bfloat16"
    assert written == config
    given = [f"adapter={tmp_path}/adapter", "format=lora", f"output_dir={tmp_path}/lora"]
    run_recipe("export", words("export", tmp_path, *given))
    copied = (tmp_path / "lora" / WEIGHTS_FILE).read_bytes()
    assert copied == (tmp_path / "adapter" / WEIGHTS_FILE).read_bytes()


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("quantize", []),
        ("export", ["adapter=null", "format=gguf"]),
        ("export", ["adapter=null", "format=w4a16"]),
    ],
)
def test_commands_that_need_our_decoder_say_so(
    recipe: str, more: list[str], tmp_path: Path
) -> None:
    hub_models.save_hub_model("llama", tmp_path / "model")
    module = load_recipe(recipe)
    with pytest.raises(UserError) as error:
        module.check(load_config(module.Config, words(recipe, tmp_path, *more)))
    message = str(error.value)
    assert "model.implementation: 'transformers' takes transformers' LlamaForCausalLM" in message
    assert "expected a model that qfsdp builds itself" in message and "\n" not in message


def test_what_cannot_be_merged_is_one_line(tmp_path: Path) -> None:
    hub_models.save_hub_model("llama", tmp_path / "model")
    adapter = AdapterConfig("lora", rank=4, alpha=8)
    model = built(tmp_path / "model", adapter)
    save_adapter(model, adapter, str(tmp_path / "model"), tmp_path / "adapter", cpu_world())
    recipe = load_recipe("merge")
    given = words("merge", tmp_path, f"adapter={tmp_path}/adapter", "requantize=nf4-bnb")
    with pytest.raises(UserError, match="requantize: nf4-bnb; expected none"):
        recipe.check(load_config(recipe.Config, given))
