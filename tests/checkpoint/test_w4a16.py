"""W4A16 folders: the numbers that transformers loads with compressed-tensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qfsdp.checkpoint.export.w4a16 import integers
from qfsdp.checkpoint.saved_template import TEMPLATE_FILE
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.quantize import quantize_folder
from qfsdp.checkpoint.weights.safetensors_folder import INDEX
from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.quantized_linear import QuantizationConfig
from tests.checkpoint.test_merge import HEAD_TOO, logits, merged, plain_model, trained
from tests.models import cpu_world, load_model
from tests.peft_oracle import dequantized_base
from tests.ranks import run_ranks
from tests.tiny import ROOT, run_recipe, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")
EVEN = {"intermediate_size": 384}  # 192 and 384 are whole groups of 64


def exported(model: Path, output: Path, *words: str) -> Path:
    """The recipe's folder with its shipped config and the overrides `words`."""
    argv = ["--config", str(ROOT / "configs/export.yaml"), f"model.path={model}", "format=w4a16"]
    argv += ["adapter=null", "quantization.format=none", "model.dtype=fp32", "group_size=64"]
    run_recipe("export", [*argv, f"output_dir={output}", *words])
    return output


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that the tensors of a folder stand for, by arithmetic of its own: eight integers
    in a word, the first in the lowest bits, each 8 above its value."""
    found = {}
    for name, value in tensors.items():
        if name.endswith("_packed"):
            stem = name.removesuffix("_packed")
            scale, shape = tensors[f"{stem}_scale"].float(), tensors[f"{stem}_shape"].tolist()
            shifts = torch.arange(0, 32, 4, dtype=torch.int32)
            numbers = ((value[:, :, None] >> shifts) & 15).flatten(1).float() - 8
            found[stem] = (numbers.view(*scale.shape, -1) * scale[:, :, None]).view(shape)
        elif not name.endswith(("_scale", "_shape")):
            found[name] = value.float()
    return found


def test_weights_are_rounded_to_the_nearest() -> None:
    """The largest of a group is 7.5 scales away from 0, and the nearest integer of -8 to 7 is half
    a scale from it."""
    pytest.importorskip("compressed_tensors")
    rows = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    rows[2] = 0
    made = integers(rows, 128, torch.bfloat16)
    assert made["weight_packed"].dtype == torch.int32 and made["weight_packed"].shape == (6, 32)
    assert made["weight_scale"].dtype == torch.bfloat16 and made["weight_scale"].shape == (6, 2)
    largest = rows.view(6, 2, 128).abs().amax(2)
    torch.testing.assert_close(made["weight_scale"].float(), largest / 7.5, rtol=2**-8, atol=2e-7)
    state = {f"w_{key.removeprefix('weight_')}": value for key, value in made.items()}
    state["w_shape"] = torch.tensor(rows.shape)
    steps = (dequantized(state)["w"] - rows).view(6, 2, 128)
    scale = made["weight_scale"].float()[:, :, None]
    assert (steps.abs() <= scale * (0.5 + 7.5 * 2**-8)).all()


@pytest.mark.parametrize(
    "section, format, changes",
    [
        (None, "none", {}),
        (AdapterConfig("dora", 5, 7.0, targets=HEAD_TOO), "nf4", {"tie_word_embeddings": True}),
    ],
)
def test_transformers_loads_it(
    section: AdapterConfig | None, format: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """The logits are those of the dequantized weights, and these are near the merged ones."""
    pytest.importorskip("compressed_tensors")
    model_dir = write_tiny_model(tmp_path / "model", **EVEN | changes)
    words, plain = [f"quantization.format={format}"], model_dir
    if section is not None:
        trained(model_dir, section, tmp_path / "adapter", format=format)
        of_merge = ["model.dtype=fp32", "dtype=fp32", *words]
        plain = merged(model_dir, tmp_path / "adapter", tmp_path / "plain", *of_merge)
        words.append(f"adapter={tmp_path / 'adapter'}")
    folder = exported(model_dir, tmp_path / "out", *words)
    found = dequantized(load_file(folder / "model.safetensors"))
    expected = plain_model(plain)
    for name, value in expected.state_dict().items():
        rounded = found[name]
        if "proj" in name:
            assert 0.05 < (rounded - value).norm() / value.norm() < 0.15, name
        else:
            assert torch.equal(rounded, value.bfloat16().float()), name
        value.copy_(rounded)
    theirs = plain_model(folder)
    assert torch.equal(logits(theirs), logits(expected))
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config["torch_dtype"] == "bfloat16"


def test_a_base_that_is_stored_quantized_needs_no_adapter(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = write_tiny_model(tmp_path / "model", **EVEN)
    quantize_folder(ModelWeights(model), QuantizationConfig(), tmp_path / "nf4", cpu_world(), "bnb")
    folder = exported(tmp_path / "nf4", tmp_path / "out", "quantization.format=nf4")
    found = dequantized(load_file(folder / "model.safetensors"))
    held = dequantized_base(load_model(tmp_path / "nf4", targets=["all-linear"]))
    for name, value in held.items():
        assert (found[name] - value).norm() < 0.15 * value.norm(), name
    with pytest.raises(UserError, match="^quantization.format: 'nf4'; expected none without ada"):
        exported(model, tmp_path / "again", "quantization.format=nf4")


def test_what_is_described(tmp_path: Path) -> None:
    """The keys that vLLM 0.33 chooses its kernels by (`CompressedTensorsConfig`)."""
    pytest.importorskip("compressed_tensors")
    model_dir = write_tiny_model(tmp_path / "model", **EVEN)
    folder = exported(model_dir, tmp_path / "out", "dtype=fp16")
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "compressed-tensors" and section["format"] == "pack-quantized"
    assert section["ignore"] == ["lm_head"] and section["quantization_status"] == "compressed"
    (group,) = section["config_groups"].values()
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    assert group["targets"] == ["Linear"]
    assert weights | {"group_size": 64, "dynamic": False} == group["weights"]
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    assert tensors[f"{name}_packed"].shape == (192, 48)
    assert tensors[f"{name}_scale"].shape == (192, 6)
    assert tensors[f"{name}_scale"].dtype == torch.float16
    assert tensors[f"{name}_shape"].tolist() == [192, 384]
    assert "lm_head.weight" in tensors and "model.embed_tokens.weight" in tensors


def export_files(model: Path, output: Path) -> None:
    exported(model, output, "max_file_bytes=100000")


@pytest.mark.long
def test_ranks_share_the_files_out(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = write_tiny_model(tmp_path / "model", **EVEN)
    (model / TEMPLATE_FILE).write_text("{{ messages }}")
    export_files(model, tmp_path / "one")
    run_ranks(2, export_files, model, tmp_path / "two")
    names = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "two").iterdir())
    assert INDEX in names and TEMPLATE_FILE in names and len(names) > 8
    for name in set(names) - {".lock"}:
        one, two = ((tmp_path / ranks / name).read_bytes() for ranks in ("one", "two"))
        assert one == two, name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["group_size=128"],
            "group_size: 128 does not divide the 192 columns of 'model.layers.0.self_attn.q_proj."
            "weight'; expected 32 or 64",
        ),
        (["group_size=48"], "group_size: 48 is not valid; expected one of 32, 64, 128"),
        (
            ["max_file_bytes=0"],
            "max_file_bytes: 0 is not valid; expected a number of bytes above 0",
        ),
        (["output_dir={model}"], "output_dir: '{model}' is not empty; expected a new folder"),
        (["adapter=nowhere"], "nowhere does not exist; expected an adapter in PEFT's format"),
    ],
)
def test_mistakes_are_reported_in_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = write_tiny_model(tmp_path / "model", **EVEN)
    with pytest.raises(UserError) as error:
        exported(model, tmp_path / "out", *(word.format(model=model) for word in words))
    assert message.format(model=model) in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_experts_and_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_experts": 4}
    model = write_tiny_model(
        tmp_path / "model", **EVEN, architectures=["Qwen3MoeForCausalLM"], head_dim=32, **sizes
    )
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "compressed_tensors", None)
        with pytest.raises(UserError, match="needs the package compressed-tensors; expected `pip"):
            exported(model, tmp_path / "out")
    pytest.importorskip("compressed_tensors")
    with pytest.raises(UserError, match="w4a16 has no form here for the experts of a mixture"):
        exported(model, tmp_path / "out")
