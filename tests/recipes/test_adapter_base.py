"""An adapter knows its base: what a run measured comes back without any key, and what is given
against it is told."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from qfsdp.checkpoint.adapter_base import BASE_FILE
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.data import hf_tokenizer
from tests.data.test_tokenizer import CHAT, byte_level, write_folder
from tests.json_lines import metric_lines
from tests.tiny import ROOT, load_recipe, run_recipe, write_tiny_model

CONFIG = """
model: {{path: {folder}/model, dtype: fp32}}
tokenizer: {{_component_: qfsdp.data.hf_tokenizer, path: "${{model.path}}", chat_template: chatml}}
dataset: {{_component_: qfsdp.data.chat_dataset, source: {folder}/rows.jsonl}}
validation: {{eval_every: 4, at_start: true, sets: {{held: {{_component_: qfsdp.data.chat_dataset,
    source: {folder}/rows.jsonl}}}}}}
optimizer: {{_component_: torch.optim.AdamW, lr: 1e-2}}
quantization: {{format: hqq, targets: [q_proj, up_proj]}}
adapter: {{method: dora, rank: 2, targets: [v_proj, up_proj]}}
output_dir: {folder}/run
max_seq_len: 256
max_steps: 4
report: false
preflight: false
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, rows, and a run: every setting is none of the defaults."""
    os.environ["QFSDP_EAGER_KERNELS"] = "1"  # conftest restores it after this file
    folder = tmp_path_factory.mktemp("base")
    write_tiny_model(folder / "model")
    write_folder(folder / "model", byte_level())
    (folder / "rows.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 8)
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    run_recipe("qdora_distributed", ["--config", f"{folder}/config.yaml"])
    shutil.move(folder / "run/adapter", folder / "adapter")  # alone: without the run's config
    return folder


def config_of(recipe: str, adapter: Path, *words: str) -> tuple[Any, Any]:
    module = load_recipe(recipe)
    argv = ["--config", str(ROOT / f"configs/{recipe}.yaml"), f"adapter={adapter}", *words]
    return module, load_config(module.Config, argv)


def loss_of(run: Path, out: Path, *words: str) -> float:
    words = ("~loss.arithmetic", "~exact_match", f"output={out}/x.json", "max_seq_len=256", *words)
    words += ("loss.held._component_=qfsdp.data.chat_dataset", f"loss.held.source={run}/rows.jsonl")
    recipe, cfg = config_of("evaluate", run / "adapter", *words)
    recipe.check(cfg)
    recipe.main(cfg)
    found = json.loads(Path(cfg.output).read_text())["results"]
    return next(result["value"] for result in found if result["metric"] == "loss")


def test_evaluate_and_merge_compute_what_the_run_did(run: Path, tmp_path: Path) -> None:
    lines = metric_lines(run / "run")
    measured = [line["validation/held/loss"] for line in lines if "validation/held/loss" in line]
    assert loss_of(run, tmp_path / "a") == pytest.approx(measured[-1], abs=1e-5)
    assert abs(measured[0] - measured[-1]) > 1e-3

    merge, cfg = config_of("merge", run / "adapter", f"output_dir={tmp_path}/m", "dtype=fp32")
    merge.check(cfg)
    merge.main(cfg)
    merged = (f"model.path={tmp_path}/m", "adapter=null")  # neither a format nor a dtype
    assert loss_of(run, tmp_path / "b", *merged) == pytest.approx(measured[-1], abs=1e-5)
    again = (*merged, "quantization.format=nf4", "model.dtype=bf16")
    assert abs(loss_of(run, tmp_path / "c", *again) - measured[-1]) > 1e-4


@pytest.mark.parametrize("name", ["generate", "chat", "export"])
def test_other_recipes_take_the_same_base(name: str, run: Path) -> None:
    more = ["prompt=Why?"] if name == "generate" else []
    _, cfg = config_of(name, run / "adapter", *more)
    assert (cfg.model.path, cfg.model.dtype) == (f"{run}/model", "fp32")
    assert (cfg.quantization.format, cfg.quantization.targets) == ("hqq", ["q_proj", "up_proj"])
    assert name == "export" or cfg.tokenizer.kwargs == {"path": f"{run}/model"}


def test_the_tokenizer_is_saved_with_it(run: Path) -> None:
    saved, base = hf_tokenizer(f"{run}/adapter"), hf_tokenizer(f"{run}/model", "chatml")
    assert saved.encode_chat(CHAT[:2]) == base.encode_chat(CHAT[:2])
    assert str(run) not in (run / "adapter" / BASE_FILE).read_text()


def test_mismatches_are_told(run: Path, tmp_path: Path, capsys: Any, caplog: Any) -> None:
    """Base, dtype, format, targets and tokenizer; the template is told where it is built."""
    other = shutil.copytree(run / "model", tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text + "\n")
    words = [f"model.path={other}", "model.dtype=bf16", "prompt=Why?", "sampling.max_new_tokens=4"]
    words += ["quantization.format=nf4", "quantization.targets=all-linear"]
    recipe, cfg = config_of("generate", run / "adapter", *words, "tokenizer.chat_template=plain")
    recipe.check(cfg)
    told = capsys.readouterr().err.splitlines()
    keys = ("model.path", "model.dtype", "quantization.format", "quantization.targets")
    for key in (*keys, "tokenizer.path"):
        (line,) = [line for line in told if line.startswith(f"warning: {key}: ")]
        assert f"{run}/adapter was trained with" in line
    assert "tokenizer.chat_template: plain; the adapter was trained with" in caplog.text


def test_an_adapter_that_names_no_base(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run / "adapter", tmp_path / "adapter")
    written = json.loads((folder / "adapter_config.json").read_text())
    moved = written | {"base_model_name_or_path": "elsewhere"}
    (folder / "adapter_config.json").write_text(json.dumps(moved))
    with pytest.raises(
        UserError, match="^model.path: 'elsewhere', which .* does not exist; expect"
    ):
        config_of("generate", folder, "prompt=Why?")
    written["base_model_name_or_path"] = None
    (folder / "adapter_config.json").write_text(json.dumps(written))
    with pytest.raises(UserError, match="names no base; expected model.path=MODEL"):
        config_of("generate", folder, "prompt=Why?")
