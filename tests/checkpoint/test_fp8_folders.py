"""FP8 folders: their weights equal those that transformers dequantizes, bit for bit."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qfsdp.checkpoint.adapter_files import save_adapter
from qfsdp.checkpoint.weights.add_tokens import NewTokens, add_tokens
from qfsdp.checkpoint.weights.expand import expand_folder
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.fp8_layout import as_numbers, without_scales
from qfsdp.checkpoint.weights.load import ModelConfig, load_base
from qfsdp.checkpoint.weights.read import STORED_DTYPES, OpenFiles
from qfsdp.checkpoint.weights.safetensors_folder import SINGLE, SafetensorsFolder
from qfsdp.checkpoint.weights.write import MAX_FILE_BYTES
from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from tests import hub_models
from tests.models import cpu_world, load_model, randomize_adapters
from tests.peft_oracle import dequantized_base
from tests.tiny import GPT_OSS, ROOT, run_recipe, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")
KEPT = ("embed_tokens", "lm_head", "gate.weight", "vision", "multi_modal")
BLOCK = 16


def scaled(weight: Tensor, block: tuple[int, int], kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """FP8 numbers and the factors of their blocks; the last ones may be parts."""
    rows, cols = weight.shape
    grid = (-(-rows // block[0]), -(-cols // block[1]))
    scale = torch.empty(grid)
    wide = torch.empty_like(weight)
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            wide[at] = scale[i, j] = (weight[at].abs().max() / 448).to(kind).float()
    return (weight / wide).to(torch.float8_e4m3fn), scale.to(kind)


def to_fp8(source: Path, folder: Path, kind: torch.dtype = torch.float32) -> Path:
    """Writes the linears of a folder in FP8, in blocks, as DeepSeek and Qwen publish them."""
    shutil.copytree(source, folder)
    found: dict[str, Tensor] = {}
    for name, tensor in load_file(source / SINGLE).items():
        if tensor.dim() != 2 or any(part in name for part in KEPT):
            found[name] = tensor.to(torch.bfloat16)
            continue
        codes, scale = scaled(tensor.float(), (BLOCK, BLOCK), kind)
        found |= {name: codes, f"{name}_scale_inv": scale}
    save_file(found, folder / SINGLE, {"format": "pt"})
    section = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    change(folder, quantization_config=section | {"weight_block_size": [BLOCK, BLOCK]})
    return folder


def change(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))


def loaded(folder: Path, implementation: Any, adapter: AdapterConfig | None = None) -> Any:
    config = ModelConfig(str(folder), dtype="bf16", implementation=implementation)
    model = config.build()
    if adapter is not None:
        quantize_linears(model, QuantizationConfig())
        add_adapters(model, adapter)
    load_base(model, config.weights(), torch.device("cpu"))
    if adapter is not None:
        init_adapters(model, seed=0)
        randomize_adapters(model)
    return model


def merged(folder: Path, implementation: str) -> dict[str, Tensor]:
    """What `recipes/merge` writes of DoRA over NF4."""
    adapter, out = AdapterConfig("dora", rank=4, alpha=8), folder.with_name(f"{folder.name}-out")
    model = loaded(folder, implementation, adapter)
    save_adapter(model, adapter, str(folder), folder / "adapter", cpu_world())
    words = [f"model.path={folder}", f"model.implementation={implementation}"]
    words += [f"adapter={folder}/adapter", f"output_dir={out}", "model.dtype=bf16"]
    run_recipe("merge", ["--config", str(ROOT / "configs/merge.yaml"), *words])
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    return load_file(out / SINGLE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "implementation"),
    [("llama", "native"), ("deepseek_v3", "transformers"), ("gemma3", "transformers")],
)
def test_weights_and_merges_equal_those_of_the_dequantized_model(
    name: str, implementation: str, tmp_path: Path
) -> None:
    kind = type(hub_models.save_hub_model(name, tmp_path / "plain"))
    fp8 = to_fp8(tmp_path / "plain", tmp_path / "fp8")
    theirs = kind.from_pretrained(fp8, dtype=torch.bfloat16)  # dequantized, as this is a CPU
    expected = theirs.state_dict()
    for key, param in dequantized_base(loaded(fp8, implementation)).items():
        assert torch.equal(param, expected[key].to(param.dtype)), key
    plain = kind.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    plain.load_state_dict(expected)  # its own `save_pretrained` would write FP8
    plain.save_pretrained(tmp_path / "bf16")
    held = [loaded(tmp_path / f, implementation, AdapterConfig()) for f in ("fp8", "bf16")]
    first, second = map(dequantized_base, held)
    assert all(torch.equal(first[key], second[key]) for key in first)
    ours, reference = merged(fp8, implementation), merged(tmp_path / "bf16", implementation)
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[key], reference[key]) for key in ours)
    assert {tensor.dtype for tensor in ours.values()} <= {torch.bfloat16, torch.float32}


def test_longer_and_deeper_models_are_plain(tmp_path: Path) -> None:
    """A section about FP8 left in config.json would have others multiply by factors."""
    fp8 = ModelWeights(to_fp8(write_tiny_model(tmp_path / "plain"), tmp_path / "fp8"))
    new = NewTokens({"<a>": 577}, 578, {})
    add_tokens(fp8, new, tmp_path / "longer", cpu_world(), MAX_FILE_BYTES)
    expand_folder(fp8, 1, tmp_path / "deeper", cpu_world())
    for folder in (tmp_path / "longer", tmp_path / "deeper"):
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
        assert {t.dtype for t in load_file(folder / SINGLE).values()} == {torch.bfloat16}


def layer(folder: Path, weight: Tensor, scale: Tensor, suffix: str, **quantization: Any) -> Path:
    """A folder of one layer whose q_proj is in FP8."""
    hub_models.save_hub_model("llama", folder)
    key = "model.layers.0.self_attn.q_proj.weight"
    found = load_file(folder / SINGLE) | {key: weight, f"{key}{suffix}": scale}
    found[key.replace("weight", "input_scale")] = torch.ones(1)  # of static activations
    save_file(found, folder / SINGLE, {"format": "pt"})
    change(folder, quantization_config=quantization)
    return folder


# Blocks that a grid's shape alone does not tell: 80 and 48 rows of 128, not 64 and 64.
IN_BLOCKS = {"config_groups": {"FP8": {"weights": {"block_structure": [80, 80]}}}}


@pytest.mark.parametrize(
    ("shape", "kind", "suffix", "section"),
    [
        ((3, 2), torch.float32, "_scale_inv", {"weight_block_size": [48, 80]}),  # parts at the end
        ((2, 2), torch.bfloat16, "_scale_inv", {"weight_block_size": [64, 64]}),  # Qwen3-32B-FP8
        ((2, 2), torch.float8_e8m0fnu, "_scale_inv", {}),
        ((), torch.bfloat16, "_scale_inv", {"weight_block_size": None}),  # Mistral
        ((128, 1), torch.float32, "_scale", {"format": "float-quantized"}),
        ((1,), torch.bfloat16, "_scale", {"format": "float-quantized"}),
        ((2, 2), torch.float32, "_scale", {"format": "float-quantized"} | IN_BLOCKS),
    ],
)
def test_every_form_of_factors(
    shape: tuple[int, ...], kind: torch.dtype, suffix: str, section: dict[str, Any], tmp_path: Path
) -> None:
    method = "fp8" if suffix == "_scale_inv" else "compressed-tensors"
    codes = torch.randn(128, 128).to(torch.float8_e4m3fn)
    scale = (2.0 ** torch.randint(-8, -3, shape)).to(kind)
    if kind != torch.float8_e8m0fnu:
        scale = (torch.rand(shape) / 50).to(kind)
    folder = layer(tmp_path, codes, scale, suffix, quant_method=method, **section)
    high, wide = section.get("weight_block_size") or (64, 64)
    if "config_groups" in section:
        high, wide = IN_BLOCKS["config_groups"]["FP8"]["weights"]["block_structure"]
    if len(shape) < 2:
        high = wide = 128
    elif shape[1] == 1:
        high, wide = 1, 128
    grid = scale.float().reshape(-1, shape[1] if len(shape) == 2 else 1)
    factors = grid.repeat_interleave(high, 0)[:128].repeat_interleave(wide, 1)[:, :128]
    expected = (codes.float() * factors).to(torch.bfloat16)
    found = dict(base_parameters(loaded(folder, "native")))
    held = found["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(held.to(torch.bfloat16), expected)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_every_code_is_its_number(dtype: str) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    for codes in (every, every[every % 128 != 127]):
        expected = codes.view(STORED_DTYPES[dtype]).float()
        assert torch.equal(as_numbers(codes, dtype).view(torch.int32), expected.view(torch.int32))


def test_factors_of_stacked_experts(tmp_path: Path) -> None:
    """Several matrices in one tensor, read from the middle of one to the middle of another."""
    weights = [torch.randn(24, 20) for _ in range(3)]
    codes, scales = zip(*(scaled(w, (16, 16), torch.float32) for w in weights), strict=True)
    found = {"experts": torch.stack(codes), "experts_scale_inv": torch.stack(scales)}
    save_file(found, tmp_path / SINGLE)
    stored = SafetensorsFolder(tmp_path)
    section = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    tensor = without_scales(stored.tensors, section)["experts"]
    wide = [s.repeat_interleave(16, 0)[:24].repeat_interleave(16, 1)[:, :20] for s in scales]
    expected = torch.cat([c.float() * w for c, w in zip(codes, wide, strict=True)])
    whole = stored.read(tensor)
    assert torch.equal(whole, expected.view(3, 24, 20).to(torch.bfloat16))
    into = torch.empty(30, 20, dtype=torch.bfloat16)
    with closing(OpenFiles()) as files:
        files.read_rows(replace(tensor, shape=(72, 20)), 20, into)
    assert torch.equal(into, expected[20:50].to(torch.bfloat16))


def test_columns_of_fp8_are_refused(tmp_path: Path) -> None:
    """Of gpt-oss' experts: the bytes of the file's header were taken for weights."""
    folder = write_tiny_model(tmp_path / "model", **GPT_OSS, num_hidden_layers=1)
    tensors = load_file(folder / SINGLE)
    stem = "model.layers.0.mlp.experts"
    for name in ("gate_up_proj", "down_proj"):
        rows = tensors.pop(f"{stem}.{name}.weight").unflatten(0, (5, -1)).mT.contiguous()
        tensors[f"{stem}.{name}"] = rows.to(torch.float8_e4m3fn)
        tensors[f"{stem}.{name}_scale_inv"] = torch.ones(5, 1, 1)
        tensors[f"{stem}.{name}_bias"] = tensors.pop(f"{stem}.{name}.bias").view(5, -1)
    save_file(tensors, folder / SINGLE)
    change(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match=r"is in FP8, and its columns are read; expected 16 bits"):
        load_model(folder, format="none")


@pytest.mark.parametrize(
    ("scale", "name", "section", "message"),
    [
        (
            (2, 2),
            "_other",
            {},
            "is F8_E4M3, and '.*q_proj.weight_scale_inv' with its factors is mis",
        ),
        ((3, 2), "_scale_inv", {}, "are no factors of '.*q_proj.weight' .128, 128."),
        (
            (128, 1),
            "_scale",
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "quant_method 'compressed-tensors'; .* compressed-tensors with format float-quantized",
        ),
        (
            (128, 1),
            "_scale",
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "transform_config": {"config_groups": {"R4": {"type": "hadamard"}}},
            },
            "expected .* compressed-tensors with format float-quantized without transform_config",
        ),
    ],
)
def test_what_is_not_whole_is_refused(
    scale: tuple[int, ...], name: str, section: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Weights without their factors would be hundreds of times too large, without an error."""
    codes = torch.randn(128, 128).to(torch.float8_e4m3fn)
    section = {"quant_method": "fp8"} | section
    folder = layer(tmp_path, codes, torch.ones(scale), name, **section)
    with pytest.raises(UserError, match=message) as error:
        ModelWeights(folder, "native")
    assert "\n" not in str(error.value)
