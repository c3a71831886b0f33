"""Distillation: equal on any number of ranks and after a stop; mistakes; the memory."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer, models

from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.distributed.sharding import quantized_bytes
from qfsdp.modules.distillation import DistillationConfig
from qfsdp.planning.estimate import estimate
from qfsdp.planning.extrapolate import estimate_fast
from qfsdp.planning.predict import step_load
from tests.ranks import run_ranks
from tests.recipes.test_reward_distributed import metrics
from tests.tiny import (
    ROOT,
    load_recipe,
    run_in_turn,
    write_tiny_model,
    write_tiny_model_with_tokenizer,
)
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


run_recipe = partial(run_in_turn, NAME)


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


def read_alone(folder: Path, *words: str) -> None:
    """Runs the recipe where no teacher can be loaded."""
    with mock.patch("qfsdp.training.distillation.load_for_inference", side_effect=AssertionError):
        run_recipe(folder, list(words))


@pytest.mark.long
def test_words_that_were_written_once(tmp_path: Path) -> None:
    """Read on other ranks in other batches, also packed and split; a part is written later."""
    write_models(tmp_path)
    top = "distillation={divergence: forward_kl, top_k: 5, weight: 0.5}"
    said, split = f"teacher.logprobs={tmp_path}/said", "sharding.vocabulary=split"

    def words(name: str, *more: str) -> list[str]:
        return [f"output_dir={tmp_path}/{name}", "batch_size=3", *more]

    run_ranks(1, run_recipe, tmp_path, words("jsd"), words("live", top))
    run_ranks(
        2,
        run_recipe,
        tmp_path,
        words("jsd_split", split),
        words("live_split", top, split),
        words("some", top, said, "max_steps=2"),
        words("rest", top, said, "max_steps=5"),
    )
    run_ranks(2, read_alone, tmp_path, *words("read_split", top, said, split))
    run_ranks(1, read_alone, tmp_path, *words("read", top, said))
    run_ranks(1, read_alone, tmp_path, *words("read_packed", top, said, "packed=true", "epochs=2"))
    pairs = {"jsd": ["jsd_split"], "live": ["live_split", "rest", "read_split", "read"]}
    for first, others in pairs.items():
        expected = metrics(tmp_path / first)
        for name in others:
            found = metrics(tmp_path / name)
            for step in range(1, 5):
                for key in ("loss", "grad_norm", "divergence", "labels_loss"):
                    place, limit = (name, step, key), 1e-6 if key == "loss" else 1e-5
                    assert found[step][key] == pytest.approx(expected[step][key], abs=limit), place
    assert len(list((tmp_path / "said").iterdir())) == 5  # facts, two parts of each rank
    assert metrics(tmp_path / "read_packed")[4]["divergence"] > 0
    for change, sentence in {
        "teacher.quantization.format=none": "is of another teacher (teacher.quantization.format: ",
        "dataset.seed=1": "is of other rows (dataset, tokenizer or max_seq_len); expected the same",
        "max_seq_len=32": "is of other rows",
    }.items():
        with pytest.raises(Exception, match=f"teacher.logprobs: '.*said' {re.escape(sentence)}"):
            run_ranks(1, run_recipe, tmp_path, words("other", top, said, change))
    more = "distillation.top_k: 6; expected at most 5, as many as teacher.logprobs '.*said' has"
    with pytest.raises(Exception, match=more):
        run_ranks(1, run_recipe, tmp_path, words("other", top, said, "distillation.top_k=6"))


@pytest.mark.long
def test_damage_is_noticed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_models(tmp_path)
    words = ["distillation={divergence: forward_kl, top_k: 5}", f"teacher.logprobs={tmp_path}/said"]
    words += ["max_steps=1", "validation.sets={}"]
    run_ranks(1, run_recipe, tmp_path, [*words, f"output_dir={tmp_path}/first"])
    (part,) = (tmp_path / "said").glob("*.safetensors")
    part.write_bytes(part.read_bytes()[:-4] + b"abcd")
    capfd.readouterr()
    run_ranks(1, run_recipe, tmp_path, [*words, f"output_dir={tmp_path}/second"])
    error = capfd.readouterr().err
    assert error.count("warning: teacher.logprobs: ") == 1 and "(SHA-256)" in error
    losses = [metrics(tmp_path / name)[1]["loss"] for name in ("first", "second")]
    assert losses[0] == losses[1] and len(list((tmp_path / "said").glob("*.safetensors"))) == 1


MISTAKES = {
    "distillation.divergence=kl": "distillation.divergence: 'kl'",
    "distillation.temperature=0": "distillation.temperature: 0.0 is not valid; expected a number a",
    "distillation.weight=2": "distillation.weight: 2.0 is not valid; expected a number above 0, at",
    "distillation.beta=1": "distillation.beta: 1.0 is not valid; expected a number between 0 and 1",
    "distillation.top_k=0": "distillation.top_k: 0 is not valid; expected an integer of at least 1",
    "distillation={divergence: jsd, top_k: 5}": "top_k: 5 is not valid; expected null with jsd",
    "distillation.top_k=50000": "distillation.top_k: 50000; expected at most 49152, the vocabulary",
    "sharding.vocabulary=split && teacher.model.path=FOLDER/plain": "sharding.vocabulary: split; "
    "expected auto or gather, as the teacher's vocabulary has 577 rows, and the student's 49152",
    "teacher.logprobs=sometimes": "teacher.logprobs: 'sometimes' is not valid; expected live, cac",
    "teacher.logprobs=cache": "teacher.logprobs: cache; expected live, as distillation.top_k is n",
    "teacher.logprobs=cache && distillation.top_k=5 && dataset.streaming=true && max_steps=2": ""
    "teacher.logprobs: cache; expected live with dataset.streaming: true",
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
    words = word.replace("FOLDER", str(folder)).split(" && ")
    with pytest.raises(UserError) as error:
        recipe.check(load_config(recipe.Config, [*argv, *words]))
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
    teacher = recipe.load_teacher(cfg, world, None, 0)._model
    whole = sum(p.numel() * 4 for p in teacher.parameters() if type(p.data) is torch.Tensor)
    held = found.at_peak["teacher"]
    assert held == pytest.approx(whole + quantized_bytes(teacher), rel=0.01)
    fast = estimate_fast(*functions, 1, target="cpu")
    assert fast.at_peak["teacher"] == held and fast.peak == pytest.approx(found.peak, rel=0.01)
    cfg.teacher.logprobs, cfg.distillation = "cache", DistillationConfig(top_k=5)
    read = estimate(*functions, 1, target="cpu")
    assert "teacher" not in read.at_peak and read.peak < found.peak - held / 2
    student = recipe.build_model(cfg, cfg.model.weights())
    of_cached = step_load(student, cfg, found, 1)
    cfg.teacher.logprobs = "live"
    load = step_load(student, cfg, found, 1)
    del cfg.teacher
    assert load.flops > 1.05 * step_load(student, cfg, found, 1).flops == 1.05 * of_cached.flops
