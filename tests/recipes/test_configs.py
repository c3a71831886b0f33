"""Every shipped config runs: two updates of its recipe on a model of its family, made small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qfsdp.config import load_config
from tests.tiny import ROOT, load_recipe, write_tiny_model_with_tokenizer

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
FAMILIES = {
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2_5": {"architectures": ["Qwen2ForCausalLM"]},
}
ROW = {"instruction": "Add.", "input": "2 + 3", "output": "5", "question": "2 + 3?", "answer": "5"}


@pytest.mark.parametrize("config", CONFIGS, ids=[c.stem for c in CONFIGS])
def test_config_runs(config: Path, smollm2_dir: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("config", CONFIGS, ids=[c.stem for c in CONFIGS])
def test_header_is_the_command_that_runs_it(config: Path) -> None:
    first = config.read_text().splitlines()[0]
    assert first == f"# tune run recipes/qdora_distributed --config configs/{config.name}"
