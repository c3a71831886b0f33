"""Tensors of transformers' models that files hold in another form."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from qfsdp.checkpoint.weights.other_names import _rows
from qfsdp.checkpoint.weights.safetensors_folder import SINGLE, SafetensorsFolder
from qfsdp.modules.hub_models.config import hub_config
from qfsdp.modules.hub_models.names import Source, parameter_sources
from tests import hub_models


def test_stacked_matrices_are_read_transposed(tmp_path: Path) -> None:
    """Qwen3-VL's experts, as published; those that have the parameter's shape stay as they are."""
    stored = torch.randn(3, 8, 5)
    save_file({"experts": stored}, tmp_path / SINGLE)
    folder, source = SafetensorsFolder(tmp_path), Source(("experts",), transposed=True)
    for shape in ((3, 5, 8), (3, 8, 5)):
        found = _rows("experts", source, shape, folder.tensors)
        expected = stored if shape == stored.shape else stored.transpose(1, 2)
        assert found.shape == shape and torch.equal(folder.read(found), expected)


def test_layers_that_predict_further_tokens_are_not_read_at_any_depth() -> None:
    """transformers leaves out layer 61 of DeepSeek-V3, the only size it knows."""
    config = hub_models.config("deepseek_v3").to_dict() | {"num_nextn_predict_layers": 1}
    config["architectures"] = ["DeepseekV3ForCausalLM"]
    layer = "model.layers.{}.mlp.experts.0.down_proj.weight"
    names = [layer.format(3), layer.format(4), "model.layers.4.eh_proj.weight", layer.format(5)]
    hf = hub_config(config, "config.json").meta
    found = parameter_sources(hf, names, "folder", hf.state_dict().keys())
    stacked = "model.layers.{}.mlp.experts.down_proj"
    assert found.keys() == {stacked.format(3), stacked.format(5)}  # the last one is an error
