"""Mixtures of experts from random weights to answers, each step by its recipe.

A tiny Qwen3-MoE is trained on arithmetic problems, quantized, finetuned with adapters on experts,
merged, and asked. A tiny gpt-oss takes the same way from MXFP4 weights as they are published.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from examples.demo.arithmetic import write_splits
from qfsdp.checkpoint.adapter_files import WEIGHTS_FILE, adapter_parameters, read_adapter_config
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.checkpoint.weights.safetensors_folder import SINGLE
from qfsdp.checkpoint.weights.save import save_model
from qfsdp.config.load import load_config
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.evaluation.inference_model import load_for_inference
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.tensor_subclasses.dtensor import local_part
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from tests.checkpoint.test_experts_in_files import reference, rows_of, with_blocks
from tests.json_lines import json_lines
from tests.models import adapted_model, cpu_world, load_model
from tests.peft_oracle import run_peft
from tests.ranks import run_ranks
from tests.recipes.test_families import logits, losses, run_recipe
from tests.tiny import ROOT, load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("eager")]
RANKS = 2
SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "vocab_size": 512}
SIZES |= {"max_position_embeddings": 256}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
CONFIG = """
tokenizer: {{_component_: qfsdp.data.hf_tokenizer, path: {folder}, max_seq_len: 192}}
dataset:
  _component_: qfsdp.data.instruct_dataset
  source: {folder}/train.jsonl
  prompt_column: question
optimizer: {{_component_: torch.optim.AdamW, lr: 3e-3, fused: true}}
batch_size: 8
max_seq_len: 192
epochs: 99
report: false
preflight: false
"""
# PEFT on transformers' model of the weights that training computed with.
PEFT_SCRIPT = """
from peft import PeftModel

adapter, = arguments
base = AutoModelForCausalLM.from_pretrained(config_dir, dtype=torch.float32).eval()
with torch.no_grad():
    plain = base(tokens).logits
    adapted = PeftModel.from_pretrained(base, adapter).eval()(tokens).logits
torch.save({"base": plain, "adapted": adapted}, f"{folder}/result.pt")
"""
TOKENS = torch.randint(1, 512, (2, 40), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems, their tokenizer, and the config that all runs share."""
    folder = tmp_path_factory.mktemp("mixtures")
    train, asked = write_splits(folder, train=400, heldout=4)
    problems = json_lines(train)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text for row in problems for text in row.values()], trainer)
    (folder / "prompts.jsonl").write_text(asked.read_text().replace('"question"', '"prompt"'))
    write_tokenizer(backend, folder)
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    return folder


def write_tokenizer(backend: Tokenizer, folder: Path) -> None:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


def train(recipe: str, folder: Path, runs: list[list[str]]) -> None:
    config = str(folder / "config.yaml")
    run_ranks(RANKS, run_recipe, recipe, [(config, ["model.dtype=fp32", *run]) for run in runs])


def run_alone(recipe: str, *words: str) -> None:
    run_recipe(recipe, [(str(ROOT / f"configs/{recipe}.yaml"), list(words))])


def answers(folder: Path, model: Path, output: Path, *words: str) -> list[str]:
    """What the model answers to the held-out problems."""
    words = (f"prompts={folder}/prompts.jsonl", f"output={output}", *words)
    words = (f"tokenizer.path={folder}", "sampling.max_new_tokens=24", *words)
    run_alone("generate", f"model.path={model}", "model.dtype=fp32", *words)
    return [line["completion"] for line in json_lines(output)]


def adapted(model: Path, adapter: Path) -> nn.Module:
    """As `generate` has it: the quantized base with its adapter."""
    config = ModelConfig(str(model), dtype="fp32")
    loaded = (QuantizationConfig(), str(adapter), ShardingConfig(), cpu_world())
    return load_for_inference(config, *loaded).eval()


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def assert_resumed(run: Path, rest: Path, steps: int) -> None:
    """The second half of a run, from its checkpoint: the same losses and the same adapter."""
    expected = losses(run)
    assert list(expected) == list(range(1, steps + 1))
    assert losses(rest) == {step: expected[step] for step in range(steps // 2 + 1, steps + 1)}
    files = [place / "adapter" / WEIGHTS_FILE for place in (run, rest)]
    assert files[0].read_bytes() == files[1].read_bytes()


def assert_merged(folder: Path, model: Path, adapter: Path, output: Path) -> None:
    """The merged model computes what the adapter on the quantized base does, here and in
    transformers, and answers the same."""
    run_alone(
        "merge",
        f"model.path={model}",
        "model.dtype=fp32",
        f"adapter={adapter}",
        "dtype=fp32",
        f"output_dir={output}",
    )
    expected = logits(adapted(model, adapter), TOKENS)
    theirs = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    difference = apart(logits(theirs, TOKENS), expected)
    with_adapter = answers(folder, model, output / "adapted.jsonl", f"adapter={adapter}")
    merged = answers(folder, output, output / "merged.jsonl", "quantization.format=none")
    print(f"transformers' logits of the merged model differ by {difference:.1e}")
    print("answers:", *map(repr, merged), sep="\n  ")
    assert difference < 1e-4
    assert merged == with_adapter and all(merged)


def test_a_mixture_from_random_weights_to_answers(folder: Path, tmp_path: Path) -> None:
    reference("qwen3_moe", **SIZES, **QWEN).save_pretrained(tmp_path / "random")
    full, dora, lora = (tmp_path / name for name in ("full", "dora", "lora"))
    words = [f"model.path={tmp_path}/random", f"output_dir={full}", "max_steps=40"]
    train("full_finetune_distributed", folder, [words])
    found = losses(full)
    print(f"full finetuning: loss {found[1]:.3f} -> {found[40]:.3f} in 40 updates")
    assert found[40] < found[1] / 2

    quantized = tmp_path / "quantized"
    run_alone("quantize", f"model.path={full}/model", f"output_dir={quantized}")
    sizes = [
        sum(f.stat().st_size for f in p.glob("*.safetensors")) for p in (full / "model", quantized)
    ]
    print(f"quantized: {sizes[0]} -> {sizes[1]} bytes")

    common = [f"model.path={quantized}", "max_steps=20", "checkpoint.every_n_steps=10"]
    common += ["adapter.rank=8", "adapter.alpha=16"]
    runs = [[*common, f"output_dir={dora}", "adapter.method=dora"]]
    resume = f"resume={dora}/checkpoints/step_00000010"
    runs += [[*common, f"output_dir={dora}/rest", "adapter.method=dora", resume]]
    runs += [[*common, f"output_dir={lora}", "adapter.method=lora"]]
    train("qdora_distributed", folder, runs)
    assert_resumed(dora, dora / "rest", 20)
    for run in (dora, lora):
        found = list(losses(run).values())
        first, last = (sum(five) / 5 for five in (found[:5], found[-5:]))  # batches differ
        print(f"{run.name}: loss {first:.3f} in updates 1-5, {last:.3f} in 16-20")
        assert last < first
        assert_moved(quantized, run / "adapter")
        assert_merged(folder, quantized, run / "adapter", run / "merged")
    assert_peft_computes_the_same(quantized, lora / "adapter", tmp_path)


def assert_moved(model: Path, adapter: Path) -> None:
    """Every tensor of every adapter, those of experts included, differs from its start."""
    config = read_adapter_config(adapter)
    before = adapter_parameters(adapted_model(model, config))
    after = adapter_parameters(adapted(model, adapter))
    moved = [key for key in before if not torch.equal(before[key], after[key])]
    print(f"{adapter.parent.name}: {len(moved)} of {len(before)} tensors of adapters moved")
    assert moved == list(before) and any(".experts." in key for key in moved)


def assert_peft_computes_the_same(model: Path, adapter: Path, folder: Path) -> None:
    base = load_model(model)
    save_model(base, ModelWeights(model), torch.float32, folder / "plain", cpu_world())
    unused = {"x": torch.zeros(1)}
    found = run_peft(PEFT_SCRIPT, folder / "plain", unused, TOKENS, folder / "peft", adapter)
    ours = logits(adapted(model, adapter), TOKENS)
    moved, difference = (apart(found[key], ours) for key in ("base", "adapted"))
    print(f"PEFT: the adapter moves logits by {moved:.2f}; PEFT's differ by {difference:.1e}")
    assert moved > 0.01 and difference < 1e-4


# ---- gpt-oss -------------------------------------------------------------------------------------


def train_and_hold(config: str, words: list[str]) -> dict[str, Tensor]:
    """Runs the recipe; returns the bytes of this rank's rows of MXFP4 weights after the run, and
    the biases of experts."""
    recipe, models = load_recipe("qdora_distributed"), list[nn.Module]()
    load = recipe.load_model

    def keep(*args: Any, **kwargs: Any) -> nn.Module:
        models.append(load(*args, **kwargs))
        return models[-1]

    recipe.load_model = keep
    cfg = load_config(recipe.Config, ["--config", config, *words])
    recipe.check(cfg)
    recipe.main(cfg)
    held = {name: local_part(param).data for name, param in models[0].named_parameters()}
    found = {n: t.qdata for n, t in held.items() if getattr(t, "format", None) == "mxfp4"}
    assert all(isinstance(held[name], QuantizedTensor) for name in found)
    return found | {n: t for n, t in held.items() if n.endswith("proj.bias") and ".experts." in n}


def test_gpt_oss_as_published_from_its_file_to_answers(folder: Path, tmp_path: Path) -> None:
    reference("gpt_oss", **SIZES, **GPT_OSS).save_pretrained(tmp_path / "plain")
    shipped, run = with_blocks(tmp_path / "plain", tmp_path / "shipped"), tmp_path / "run"
    stored = load_file(shipped / SINGLE)
    words = ["adapter.rank=4", "adapter.alpha=8", "max_steps=4", "checkpoint.every_n_steps=2"]
    words += [f"model.path={shipped}", "model.dtype=fp32", "adapter.method=lora"]
    config = str(folder / "config.yaml")
    by_rank = run_ranks(RANKS, train_and_hold, config, [*words, f"output_dir={run}"])
    resume = f"resume={run}/checkpoints/step_00000002"
    run_ranks(RANKS, train_and_hold, config, [*words, f"output_dir={run}/rest", resume])
    assert_resumed(run, run / "rest", 4)

    stems = {name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")}
    assert by_rank[0].keys() == {f"{s}.{field}" for s in stems for field in ("weight", "bias")}
    for stem in stems:
        weight, bias = (
            torch.cat([held[f"{stem}.{field}"] for held in by_rank]) for field in ("weight", "bias")
        )
        assert torch.equal(weight, rows_of(stored, stem))
        assert torch.equal(bias, stored[f"{stem}_bias"].flatten())
    count = sum(held[f"{s}.weight"].numel() for held in by_rank for s in stems)
    found = losses(run)
    print(f"gpt-oss: {count} bytes of experts unchanged after 4 updates, losses {found}")
    assert_moved(shipped, run / "adapter")
    assert_merged(folder, shipped, run / "adapter", run / "merged")
