"""Full finetuning of transformers' models: losses and written weights of a plain loop over them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from qfsdp.checkpoint.weights.load import ModelConfig, load_base
from qfsdp.checkpoint.weights.safetensors_folder import SINGLE
from qfsdp.checkpoint.weights.save import save_model
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.data import step_loader
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.modules.compute_dtype import planned_for
from qfsdp.modules.trainable import TrainableConfig, set_trainable
from qfsdp.training.steps import StepClock
from tests import hub_models, tiny
from tests.models import cpu_world
from tests.ranks import run_ranks
from tests.recipes.test_hub_models import losses
from tests.toy_data import TOY_CONFIG, Samples

RECIPE = "full_finetune_distributed"
CONFIG = TOY_CONFIG + "\nmax_steps: 3\nclip_grad_norm: 1.0\n"
WORDS = ["model.implementation=transformers", "checkpoint.every_n_steps=null"]
# DeepSeek-V3: files hold experts one by one. Gemma 3: embedding and output layer are one weight.
# Gemma 4: layers share keys and values, and files hold a buffer.
NAMES = [
    pytest.param("deepseek_v3", marks=pytest.mark.long),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "gemma4", "qwen3_5_moe")),
]


def config_of(folder: Path) -> str:
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    return str(folder / "config.yaml")


def run_recipe(runs: list[list[str]]) -> None:
    for words in runs:
        tiny.run_recipe(RECIPE, words)


def plain_loop(model: Any) -> list[float]:
    """The losses of three updates of transformers' model, which keeps what it has learned."""
    trained = [
        param
        for name, param in model.named_parameters()
        if not any(part in name for part in ("vision_tower", "multi_modal_projector"))
    ]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=1e-6)
    split = {"batch_size": 12, "gradient_accumulation_steps": 1, "rank": 0, "world_size": 1}
    loader = step_loader(Samples(None), **split, seed=0, pad_id=0, max_seq_len=64)
    found = []
    for step in range(3):
        (batch,) = loader.step(step)
        logits = model(batch.tokens, attention_mask=torch.ones_like(batch.tokens)).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def loaded(folder: Path, model: Any) -> dict[str, Tensor]:
    """The weights of a folder as transformers loads them, of the class of `model`."""
    return type(model).from_pretrained(folder, dtype=torch.float32).state_dict()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", NAMES)
def test_runs_equal_a_plain_loop_over_transformers(name: str, tmp_path: Path) -> None:
    check_runs(name, tmp_path, "transformers")


@pytest.mark.usefixtures("eager")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_whole", "qwen3_5_moe"])
def test_runs_of_our_own_layers_of_two_kinds_do_too(name: str, tmp_path: Path) -> None:
    check_runs(name, tmp_path, "native")


def check_runs(name: str, tmp_path: Path, by: str) -> None:
    model: Any = hub_models.save_hub_model(name, tmp_path / "model")
    before = load_file(tmp_path / "model" / SINGLE)
    words = ["--config", config_of(tmp_path), *WORDS, f"model.implementation={by}"]
    run_recipe([[*words, "batch_size=12", f"output_dir={tmp_path}/1"]])
    more = ["batch_size=6", f"output_dir={tmp_path}/2"]
    run_ranks(2, run_recipe, [[*words, *more]])
    expected = plain_loop(model)
    assert expected[-1] != expected[0]
    for run in ("1", "2"):
        assert losses(tmp_path / run) == pytest.approx(expected, abs=1e-5)
        trained = loaded(tmp_path / run / "model", model)
        for key, value in model.state_dict().items():
            # An update moves a number by 1e-3. AdamW divides by the gradient, which may be tiny.
            torch.testing.assert_close(trained[key], value, atol=1e-4, rtol=1e-4, msg=key)
        after = load_file(tmp_path / run / "model" / SINGLE)
        assert after.keys() == before.keys()
        kept = ("vision", "visual", "layer_scalar", "mtp.")
        beside = [key for key in before if any(part in key for part in kept)]
        assert all(torch.equal(after[key], before[key]) for key in beside)


def loaded_in_bf16(folder: Path) -> tuple[Any, Any, Any, Any]:
    """The recipe, its config, the world and a model that computes in bf16, trained in fp32."""
    recipe = tiny.load_recipe(RECIPE)
    words = ["--config", config_of(folder), *WORDS, "model.dtype=bf16", f"output_dir={folder}/run"]
    cfg = load_config(recipe.Config, words)
    with planned_for("cuda"):  # bf16 also on a CPU without bf16 products
        world = recipe.init_world(cfg.sharding, casts=cfg.trainable.casts(cfg.model.dtype))
        return recipe, cfg, world, recipe.load_model(cfg, world)


@pytest.mark.long
@pytest.mark.usefixtures("eager")
def test_what_is_frozen_in_fp32_is_computed_in_it(tmp_path: Path) -> None:
    """A router's correction, beside weights that FSDP2 casts to bf16."""
    hub_models.save_hub_model("deepseek_v3", tmp_path / "model")
    recipe, cfg, world, model = loaded_in_bf16(tmp_path)
    router = model.get_submodule("model.layers.2.mlp.gate")
    before, seen = router.e_score_correction_bias.clone(), {}

    def look(*_: Any) -> None:
        seen.update({n: p.dtype for n, p in router.named_parameters()})

    router.register_forward_pre_hook(look)
    optimizer = recipe.build_optimizer(cfg.optimizer, trainable_parameters(model))
    tokens = torch.arange(32).view(2, 16)
    batches = [recipe.Batch(tokens, tokens.clone(), tokens.numel())]
    recipe.train_step(model, optimizer, None, batches, 1.0, world, StepClock(world.device))
    assert seen == {"weight": torch.bfloat16, "e_score_correction_bias": torch.float32}
    assert torch.equal(router.e_score_correction_bias, before) and before.any()


def test_what_is_trained_in_fp32_refuses_others_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.lfm2.modeling_lfm2 import Lfm2PreTrainedModel

    monkeypatch.setattr(Lfm2PreTrainedModel, "_keep_in_fp32_modules_strict", ["operator_norm"])
    hub_models.save_hub_model("lfm2", tmp_path / "model")
    with pytest.raises(UserError, match="^model.dtype: bf16; expected fp32: .*operator_norm"):
        loaded_in_bf16(tmp_path)


def test_parts_of_a_tensor_are_written_as_one(tmp_path: Path) -> None:
    hub_models.save_hub_model("lfm2", tmp_path / "model")
    file, stem = tmp_path / "model" / SINGLE, "model.layers.0.feed_forward"
    tensors = load_file(file)
    parts = [tensors.pop(f"{stem}.{part}.weight") for part in ("w1", "w3")]
    save_file(tensors | {f"{stem}.w13": torch.cat(parts)}, file, {"format": "pt"})
    cfg = ModelConfig(str(tmp_path / "model"), dtype="fp32", implementation="transformers")
    weights, model = cfg.weights(), cfg.build()
    whole = weights.plain.pop(f"{stem}.w13")
    half = {"shape": (whole.rows // 2, whole.shape[1]), "size": whole.size // 2}
    weights.plain[f"{stem}.w3.weight"] = replace(whole, start=whole.start + half["size"], **half)
    weights.plain[f"{stem}.w1.weight"] = replace(whole, **half)
    set_trainable(model, TrainableConfig(), cfg.folder)
    load_base(model, weights, torch.device("cpu"))
    save_model(model, weights, torch.float32, tmp_path / "again", cpu_world())
    before, after = load_file(file), load_file(tmp_path / "again" / SINGLE)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
