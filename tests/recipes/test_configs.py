"""Every shipped config runs its recipe on a model of its family, made small."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from qfsdp.checkpoint.export import save_adapter
from qfsdp.checkpoint.sources import ModelWeights
from qfsdp.config import load_config
from qfsdp.modules.adapters import AdapterConfig
from tests.models import adapted_model, cpu_world
from tests.tiny import ROOT, load_recipe, write_tiny_model, write_tiny_model_with_tokenizer

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
TRAINING = [config for config in CONFIGS if config.stem not in ("merge", "quantize")]
FAMILIES = {
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2_5": {"architectures": ["Qwen2ForCausalLM"]},
}
ROW = {"instruction": "Add.", "input": "2 + 3", "output": "5", "question": "2 + 3?", "answer": "5"}


@pytest.mark.parametrize("config", TRAINING, ids=[c.stem for c in TRAINING])
def test_two_updates(config: Path, smollm2_dir: Path, tmp_path: Path) -> None:
    family = next((f for name, f in FAMILIES.items() if config.stem.startswith(name)), {})
    model = write_tiny_model_with_tokenizer(
        tmp_path / "model", smollm2_dir, hidden_size=96, **family
    )
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(ROW) + "\n" for _ in range(64)))
    recipe = load_recipe()
    argv = ["--config", str(config), "max_steps=2", "max_seq_len=128", "batch_size=2"]
    argv += ["gradient_accumulation_steps=2", "lr_scheduler.num_warmup_steps=0"]
    argv += [f"output_dir={tmp_path}/run", f"model.path={model}", f"dataset.source={data}"]
    cfg = load_config(recipe.Config, argv)
    recipe.check(cfg)
    recipe.main(cfg)
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and lines[1]["loss"] < lines[0]["loss"]
    adapter = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    assert adapter["use_dora"] == config.stem.endswith("dora")
    assert cfg.quantization.format == ("none" if config.stem.endswith("_lora") else "nf4")


@pytest.mark.parametrize("name", ["merge", "quantize"])
@pytest.mark.usefixtures("eager")
def test_model_folders_are_written(name: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden_size=96)
    argv = ["--config", str(ROOT / f"configs/{name}.yaml"), f"model.path={model}"]
    argv.append(f"output_dir={tmp_path}/out")
    if name == "merge":
        adapter = AdapterConfig("dora", rank=2)
        folder = tmp_path / "adapter"
        save_adapter(adapted_model(model, adapter), adapter, str(model), folder, cpu_world())
        argv.append(f"adapter={folder}")
    recipe = load_recipe(name)
    cfg = load_config(recipe.Config, argv)
    recipe.check(cfg)
    recipe.main(cfg)
    written = ModelWeights(tmp_path / "out")
    assert len(written.packed) == (14 if name == "quantize" else 0)
    assert written.packed.keys() | written.plain.keys() >= ModelWeights(model).plain.keys()


@pytest.mark.parametrize("config", CONFIGS, ids=[c.stem for c in CONFIGS])
def test_header_is_the_command_that_runs_it(config: Path) -> None:
    first = config.read_text().splitlines()[0]
    found = re.fullmatch(rf"# tune run (recipes/\w+) --config configs/{config.name}", first)
    assert found is not None and (ROOT / f"{found[1]}.py").is_file()
    assert (found[1] == "recipes/qdora_distributed") == (config in TRAINING)
