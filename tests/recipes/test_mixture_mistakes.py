"""Mistakes in a mixture's files and config end in `check`, one line, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from tests.checkpoint.test_experts_in_files import edited, reference, with_blocks
from tests.tiny import load_recipe
from tests.toy_data import TOY_CONFIG

pytestmark = pytest.mark.usefixtures("eager")

LAYER = "model.layers.1.mlp.experts"
SCALES = f"{LAYER}.gate_up_proj_scales"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mixtures")
    for family in ("qwen3_moe", "gpt_oss"):
        reference(family, vocab_size=577).save_pretrained(root / family)
    return {"qwen3_moe": root / "qwen3_moe", "mxfp4": with_blocks(root / "gpt_oss", root / "mxfp4")}


def unchanged(tensors: dict[str, Tensor]) -> None:
    """Nothing."""


def without_expert(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(f"{LAYER}.3.")]:
        del tensors[name]


def narrower_scales(tensors: dict[str, Tensor]) -> None:
    tensors[SCALES] = tensors[SCALES][:, :, :1]


# Model, edit of its tensors, keys of config.json, words of the command, message.
CASES: dict[str, tuple[str, Callable[[dict[str, Tensor]], None], dict[str, Any], str, str]] = {
    "fewer experts than config.json says": (
        "qwen3_moe",
        unchanged,
        {"num_experts": 6},
        "",
        ".*expert model.layers.0.mlp.experts.5 is missing; config.json says that there are 6",
    ),
    "more experts": (
        "qwen3_moe",
        unchanged,
        {"num_experts": 4},
        "",
        ".*experts.4' is one too many; config.json says 4",
    ),
    "a missing expert": (
        "qwen3_moe",
        without_expert,
        {},
        "",
        f".*expert {LAYER}.3 is missing; config.json says that there are 5",
    ),
    "scales of the wrong shape": (
        "mxfp4",
        narrower_scales,
        {},
        "",
        f".*tensor '{SCALES}' is U8 .3, 192, 1.; expected U8 .3, 192, 2., MXFP4's blocks",
    ),
    "a target that no expert has": (
        "qwen3_moe",
        unchanged,
        {},
        "adapter.targets=[gate_proj]",
        "adapter.targets: 'gate_proj' is not a linear of this model; expected .*gate_up_proj",
    ),
    "a rank above the experts' size": (
        "qwen3_moe",
        unchanged,
        {},
        "adapter.expert_rank=100",
        "adapter.expert_rank: 100; expected at most ",
    ),
    "more experts per token than experts": (
        "qwen3_moe",
        unchanged,
        {"num_experts_per_tok": 6},
        "",
        ".*num_experts_per_tok is 6; expected",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_mistakes_are_found_before_anything_is_loaded(
    case: str, models: dict[str, Path], tmp_path: Path
) -> None:
    model, edit, keys, word, message = CASES[case]
    folder = edited(models[model], tmp_path / "model", edit)
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "config.yaml").write_text(
        TOY_CONFIG.format(folder=tmp_path) + f"output_dir: {tmp_path}/run\n"
    )
    recipe = load_recipe("qdora_distributed")
    words = [word] if word else []
    cfg = load_config(recipe.Config, ["--config", f"{tmp_path}/config.yaml", *words])
    with pytest.raises(UserError, match=message) as error:
        recipe.check(cfg)
    assert "\n" not in str(error.value)
