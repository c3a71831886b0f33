"""Preference tuning that is killed goes on with the same bits; PEFT and merges take its adapter."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qfsdp.checkpoint.resume import published
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.training.preference_losses import Answers, Loss, sigmoid
from tests.json_lines import metric_lines
from tests.peft_oracle import dequantized_base, run_peft
from tests.ranks import run_ranks
from tests.tiny import ROOT, load_recipe, run_in_turn, write_tiny_run
from tests.toy_data import TOY_PAIRS
from tests.waiting import LIMIT_S

TUNE = Path(sys.executable).with_name("tune")
CONFIG = """
output_dir: {folder}/run
adapter: {{rank: 5, alpha: 7, dropout: 0.1, start_from: {folder}/start/adapter}}
reference: start
loss: {{_component_: tests.recipes.test_dpo_resume.deadly}}
packed: true
epochs: 3
max_steps: 9
checkpoint: {{every_n_steps: 1, keep_last: 2}}
"""
_calls = 0


def deadly(answers: Answers, beta: float = 0.1) -> Loss:
    """DPO; $TESTS_KILL "RANK STEP" is a rank that kills itself in a step of this process."""
    global _calls
    if answers.logprobs.requires_grad:
        _calls += 1
        if os.environ.get("TESTS_KILL") == f"{os.environ['RANK']} {_calls}":
            os.kill(os.getpid(), signal.SIGKILL)
    return sigmoid(answers, beta)


run_recipe = partial(run_in_turn, "dpo_distributed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, the config, `start` (a short run) and `whole` (a run of two ranks)."""
    folder = tmp_path_factory.mktemp("dpo_resume")
    write_tiny_run(folder, TOY_PAIRS + CONFIG)
    start = ["reference=base", "adapter.start_from=null", "adapter.dropout=0", "max_steps=3"]
    start += ["optimizer.lr=1e-2", "checkpoint.every_n_steps=null", f"output_dir={folder}/start"]
    run_ranks(2, run_recipe, folder, start, [f"output_dir={folder}/whole"])
    return folder


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in metric_lines(run)]


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_bits(folder: Path) -> None:
    """Packed, with dropout, on two ranks, in the second epoch. With another start it does not."""
    run, expected = folder / "killed", losses(folder / "whole")
    assert [step for step, _ in expected] == list(range(1, 10))
    words = ["--config", f"{folder}/config.yaml", f"output_dir={run}", "resume=auto"]
    command = [str(TUNE), "run", "--nproc_per_node", "2", "recipes/dpo_distributed", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "QFSDP_EAGER_KERNELS": "1"}
    killed = subprocess.run(
        command,
        cwd=ROOT,
        env=environment | {"TESTS_KILL": "1 6"},
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
    )
    assert killed.returncode != 0 and "was killed by SIGKILL" in killed.stderr, killed.stderr
    assert losses(run) == expected[: len(losses(run))] and len(losses(run)) in (4, 5)
    assert published(run)
    run_ranks(2, run_recipe, folder, words[2:])
    assert losses(run) == expected
    name = "adapter/adapter_model.safetensors"
    assert (run / name).read_bytes() == (folder / "whole" / name).read_bytes()

    other = folder / "other"
    shutil.copytree(folder / "start/adapter", other)
    tensors = load_file(other / "adapter_model.safetensors")
    changed = {key: value * 1.5 for key, value in tensors.items()}
    save_file(changed, other / "adapter_model.safetensors", {"format": "pt"})
    recipe = load_recipe("dpo_distributed")
    words += [f"adapter.start_from={other}"]
    with pytest.raises(UserError) as error:
        recipe.check(load_config(recipe.Config, words))
    message = str(error.value)
    assert "other settings: adapter.start_from (its weights): was " in message
    assert "\n" not in message and message.count(": was ") == 1


PEFT_SCRIPT = """
from peft import PeftModel

(adapter,) = arguments
model = PeftModel.from_pretrained(base_model(), adapter)
with torch.no_grad():
    torch.save({"logits": model(tokens).logits}, f"{folder}/result.pt")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_peft_and_merges_take_the_adapter(folder: Path, tmp_path: Path) -> None:
    """The same logits as the model that was trained."""
    from qfsdp.checkpoint.adapter_files import load_adapter
    from qfsdp.modules.low_rank.linear import refresh_dora_norms

    recipe, adapter = load_recipe("dpo_distributed"), folder / "whole/adapter"
    cfg = load_config(
        recipe.Config, ["--config", f"{folder}/config.yaml", "quantization.format=none"]
    )
    model = recipe.load_model(cfg, recipe.init_world(cfg.sharding, cfg.distributed))
    load_adapter(model, adapter)
    refresh_dora_norms(model)
    tokens = torch.randint(0, 577, (2, 24))
    with torch.no_grad():
        mine = model.eval()(tokens)
    theirs = run_peft(
        PEFT_SCRIPT, folder / "model", dequantized_base(model), tokens, tmp_path, adapter
    )
    torch.testing.assert_close(mine, theirs["logits"], rtol=1e-4, atol=1e-4)

    command = [
        str(TUNE),
        "run",
        "recipes/merge",
        "--config",
        "configs/merge.yaml",
        f"model.path={folder}/model",
        f"adapter={adapter}",
        *("model.dtype=fp32", "quantization.format=none", "dtype=fp32"),
    ]
    subprocess.run(
        [*command, f"output_dir={tmp_path}/merged"], cwd=ROOT, check=True, timeout=LIMIT_S
    )
    words = [f"model.path={tmp_path}/merged", "adapter.start_from=null", "reference=base"]
    words = ["--config", f"{folder}/config.yaml", "quantization.format=none", *words]
    cfg = load_config(recipe.Config, words)
    merged = recipe.load_model(cfg, recipe.init_world(cfg.sharding, cfg.distributed))
    with torch.no_grad():
        torch.testing.assert_close(merged.eval()(tokens), mine, rtol=1e-4, atol=1e-4)
