"""Every shipped config runs its recipe on a model of its family, made small."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from jinja2 import Environment
from safetensors.torch import load_file

from docs import article, reports
from qfsdp.checkpoint.adapter_config_file import WEIGHTS_FILE
from qfsdp.checkpoint.adapter_files import save_adapter
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.config.load import load_config
from qfsdp.config.recipe_files import recipe_of_config
from qfsdp.modules.adapters.config import AdapterConfig
from tests import hub_models
from tests.json_lines import metric_lines
from tests.models import adapted_model, cpu_world
from tests.tiny import (
    ROOT,
    load_recipe,
    write_tiny_model,
    write_tiny_model_with_tokenizer,
)

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
FOLDERS = (
    "add_tokens",
    "block_expansion",
    "join",
    "merge",
    "quantize",
)  # recipes that write a model folder
SWEEPS = [config for config in CONFIGS if config.stem.startswith("sweep_")]
# Files that sweeps read.
DATA = ("prices", "published_2x24gb", "published_7b", "published_70b_machines")
NOT_TRAINING = ("chat", "doctor", "evaluate", "export", "generate", "judge", "score", "serve")
OF_OTHER_TESTS = ("smollm2_135m_several",)  # tests/recipes/test_several_adapters.py
OTHERS = (*FOLDERS, *DATA, *NOT_TRAINING, *OF_OTHER_TESTS)
TRAINING = [c for c in CONFIGS if c.stem not in OTHERS and c not in SWEEPS]
TRAINERS = (
    *("recipes/qdora_distributed", "recipes/full_finetune_distributed"),
    *("recipes/dpo_distributed", "recipes/reward_distributed", "recipes/distill_distributed"),
)
# What `make test` runs: a method, a recipe or a family each.
SHORT = (
    "llama3_70b_qdora",
    "llama3_8b_dpo",
    "llama3_8b_full",
    "llama3_8b_hqq_dora",
    "llama3_8b_llama_pro",
    "qwen3_30b_a3b_qlora",
    "smollm2_135m_ia3",
    "smollm2_135m_miss",
    "smollm2_135m_reward",
)
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 64}
FAMILIES = {
    "qwen3_30b_a3b": {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "num_experts": 4},
    "olmoe": {"architectures": ["OlmoeForCausalLM"], **EXPERTS, "num_experts": 4},
    "mixtral": {"architectures": ["MixtralForCausalLM"], **EXPERTS, "num_local_experts": 4},
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], **EXPERTS, "num_local_experts": 4},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2_5": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 32,
        "sliding_window": 64,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "phi4": {"architectures": ["Phi3ForCausalLM"]},
}
# Whole models whose text model transformers computes, as tests/hub_models.py has them small.
OF_TRANSFORMERS = {
    "qwen3_5": "qwen3_5_whole",
    "qwen3_6": "qwen3_5_moe",
    "gemma4": "gemma4_whole",
    "glm4_7": "glm4_7",
    "gemma3_12b": "gemma3",
    "mistral_small": "mistral3",
}
# Format by the end of a config's name; nf4 otherwise.
FORMATS = {"_lora": "none", "_full": "none", "_hqq_dora": "hqq"}
ROW = {"instruction": "Add.", "input": "2 + 3", "output": "5", "question": "2 + 3?", "answer": "5"}
ROW |= {"prompt": "2 + 3?", "chosen": "It is 5.", "rejected": "It is 6, I think."}
ROW["text"] = "### Human: 2 + 3?### Assistant: 5"  # Guanaco's form


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(c, id=c.stem, marks=[] if c.stem in SHORT else [pytest.mark.long])
        for c in TRAINING
    ],
)
@pytest.mark.usefixtures("eager")
def test_two_updates(config: Path, smollm2_dir: Path, tmp_path: Path) -> None:
    whole = (hub for name, hub in OF_TRANSFORMERS.items() if config.stem.startswith(name))
    if (of_transformers := next(whole, None)) is not None:
        model = hub_models.with_tokenizer(of_transformers, tmp_path / "model", smollm2_dir)
    else:
        family = next((f for name, f in FAMILIES.items() if config.stem.startswith(name)), {})
        model = write_tiny_model_with_tokenizer(
            tmp_path / "model", smollm2_dir, hidden_size=96, expanded_layers=[1], **family
        )
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(ROW) + "\n" for _ in range(64)))
    name = recipe_of_config(str(config)) or ""
    recipe = load_recipe(name.removeprefix("recipes/"))
    argv = ["--config", str(config), "max_steps=2", "max_seq_len=128", "batch_size=2"]
    argv += ["gradient_accumulation_steps=2"]
    of_schedule = {"num_warmup_steps": "num_warmup_steps=0", "total_iters": "total_iters=1"}
    argv += [f"lr_scheduler.{w}" for k, w in of_schedule.items() if k in config.read_text()]
    argv += [f"output_dir={tmp_path}/run", f"model.path={model}", f"dataset.source={data}"]
    argv += ["dataset.split=train"] if "split" in config.read_text() else []  # of one file
    if "context_parallel" in config.read_text():
        argv.append("sharding.context_parallel=1")  # here is one rank
    if name == TRAINERS[-1]:
        argv += [f"teacher.model.path={model}", "teacher.adapter=null", "distillation.weight=0.5"]
    full = name == TRAINERS[1]
    if full or "lr: 1e-5" in config.read_text():
        argv.append("optimizer.lr=1e-3")  # the default changes too little
    argv += [] if full else ["adapter.dropout=0"]
    cfg = load_config(recipe.Config, argv)
    recipe.check(cfg)
    recipe.main(cfg)
    lines = metric_lines(tmp_path / "run")
    assert len(lines) == 2 and lines[1]["loss"] < lines[0]["loss"]
    of_name = (f for end, f in FORMATS.items() if config.stem.endswith(end))
    assert cfg.quantization.format == next(of_name, "nf4")
    if full:
        written, before = ModelWeights(tmp_path / "run/model"), ModelWeights(model)
        assert written.plain.keys() == before.plain.keys() and not written.quantized
        assert cfg.trainable.layers == ("all" if config.stem.endswith("_full") else "expanded")
        return
    adapter = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    assert adapter.get("use_dora", False) == ("dora" in config.stem)
    size = sum(t.numel() for t in load_file(tmp_path / "run/adapter" / WEIGHTS_FILE).values())
    assert lines[0]["trained/parameters"] == size and "trained/mb" not in lines[1]
    assert lines[0]["trained/mb"] == 4 * size / 1e6 and 0 < lines[0]["trained/percent"] < 100
    card = (tmp_path / "run/adapter/README.md").read_text()
    told = (
        f"{size:,} parameters, {lines[0]['trained/percent']:.3g} % of all, {4 * size / 1e6:,.4g} MB"
    )
    assert f"| trained | {told} |" in card


def test_the_page_of_reports_is_written_from_its_rows() -> None:
    assert reports.main(["--check"]) == 0
    text = reports.page()
    assert text.count("| none |") >= 4 and text.count("| estimated, ") >= 10
    with pytest.raises(ValueError, match="kind 'none' with 3"):
        reports.section(
            {"report": "", "source": "", "rows": [{"kind": "none", "ours": 3, "claim": ""}]}
        )


def test_configs_of_the_article_are_written_from_its_list() -> None:
    """Each is valid, and what differs between its sizes and methods is what the article varies."""
    assert len(article.configs()) == 16 and article.main(["--check"]) == 0
    read = {}
    for name in article.configs():
        file = ROOT / f"configs/{name}.yaml"
        recipe = load_recipe((recipe_of_config(str(file)) or "").removeprefix("recipes/"))
        read[name] = load_config(recipe.Config, ["--config", str(file)])
    assert {cfg.optimizer.kwargs["lr"] for cfg in read.values()} == {1e-5}
    rows = {name: cfg.dataset.kwargs["max_rows"] for name, cfg in read.items()}
    assert all(rows[name] == (10_000 if "_10k_" in name else 100_000) for name in read)
    assert read["article_10k_llama2_full"].sharding.cpu_offload
    template = read["article_10k_llama2_qdora"].tokenizer.kwargs["chat_template"]
    chat = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]
    text = (
        Environment().from_string(template).render(messages=chat, bos_token="<s>", eos_token="</s>")
    )
    assert text == "<s>###Question:\n2+3?\n###Answer:\n5</s>"


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.usefixtures("eager")
def test_model_folders_are_written(name: str, smollm2_dir: Path, tmp_path: Path) -> None:
    write = partial(write_tiny_model_with_tokenizer, tokenizer=smollm2_dir)
    write = write if name == "add_tokens" else write_tiny_model
    model = write(tmp_path / "model", hidden_size=96)
    argv = ["--config", str(ROOT / f"configs/{name}.yaml"), f"model.path={model}"]
    argv.append(f"output_dir={tmp_path}/out")
    if name == "merge":
        adapter = AdapterConfig("dora", rank=2)
        folder = tmp_path / "adapter"
        save_adapter(adapted_model(model, adapter), adapter, str(model), folder, cpu_world())
        argv.append(f"adapter={folder}")
    if name == "join":
        adapter = AdapterConfig("lora", rank=2)
        parts = [{"path": f"{tmp_path}/{part}"} for part in ("one", "two")]
        for part in parts:
            model_of = adapted_model(model, adapter)
            save_adapter(model_of, adapter, str(model), Path(part["path"]), cpu_world())
        argv += [f"adapters={json.dumps(parts)}", "dtype=fp32"]
    if name == "block_expansion":
        argv.append("rate=0.5")
    recipe = load_recipe("merge" if name == "join" else name)
    cfg = load_config(recipe.Config, argv)
    recipe.check(cfg)
    recipe.main(cfg)
    written = ModelWeights(tmp_path / "out")
    assert len(written.quantized) == (14 if name == "quantize" else 0)
    assert written.quantized.keys() | written.plain.keys() >= ModelWeights(model).plain.keys()


@pytest.mark.long
@pytest.mark.parametrize("config", SWEEPS, ids=[c.stem for c in SWEEPS])
def test_a_cell_of_a_sweep(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell's config is valid, every published figure has its cell, and one cell is run: an
    estimate by the model's name, or steps of the tiny model."""
    monkeypatch.chdir(ROOT)
    sweep = load_recipe("sweep")
    cfg = load_config(sweep.Config, ["--config", str(config), f"output_dir={tmp_path}/out"])
    whole = sweep.read_sweep(cfg)
    assert len(whole.cells) >= 9 and (len(whole.published) >= 9) == (cfg.mode == "estimate")
    assert not [cell.error for cell in whole.cells if cell.error]  # none is refused
    if cfg.mode == "steps":
        return  # tests/recipes/test_sweep.py runs such steps
    gpus = {str(cell.own.get("gpu", cfg.gpu)) for cell in whole.cells}
    assert all(whole.prices[gpu].usd_per_hour > 0 for gpu in gpus)
    row = sweep.fill_in(cfg, whole, whole.cells[0], [])
    fits = row["memory_gib"] < 24  # GiB of the cards of the first cells
    assert row["status"] == ("fits" if fits else "does not fit") and row["memory_gib"] > 3


@pytest.mark.parametrize("config", CONFIGS, ids=[c.stem for c in CONFIGS])
def test_header_is_the_command_that_runs_it(config: Path) -> None:
    first = config.read_text().splitlines()[0]
    if config.stem in DATA:
        found = re.match(r"# tune run recipes/sweep --config (configs/\w+.yaml)", first)
        assert found is not None and (ROOT / found[1]) in SWEEPS
        return
    found = re.fullmatch(rf"# tune run (recipes/\w+) --config configs/{config.name}", first)
    assert found is not None and (ROOT / f"{found[1]}.py").is_file()
    assert (found[1] in TRAINERS) == (config in TRAINING)
