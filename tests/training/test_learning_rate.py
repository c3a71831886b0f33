"""`optimizer.lr: auto`: the published numbers, where they hold; a line where they do not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.launch.start import validate_config
from qfsdp.training import learning_rate
from qfsdp.training.learning_rate import choose_lr
from tests.json_lines import metric_lines
from tests.ranks import run_ranks
from tests.tiny import ROOT, load_recipe, write_tiny_model, write_tiny_run

pytestmark = pytest.mark.usefixtures("eager")
QDORA, FULL = "qdora_distributed", "full_finetune_distributed"
CONFIG = """
output_dir: {folder}/run
model: {{path: {folder}/model, dtype: fp32}}
tokenizer: {{_component_: tests.toy_data.tokenizer}}
dataset: {{_component_: tests.toy_data.Samples}}
optimizer: {{_component_: torch.optim.AdamW, lr: auto}}
max_seq_len: 64
max_steps: 2
report: false
preflight: false
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("learning_rate"), CONFIG)


@pytest.fixture(autouse=True)
def not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(learning_rate._SAID, "")


def read(folder: Path, name: str, *words: str) -> Any:
    return load_config(load_recipe(name).Config, ["--config", f"{folder}/config.yaml", *words])


def write_config(folder: Path, **changes: object) -> Path:
    """A folder with the sizes of a model, without weights."""
    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("architecture", "size", "name", "lr"),
    [
        ("LlamaForCausalLM", 4096, QDORA, 2.86e-4),  # Llama-3.1-8B
        ("LlamaForCausalLM", 8192, QDORA, 1.66e-4),  # Llama-3.1-70B
        ("LlamaForCausalLM", 4096, FULL, 2.86e-5),
        ("Qwen2ForCausalLM", 3584, QDORA, 4.78e-4),  # Qwen2.5-7B
    ],
)
def test_published_numbers(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    architecture: str,
    size: int,
    name: str,
    lr: float,
) -> None:
    sizes: dict[str, Any] = {"hidden_size": size, "num_attention_heads": 32}
    model = write_config(
        tmp_path / "model", architectures=[architecture], num_key_value_heads=8, **sizes
    )
    cfg = read(folder, name, f"model.path={model}")
    choose_lr(cfg)
    assert cfg.optimizer.kwargs["lr"] == lr
    assert f"optimizer.lr: auto is {lr:g} = 5e-5 x 1" in capsys.readouterr().out
    choose_lr(read(folder, name, f"model.path={model}"))  # as the ranks of the run do
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        (QDORA, ["adapter.method=ia3"], "adapter.method=ia3; expected lora or dora, or a number"),
        (QDORA, ["adapter.alpha=16"], "adapter.alpha=16; expected 32, or a number"),
        (QDORA, ["adapter.rslora=true"], "adapter.rslora=true; expected false, or a number"),
        (QDORA, ["adapter.lora_plus_ratio=16"], "adapter.lora_plus_ratio=16; expected null"),
        (QDORA, ["optimizer._component_=torch.optim.SGD"], "torch.optim.SGD; expected an AdamW"),
        (FULL, ["trainable.layers=[1]"], "trainable.layers=[1]; expected all"),
    ],
)
def test_where_it_is_not_known(folder: Path, name: str, words: list[str], message: str) -> None:
    with pytest.raises(
        UserError, match=re.escape(f"optimizer.lr: 'auto' is not known for {message}")
    ):
        choose_lr(read(folder, name, *words))


def test_a_family_that_was_not_fitted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning_rate, "EXPONENTS", {"Qwen": 0.0775})
    message = "'auto' is not known for LlamaForCausalLM models; expected one of Qwen, or a number"
    with pytest.raises(UserError, match=message):
        choose_lr(read(folder, QDORA))


def test_validated_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    validate_config(tmp_path / "config.yaml", ROOT / f"recipes/{QDORA}.py")


def run(folder: Path, words: list[str]) -> None:
    recipe = load_recipe(QDORA)
    cfg = read(folder, QDORA, *words)
    recipe.check(cfg)
    recipe.main(cfg)


@pytest.mark.long
def test_a_run_keeps_its_number(folder: Path) -> None:
    """In its config, in its metrics, and when it is resumed; also with the preflight."""
    run_ranks(1, run, folder, ["max_steps=1", "preflight=true"])
    run_ranks(1, run, folder, ["resume=auto"])
    lr = f"{5e-4 * (2000 / 192) ** 0.781:.3g}"
    assert f"lr: {float(lr)}" in (folder / "run/config.yaml").read_text()
    assert [line["lr"] for line in metric_lines(folder / "run")] == [float(lr)] * 2
