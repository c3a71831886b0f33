"""The card of adapters and models: what it tells, and what it keeps to itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from qfsdp.checkpoint.model_card import model_card
from qfsdp.checkpoint.weights.output_folder import OutputFolder
from qfsdp.config.load import load_config, to_yaml
from tests.released.make import HERE, MODEL
from tests.tiny import ROOT, load_recipe, run_recipe
from tests.toy_data import TOY_CONFIG


def card_of(tmp_path: Path, *words: str) -> tuple[dict[str, object], str]:
    """The head and the whole card of a run in `tmp_path` of which 8 updates are logged."""
    run = tmp_path / "run"
    (run / "adapter").mkdir(parents=True)
    (run / "adapter/adapter_config.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(TOY_CONFIG.format(folder=tmp_path))
    argv = ["--config", f"{tmp_path}/config.yaml", f"output_dir={run}", "batch_size=1", *words]
    cfg = load_config(load_recipe().Config, argv)
    (run / "config.yaml").write_text(to_yaml(cfg))
    lines = [{"step": step, "loss": 3 - step / 10} for step in (1, 8)]
    lines += [{"step": 8, "validation/heldout/loss": 2.5}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    card = model_card(cfg, run / "adapter")
    return yaml.safe_load(card.split("---\n")[1]), card


def test_it_tells_base_method_data_and_figures(tmp_path: Path) -> None:
    words = ["model.path=org/tiny@v2", "adapter.method=lora", "adapter.rank=4"]
    head, card = card_of(tmp_path, *words, "push_to_hub=me/tuned")
    assert head["library_name"] == "peft"
    assert head["base_model"] == "org/tiny"
    assert "license" not in head
    assert "# me/tuned\n" in card
    for row in (
        "| method | LoRA, rank 4, alpha",
        "| updates | 8 |",
        "| training loss, last | 2.2 |",
        "| held-out loss, heldout | 2.5 (update 8) |",
    ):
        assert row in card, card


def test_paths_of_this_machine_stay_here(tmp_path: Path) -> None:
    head, card = card_of(tmp_path, f"model.path={tmp_path}/secret/my-base")
    assert "base_model" not in head
    assert "Finetuned from my-base with" in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("license: apache-2.0\n", "apache-2.0"),
        ("license: other\nlicense_name: llama3.1\n", "llama3.1"),
        ("license: [mit]\n", None),
        ("- no mapping\n", None),
        (": {", None),
    ],
)
def test_the_license_of_the_base(tmp_path: Path, head: str, expected: str | None) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text(f"---\n{head}---\n\n# Base\n")
    own, card = card_of(tmp_path, f"model.path={base}")
    assert "license" not in own
    found = [line for line in card.splitlines() if line.startswith("| license of the base |")]
    assert found == ([] if expected is None else [f"| license of the base | {expected} |"])


def test_a_folders_name_is_no_html_and_ends_no_block_of_code(tmp_path: Path) -> None:
    name = "b; rm -rf x\n```\n<img src=x>|c"
    _, card = card_of(tmp_path, f"model.path='{tmp_path}/{name}'")
    assert card.count("\n```") == 4 and "\n<img" not in card
    assert "'model.path=b; rm -rf x " in card
    assert "\nFinetuned from b; rm -rf x ''' &lt;img src=x&gt;\\|c with " in card


def test_a_merged_model_has_its_card_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill after that could not be mended by the same command: the folder is a finished model."""
    cards: list[str] = []
    finish = OutputFolder.finish

    def finished(self: OutputFolder, checksums: dict[str, str]) -> None:
        cards.append((self.path / "README.md").read_text())
        finish(self, checksums)

    monkeypatch.setattr(OutputFolder, "finish", finished)
    adapter = HERE / "561a8e2/run/adapter"
    words = [f"model.path={MODEL}", f"adapter={adapter}", f"output_dir={tmp_path / 'merged'}"]
    run_recipe("merge", ["--config", str(ROOT / "configs/merge.yaml"), *words])
    assert len(cards) == 1 and "| method | DoRA, rank 2, alpha 4 |" in cards[0]
