"""Ranks that share rows (`sharding.context_parallel`) train what ranks with whole rows train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.checkpoint.weights.quantize import quantize_folder
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.evaluation.inference_model import check_for_inference
from qfsdp.modules.attention import cut_rows
from qfsdp.modules.hub_models.config import hub_config
from qfsdp.modules.hub_models.refused import check_hub_run, check_shared
from qfsdp.modules.quantized_linear import QuantizationConfig
from tests import hub_models
from tests.json_lines import metric_lines
from tests.models import cpu_world
from tests.ranks import run_ranks
from tests.recipes.test_sharded_equals_unsharded import assert_same, train
from tests.recipes.test_sharded_mixtures import MIXTURE, train_traced
from tests.tiny import load_recipe, needs_compiler, run_recipe, write_tiny_model
from tests.toy_data import TOY_CONFIG

# A row has 64 tokens; two ranks have 32 each, three have 22.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "window of 9": {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
    "window of 40, and none": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "sinks, experts": {
        "architectures": ["GptOssForCausalLM"],
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "head_dim": 32,
        "sliding_window": 9,
    },
    "balanced experts": MIXTURE,
}
# In what layers run, and where weights lie: the same updates.
VARIANTS: list[dict[str, Any]] = [
    {"checkpointing": "full"},
    {"checkpointing": "selective", "packs": True, "offload": True},
    {"checkpointing": "full", "tile_tokens": 8},
    {"checkpointing": "full", "tile_tokens": 8, "sharding": {"strategy": "ddp"}},
    {"wrap": "linear", "sharding": {"strategy": "ddp"}},
    {"sharding": {"strategy": "hybrid_full_shard", "replicate": 2}, "packs": True},
    {"sharding": {"vocabulary": "split", "offload_base": "cpu"}},
]


GIVEN = {"wrap": "decoder_layer", "quantized": "all-linear", "adapted": "all-linear"}
# Attention of parts rounds in another way than that of whole rows. With an eps of 1e-6 AdamW makes
# up to 1.6e-5 of that in single numbers of A whose gradients are tiny; losses and norms are equal.
GIVEN |= {"steps": 10, "method": "dora", "eps": 1e-5}


def compare(
    folder: Path, size: int, parts: int, cases: list[dict[str, Any]], run: Any = train
) -> list[list[dict[str, Any]]]:
    """Ten updates of every case on `size` ranks, `parts` of which share rows, and on one rank with
    as many rows per update."""
    alone, shared, half = [], [], 12 * parts // size // 2
    for case in cases:
        alone.append(GIVEN | case | {"split": (12, 1), "sharding": {}, "compile": False})
        sharding = case.get("sharding", {}) | {"context_parallel": parts}
        shared.append(GIVEN | {"split": (half, 2)} | case | {"sharding": sharding})
    one = run_ranks(1, train, folder, alone)[0]
    several = run_ranks(size, run, folder, shared)
    for rank, results in enumerate(several):
        for case, result, reference in zip(cases, results, one, strict=True):
            assert_same(result, reference, f"rank {rank} of {size} in {parts}s: {case}")
    return several


def train_by_heads(model_dir: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`train` with attention of one head at a time, as in long rows."""
    cut_rows.AT_ONCE = 1
    return train_traced(model_dir, cases) if cases[0].get("compile") else train(model_dir, cases)


def test_packed_rows_on_two_ranks(tmp_path: Path) -> None:
    case = {"packs": True, "steps": 4, "checkpointing": "full"}
    compare(write_tiny_model(tmp_path), 2, 2, [case], train_by_heads)


@pytest.mark.parametrize(
    ("name", "size", "parts"),
    [
        pytest.param("sinks, experts", 2, 2, marks=pytest.mark.long),
        pytest.param("llama", 3, 3, marks=pytest.mark.slow),
        pytest.param("llama", 4, 2, marks=pytest.mark.slow),
        pytest.param("llama", 4, 4, marks=pytest.mark.slow),
        pytest.param("window of 9", 3, 3, marks=pytest.mark.slow),
        pytest.param("window of 40, and none", 3, 3, marks=pytest.mark.slow),
        pytest.param("balanced experts", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_ten_updates_are_those_of_one_rank(
    name: str, size: int, parts: int, tmp_path: Path
) -> None:
    """Samples in rows, and packed samples that are cut."""
    folder = write_tiny_model(tmp_path, **MODELS[name])
    balanced = {"router_aux_loss": 0.5} if name == "balanced experts" else {}
    cases = [balanced, balanced | {"packs": True, "method": "lora"}]
    if balanced:
        cases.append(balanced | {"sharding": {"expert_parallel": 2}})
    compare(folder, size, parts, cases)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        *(pytest.param("qwen3_5", parts, marks=pytest.mark.slow) for parts in (2, 3)),
        *(pytest.param(name, 3, marks=pytest.mark.slow) for name in ("llama", "gemma3_text")),
        pytest.param("falcon_h1", 2, marks=pytest.mark.slow),
    ],
)
def test_models_of_transformers(name: str, parts: int, tmp_path: Path) -> None:
    """Windows, and layers that carry a state along the row."""
    hub_models.save_hub_model(name, tmp_path)
    of_hub = {"implementation": "transformers"}
    compare(tmp_path, parts, parts, [of_hub, of_hub | {"packs": True, "checkpointing": "full"}])


@pytest.mark.long
def test_a_part_of_padding_alone(tmp_path: Path) -> None:
    """Rows one by one: parts of short ones hold nothing, and still join every exchange."""
    compare(write_tiny_model(tmp_path), 3, 3, [{"split": (1, 12), "steps": 3}])


@pytest.mark.slow
def test_variants(tmp_path: Path) -> None:
    compare(write_tiny_model(tmp_path), 4, 2, [{"steps": 4} | case for case in VARIANTS])


@pytest.mark.slow
def test_base_on_disk(tmp_path: Path) -> None:
    """Weights are read while the ranks of a group exchange keys; two groups."""
    model = write_tiny_model(tmp_path / "model", num_hidden_layers=4)
    config = QuantizationConfig("nf4", "all-linear")
    quantize_folder(ModelWeights(model), config, tmp_path / "quantized", cpu_world())
    case = {"folder": str(tmp_path / "quantized"), "packs": True, "steps": 4}
    ways = [{"offload_base": "disk"}, {"offload_base": "disk", "prefetch": 3}]
    cases = [case | {"sharding": way, "checkpointing": "full"} for way in ways]
    compare(model, 4, 2, cases)


@pytest.mark.slow
@needs_compiler
def test_compiled_layers(tmp_path: Path) -> None:
    """Without a break, and nothing is built after the second step."""
    case = {"compile": True, "steps": 4, "packs": True}
    for (result,) in compare(write_tiny_model(tmp_path), 2, 2, [case], train_by_heads):
        assert result["recompiled"] == 0


# ---- mistakes ------------------------------------------------------------------------------------


def test_what_is_refused(tmp_path: Path) -> None:
    """Before anything is read."""
    shared = ShardingConfig(context_parallel=2)
    words = ["--config", str(tmp_path / "dpo.yaml"), "packed=true", "sharding.context_parallel=2"]
    text = TOY_CONFIG.format(folder=tmp_path) + f"output_dir: {tmp_path}\n"
    (tmp_path / "dpo.yaml").write_text(text)
    with pytest.raises(UserError, match="sharding.context_parallel: 2; expected 1, as nothing is"):
        check_for_inference(ModelConfig("unused"), QuantizationConfig(), None, shared)
    cfg = load_config(load_recipe().Config, words)
    cfg.model = ModelConfig("unused", implementation="transformers")
    with pytest.raises(UserError, match="sharding.context_parallel: 2; expected 1: transformers'"):
        check_hub_run(replace(cfg, packed=False), hub_config(parsed("apertus"), "config.json"))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    stretched = parsed("llama") | {
        "rope_parameters": rope | {"original_max_position_embeddings": 128}
    }
    with pytest.raises(UserError, match="context_parallel: 2; expected 1: in .*kind dynamic"):
        check_shared(2, hub_config(stretched, "config.json"))


def parsed(name: str) -> dict[str, Any]:
    return dict(hub_models.config(name).to_dict())


# ---- commands -----------------------------------------------------------------------------------

SAMPLES, PAIRS = "tests.toy_data.Samples", "tests.preferences.preferences"
EVALUATED = "validation.sets.held._component_="
# Name -> recipe, dataset and words of a run.
RUNS: dict[str, tuple[str, str, list[str]]] = {
    "lora": ("qdora_distributed", SAMPLES, ["adapter.method=lora", "batch_size=6", "packed=true"]),
    "dpo": ("dpo_distributed", PAIRS, ["batch_size=4", "loss=[sigmoid,{name: simpo}]"]),
    "packed dpo": ("dpo_distributed", PAIRS, ["batch_size=2", "packed=true", "max_seq_len=121"]),
    "kto": (
        "dpo_distributed",
        PAIRS,
        ["batch_size=2", "loss=[kto]", "dataset.labels=true", "packed=true", "max_seq_len=81"]
        + ["validation.sets.held.labels=true"],
    ),
    "full": ("full_finetune_distributed", SAMPLES, ["batch_size=6", "model.dtype=fp32"]),
}
KEPT = ("loss", "grad_norm", "rewards/", "logps/", "kl", "validation/")


def run_commands(folder: Path, kind: str, words: list[str]) -> None:
    """Six updates of every run, into the folder `kind`; runs on every rank."""
    for name, (recipe, dataset, own) in RUNS.items():
        common = [f"output_dir={folder}/{kind}/{name}", "max_steps=6", "epochs=9"]
        common += [
            f"{EVALUATED}{dataset}",
            "validation.sets.held.seed=5",
            "validation.eval_every=3",
        ]
        common += ["checkpoint.every_n_steps=3"]
        more = ["sharding.vocabulary=split"] if name == "full" and "shared" in kind else []
        if kind == "shared_resumed":
            more += [f"resume={folder}/alone/{name}/checkpoints/step_00000003"]
        run_recipe(recipe, ["--config", f"{folder}/{name}.yaml", *common, *own, *words, *more])


def numbers(run: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for line in metric_lines(run):
        kept = {key: value for key, value in line.items() if key.startswith(KEPT)}
        found.setdefault(line["step"], {}).update(kept)
    return found


@pytest.mark.slow
def test_commands(tmp_path: Path) -> None:
    """Adapters, pairs, labelled answers and full finetuning with a split vocabulary: what one rank
    logs of training and validation; and runs of one rank go on."""
    write_tiny_model(tmp_path / "model")
    for name, (_, dataset, _) in RUNS.items():
        text = TOY_CONFIG.format(folder=tmp_path).replace(SAMPLES, dataset)
        (tmp_path / f"{name}.yaml").write_text(text)
    run_ranks(1, run_commands, tmp_path, "alone", [])
    shared = ["sharding.context_parallel=2"]
    run_ranks(2, run_commands, tmp_path, "shared", shared)
    run_ranks(2, run_commands, tmp_path, "shared_resumed", shared)
    for name in RUNS:
        expected = numbers(tmp_path / "alone" / name)
        assert len(expected) == 6 and any("validation" in key for key in expected[3])
        for kind in ("shared", "shared_resumed"):
            found = numbers(tmp_path / kind / name)
            assert sorted(found) == (list(range(1, 7)) if kind == "shared" else [4, 5, 6])
            for step, metrics in found.items():
                wanted = pytest.approx(expected[step], rel=2e-5, abs=2e-5)
                assert metrics == wanted, f"{kind}, {name}, step {step}"
