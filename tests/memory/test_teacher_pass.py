"""The teacher's own pass, with `teacher.logprobs: cache`: its memory, before a run and in it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.estimate import STEP, _peak_within_steps
from qfsdp.checkpoint.adapter_files import save_adapter
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.data.batch import Batch
from qfsdp.evaluation.inference_model import load_for_inference
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.planning.estimate import estimate
from qfsdp.planning.preflight import check_memory
from qfsdp.planning.teacher_pass import alone, build_teacher, teacher_step
from qfsdp.training.distillation import Teacher, of_teacher
from tests.models import adapted_model, cpu_world
from tests.ranks import run_ranks
from tests.recipes.test_distill_distributed import NAME, write_models
from tests.tiny import load_recipe, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")
LARGER = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 6}
TOKENS = 577


def written(folder: Path, *words: str) -> tuple[Any, Any]:
    """The recipe, and a config whose teacher is larger than its student."""
    write_models(folder)
    write_tiny_model(folder / "teacher", seed=1, **LARGER)
    recipe = load_recipe(NAME)
    argv = ["--config", f"{folder}/config.yaml", "teacher.logprobs=cache", "batch_size=8", *words]
    return recipe, load_config(recipe.Config, [*argv, "distillation={top_k: 5}"])


def measured(folder: Path) -> int:
    """Most bytes that PyTorch's allocator held in the pass."""
    recipe, cfg = written(folder)
    given, activities = cfg.teacher, [torch.profiler.ProfilerActivity.CPU]
    tokens = torch.zeros(cfg.batch_size, cfg.max_seq_len, dtype=torch.int64)
    batch = Batch(tokens, tokens.clone(), tokens.numel(), targets=tokens.numel())
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        world = recipe.init_world()
        parts = (given.model, given.quantization, given.adapter, of_teacher(cfg))
        teacher = Teacher(load_for_inference(*parts, world), cfg.distillation, world, TOKENS)
        for _ in range(3):
            with torch.profiler.record_function(STEP):
                teacher.most_likely(5, batch)
    return _peak_within_steps(profiler)


@pytest.mark.long
def test_the_pass_takes_the_estimated_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # as on the ranks
    (held,) = run_ranks(1, measured, tmp_path)
    _, cfg = written(tmp_path)
    step = partial(teacher_step, config=cfg.distillation, tokens=TOKENS)
    found = estimate(build_teacher, step, alone(cfg), 1, target="cpu")
    print(f"{found.peak} of {held}: {found.peak / held - 1:+.3f}")
    assert found.peak == pytest.approx(held, rel=0.03)
    assert found.peak >= 0.99 * held


def test_one_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    recipe, cfg = written(tmp_path, "preflight=true", "teacher.quantization.format=none")
    functions = recipe.build_model, recipe.train_step
    cfg.device_memory = str(estimate(*functions, cfg, 1).reserved + (1 << 20))
    with pytest.raises(UserError, match=r"^teacher.logprobs: cache; the teacher's own pass needs"):
        check_memory(cfg, *functions)
    folder = Path(cfg.output_dir) / "teacher_logprobs"
    folder.mkdir(parents=True)
    (folder / "facts.json").touch()  # begun by a larger machine, perhaps
    check_memory(cfg, *functions)


def test_a_teacher_of_many_layers_with_an_adapter(tmp_path: Path) -> None:
    recipe, cfg = written(tmp_path, "preflight=true")
    adapter, folder = AdapterConfig("lora", rank=2), tmp_path / "teacher_adapter"
    model = adapted_model(tmp_path / "teacher", adapter)
    save_adapter(model, adapter, str(tmp_path / "teacher"), folder, cpu_world())
    cfg.teacher.adapter = str(folder)
    cfg.device_memory = "8GiB"
    check_memory(cfg, recipe.build_model, recipe.train_step)
