"""Distillation: equal on any number of ranks and after a stop; mistakes; the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.distributed.sharding import quantized_bytes
from qfsdp.planning.estimate import estimate
from qfsdp.planning.extrapolate import estimate_fast
from qfsdp.planning.predict import step_load
from tests.ranks import run_ranks
from tests.recipes.test_reward_distributed import metrics
from tests.tiny import ROOT, load_recipe, write_tiny_model, write_tiny_model_with_tokenizer
from tests.toy_data import TOY_CONFIG

CONFIG = """
output_dir: {folder}/run
adapter: {{method: dora, rank: 5, alpha: 7}}
teacher:
  model: {{path: {folder}/teacher, dtype: fp32}}
distillation: {{divergence: jsd, temperature: 1.5, weight: 0.5}}
global_batch_size: 6
epochs: 4
max_steps: 4
checkpoint: {{every_n_steps: 2}}
validation: {{eval_every: 2, sets: {{held: {{_component_: tests.toy_data.Samples, seed: 1}}}}}}
"""
NAME = "distill_distributed"


def run_recipe(folder: Path, *runs: list[str]) -> None:
    """Runs the recipe with each command line in turn; runs on every rank."""
    recipe = load_recipe(NAME)
    for words in runs:
        recipe.main(load_config(recipe.Config, ["--config", f"{folder}/config.yaml", *words]))


def write_models(folder: Path) -> None:
    write_tiny_model(folder / "model", hidden_size=96, tie_word_embeddings=True)
    write_tiny_model(folder / "teacher", seed=1)
    (folder / "config.yaml").write_text((TOY_CONFIG + CONFIG).format(folder=folder))


@pytest.mark.long
def test_the_same_on_three_ranks_and_after_a_stop(tmp_path: Path) -> None:
    write_models(tmp_path)
    packed = ["packed=true", "batch_size=1"]
    words = [f"output_dir={tmp_path}/part", "batch_size=3"]
    linear = ["sharding.wrap=linear", "sharding.offload_base=cpu"]
    head = ["teacher.quantization.targets=[all-linear,lm_head]"]
    run_ranks(1, run_recipe, tmp_path, [f"output_dir={tmp_path}/one"])
    run_ranks(1, run_recipe, tmp_path, [f"output_dir={tmp_path}/one_packed", *packed, *head])
    run_ranks(
        2,
        run_recipe,
        tmp_path,
        [f"output_dir={tmp_path}/two", "batch_size=3"],
        [*words, "max_steps=2"],
        [*words, "resume=auto"],
        [f"output_dir={tmp_path}/ddp", "batch_size=3", "sharding.strategy=ddp"],
    )
    run_ranks(
        3,
        run_recipe,
        tmp_path,
        [f"output_dir={tmp_path}/three", "batch_size=2", *linear],
        [f"output_dir={tmp_path}/three_packed", *packed, *head],
    )
    pairs = [("one", "two"), ("one", "three"), ("one", "ddp"), ("one_packed", "three_packed")]
    for first, other in pairs:
        expected, found = metrics(tmp_path / first), metrics(tmp_path / other)
        for step in range(1, 5):
            for key in ("loss", "grad_norm", "divergence", "labels_loss"):
                place = (other, step, key)
                assert found[step][key] == pytest.approx(expected[step][key], abs=1e-5), place
        assert "validation/held/loss" in found[4] and found[4]["loss"] < found[1]["loss"]
    adapters = [tmp_path / name / "adapter/adapter_model.safetensors" for name in ("two", "part")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


MISTAKES = {
    "distillation.divergence=kl": "distillation.divergence: 'kl'",
    "distillation.temperature=0": "distillation.temperature: 0.0 is not valid; expected a number a",
    "distillation.weight=2": "distillation.weight: 2.0 is not valid; expected a number above 0, at",
    "distillation.beta=1": "distillation.beta: 1.0 is not valid; expected a number between 0 and 1",
    "distillation.top_k=0": "distillation.top_k: 0 is not valid; expected an integer of at least 1",
    "distillation={divergence: jsd, top_k: 5}": "top_k: 5 is not valid; expected null with jsd",
    "distillation.top_k=50000": "distillation.top_k: 50000; expected at most 49152, the vocabulary",
    "sharding.vocabulary=split": "sharding.vocabulary: split; expected auto or gather with a teach",
    "sharding.context_parallel=2": "sharding.context_parallel: 2; expected 1 with a teacher",
    "sharding.offload_base=disk": "sharding.offload_base: disk; expected none or cpu with a teach",
    "teacher.model.path=/nowhere": "/nowhere",
    "teacher.adapter=/nowhere": "/nowhere",
    "teacher.model.path=FOLDER/short": "max_seq_len: 64; expected at most 32, the positions of tea",
    "teacher.model.path=FOLDER/words": "'<|endoftext|>' is 0 in 'tokenizer', and 1 here; expected",
    "teacher.model.path=FOLDER/plain": "has a vocabulary of another size; expected the student's",
}


@pytest.fixture(scope="module")
def folder(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student and faulty teachers."""
    folder = tmp_path_factory.mktemp("models")
    small = {"hidden_size": 96, "num_hidden_layers": 1, "intermediate_size": 64}
    write_tiny_model_with_tokenizer(folder / "model", smollm2_dir, **small)
    few = {"max_position_embeddings": 32}
    write_tiny_model_with_tokenizer(folder / "short", smollm2_dir, **small, **few)
    other = write_tiny_model(folder / "words", vocab_size=49152, **small)
    words = models.WordLevel({"<|endoftext|>": 1}, unk_token="<|endoftext|>")
    Tokenizer(words).save(str(other / "tokenizer.json"))
    write_tiny_model(folder / "plain", **small)
    (folder / "rows.jsonl").write_text('{"question": "2 + 3?", "answer": "5"}\n' * 3)
    return folder


@pytest.mark.parametrize("word", MISTAKES)
@pytest.mark.usefixtures("eager")
def test_a_mistake_is_one_line(word: str, folder: Path, tmp_path: Path) -> None:
    recipe, model = load_recipe(NAME), folder / "model"
    argv = ["--config", str(ROOT / "configs/smollm2_135m_distill.yaml"), f"model.path={model}"]
    argv += [f"teacher.model.path={model}", "teacher.adapter=null", "max_seq_len=64"]
    argv += [f"dataset.source={folder}/rows.jsonl", f"output_dir={tmp_path}/run", "preflight=false"]
    with pytest.raises(UserError) as error:
        recipe.check(load_config(recipe.Config, [*argv, word.replace("FOLDER", str(folder))]))
    assert MISTAKES[word] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.long
@pytest.mark.usefixtures("eager")
def test_the_teacher_is_in_the_estimate(tmp_path: Path) -> None:
    """With all that a run holds of it, whatever the depth of the student; and in the time."""
    write_models(tmp_path)
    write_tiny_model(tmp_path / "model", num_hidden_layers=8)
    recipe = load_recipe(NAME)
    cfg: Any = load_config(recipe.Config, ["--config", f"{tmp_path}/config.yaml"])
    functions = (recipe.build_model, recipe.train_step, cfg)
    found = estimate(*functions, 1, target="cpu")
    world = recipe.init_world()
    teacher = recipe.load_teacher(cfg, world)._model
    whole = sum(p.numel() * 4 for p in teacher.parameters() if type(p.data) is torch.Tensor)
    held = found.at_peak["teacher"]
    assert held == pytest.approx(whole + quantized_bytes(teacher), rel=0.01)
    fast = estimate_fast(*functions, 1, target="cpu")
    assert fast.at_peak["teacher"] == held and fast.peak == pytest.approx(found.peak, rel=0.01)
    student = recipe.build_model(cfg, cfg.model.weights())
    load = step_load(student, cfg, found, 1)
    del cfg.teacher
    assert load.flops > 1.05 * step_load(student, cfg, found, 1).flops
