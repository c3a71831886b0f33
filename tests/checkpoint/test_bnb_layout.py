"""bitsandbytes' 4-bit checkpoints: qfsdp loads theirs and they load ours, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.qfsdp_layout import MANIFEST
from qfsdp.checkpoint.weights.quantize import quantize_folder
from qfsdp.checkpoint.weights.safetensors_folder import SINGLE
from qfsdp.common.errors import UserError
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from tests.models import cpu_world, load_model, loaded
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")

ABSMAX = {True: "nf4", False: "nf4_fp32_absmax"}  # nested or not -> our format
GATE = "model.layers.0.mlp.gate_proj.weight"
# Columns are multiples of 64, so that blocks do not cross rows; rows are uneven over 3 ranks.
EVEN = {"hidden_size": 192, "intermediate_size": 576, "num_attention_heads": 6}


def their_model(folder: Path, nested: bool | None = None) -> Any:
    """transformers' model, quantized by bitsandbytes; None: as stored in the folder."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    given = {}
    if nested is not None:
        given["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested
        )
    # In eval mode bitsandbytes' CPU kernel computes in bf16 whatever the model's dtype; in
    # training mode (there is no dropout) it multiplies by the dequantized weights, as we do.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **given)
    return model.train()


def quantized_rows(folder: Path) -> dict[str, list[Tensor]]:
    """Bytes and metadata of every quantized weight of the loaded model, gathered."""
    return {k: parts for k, parts in loaded(folder).items() if parts[0].dtype == torch.uint8}


def assert_bytes_of(found: dict[str, list[Tensor]], tensors: dict[str, Tensor]) -> None:
    """Codes, absmax, scales and offset equal those of a bitsandbytes file."""
    names = {n.partition(".absmax")[0] for n in tensors if n.endswith(".absmax")}
    assert found.keys() == names and names
    for name, (qdata, *metadata) in found.items():
        codes, absmax = tensors[name].flatten(), tensors[f"{name}.absmax"]
        width = codes.numel() // qdata.size(0)
        assert torch.equal(qdata[:, :width].flatten(), codes), name
        assert torch.equal(qdata[:, width:].flatten(), absmax.view(torch.uint8)), name
        if metadata:
            state = bytes(tensors[f"{name}.quant_state.bitsandbytes__nf4"].tolist())
            assert torch.equal(metadata[0], tensors[f"{name}.nested_absmax"]), name
            assert metadata[1].item() == json.loads(state)["nested_offset"], name


TOKENS = torch.randint(0, 577, (2, 40), generator=torch.Generator().manual_seed(0))


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        out = model(tokens)
    return out if isinstance(out, Tensor) else out.logits


@pytest.fixture(scope="module", params=[True, False], ids=["nested", "plain absmax"])
def theirs(request: Any, smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SmolLM2 as transformers and bitsandbytes write it, and the logits of their model."""
    folder = tmp_path_factory.mktemp("theirs")
    model = their_model(smollm2_dir, nested=request.param)
    model.save_pretrained(folder)
    return request.param, folder, logits(model)


def test_their_checkpoint_of_a_real_model_loads_as_it_is(theirs: Any) -> None:
    nested, folder, expected = theirs
    assert set(ModelWeights(folder).formats.values()) == {ABSMAX[nested], "none"}
    tensors = load_file(folder / SINGLE)
    assert_bytes_of(quantized_rows(folder), tensors)
    difference = (logits(load_model(folder)) - expected).abs().max().item()
    print(f"{ABSMAX[nested]}: logits differ by {difference:.1e} from transformers + bitsandbytes")
    assert difference < 1e-4


def test_three_ranks_load_their_checkpoint(theirs: Any) -> None:
    _, folder, _ = theirs
    tensors = load_file(folder / SINGLE)
    for found in run_ranks(3, quantized_rows, folder):
        assert_bytes_of(found, tensors)


@pytest.mark.long
def test_ours_loads_in_transformers(theirs: Any, smollm2_dir: Path, tmp_path: Path) -> None:
    """A folder that qfsdp writes gives them the same tensors and logits as their own."""
    nested, folder, expected = theirs
    config = QuantizationConfig(ABSMAX[nested])
    quantize_folder(ModelWeights(smollm2_dir), config, tmp_path, cpu_world(), layout="bnb")
    ours, their_tensors = load_file(tmp_path / SINGLE), load_file(folder / SINGLE)
    assert ours.keys() == their_tensors.keys()
    for name, value in their_tensors.items():
        if "quant_state" not in name:
            assert torch.equal(ours[name], value), name
    difference = (logits(their_model(tmp_path)) - expected).abs().max().item()
    print(f"{ABSMAX[nested]}: transformers computes logits {difference:.1e} off its own")
    assert difference == 0


def test_their_checkpoint_can_be_quantized_into_our_layout(theirs: Any, tmp_path: Path) -> None:
    nested, folder, _ = theirs
    config = QuantizationConfig(ABSMAX[nested])
    quantize_folder(ModelWeights(folder), config, tmp_path, cpu_world())
    assert_bytes_of(quantized_rows(tmp_path), load_file(folder / SINGLE))


KEPT = "model.layers.1.self_attn.q_proj"


def test_what_their_checkpoint_keeps_plain_stays_so(tmp_path: Path) -> None:
    """Unsloth's dynamic folders keep linears that lose most. One that a target names is
    quantized."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    source, folder = write_tiny_model(tmp_path / "source", **EVEN), tmp_path / "theirs"
    given = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["lm_head", KEPT]
    )
    AutoModelForCausalLM.from_pretrained(source, quantization_config=given).save_pretrained(folder)
    ours, theirs = load_model(folder, targets=["all-linear"]), their_model(folder)
    assert not isinstance(ours.get_parameter(f"{KEPT}.weight"), QuantizedTensor)
    assert (logits(ours) - logits(theirs)).abs().max() < 1e-4
    config = QuantizationConfig("nf4_fp32_absmax")
    quantize_folder(ModelWeights(folder), config, tmp_path / "again", cpu_world())
    again = load_model(tmp_path / "again", targets=["all-linear"])
    assert torch.equal(logits(again), logits(ours))
    named = load_model(folder, targets=["q_proj"]).get_parameter(f"{KEPT}.weight")
    assert isinstance(named, QuantizedTensor)


def test_a_section_that_a_merge_has_left_behind_keeps_nothing_plain(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, **EVEN)
    config = json.loads((folder / "config.json").read_text())
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    assert len(quantized_rows(folder)) == 15


def test_codes_in_other_numbers_than_bytes(tmp_path: Path) -> None:
    """`bnb_4bit_quant_storage`, which peers need to shard with FSDP."""
    source, folder = write_tiny_model(tmp_path / "source", **EVEN), tmp_path / "bytes"
    quantize_folder(ModelWeights(source), QuantizationConfig(), folder, cpu_world(), layout="bnb")
    (folder / MANIFEST).unlink()
    expected = quantized_rows(folder)
    as_numbers = load_file(folder / SINGLE)[GATE].flatten().view(torch.bfloat16).unsqueeze(1)
    edit(folder, lambda tensors: tensors.update({GATE: as_numbers}))
    assert all(map(torch.equal, quantized_rows(folder)[GATE], expected[GATE]))


# ---- broken checkpoints ------------------------------------------------------------------------


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def state_with(**changes: Any) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        name = f"{GATE}.quant_state.bitsandbytes__nf4"
        state = json.loads(bytes(tensors[name].tolist())) | changes
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


def renamed(tensors: dict[str, Tensor]) -> None:
    state = f"{GATE}.quant_state.bitsandbytes__"
    tensors[f"{state}fp4"] = tensors.pop(f"{state}nf4")


def method(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "fp4": (lambda f: edit(f, renamed), "is quantized as 'fp4'; expected nf4"),
    "8 bits": (lambda f: method(f, load_in_8bit=True), "8-bit weights; expected 4-bit NF4"),
    "another method": (
        lambda f: method(f, quant_method="gptq"),
        "config.json: quant_method 'gptq'; expected qfsdp, bitsandbytes, mxfp4, fp8, fbgemm_fp8, "
        "compressed-tensors with format float-quantized without transform_config, or weights",
    ),
    "another block size": (
        lambda f: edit(f, state_with(blocksize=128)),
        "has blocks of (128, 256)",
    ),
    "another table": (
        lambda f: edit(f, lambda t: t[f"{GATE}.quant_map"].mul_(2)),
        f"tensor '{GATE}.quant_map' holds other levels; expected those of NF4",
    ),
    "another shape than the codes": (
        lambda f: edit(f, state_with(shape=[576, 256])),
        f"tensor '{GATE}' has shape [55296, 1]; expected [73728], as its quant_state says",
    ),
    "another shape than config.json": (
        lambda f: edit(f, state_with(shape=[192, 576])),
        f"quantized tensor '{GATE}' has shape [192, 576]; expected [576, 192], as config.json says",
    ),
    "a shape that is a text": (
        lambda f: edit(f, state_with(shape="576 x 192")),
        f"tensor '{GATE}': its quant_state is damaged; expected that of bitsandbytes",
    ),
    "an offset that is not finite": (
        lambda f: edit(f, state_with(nested_offset=float("nan"))),
        f"tensor '{GATE}': its quant_state is damaged; expected that of bitsandbytes",
    ),
    "a quant_state that is no JSON": (
        lambda f: edit(f, lambda t: t[f"{GATE}.quant_state.bitsandbytes__nf4"].fill_(255)),
        f"tensor '{GATE}': its quant_state is damaged; expected that of bitsandbytes",
    ),
    "no absmax": (
        lambda f: edit(f, lambda t: t.pop(f"{GATE}.absmax")),
        f"tensor '{GATE}.absmax' is missing",
    ),
    "changed scales": (
        lambda f: edit(f, lambda t: t[f"{GATE}.nested_absmax"].fill_(float("nan"))),
        f"{SINGLE}: content changed (XXH3)",
    ),
    "NaN in the scales of a folder without digests": (
        lambda f: (
            edit(f, lambda t: t[f"{GATE}.nested_absmax"].fill_(float("nan"))),
            (f / MANIFEST).unlink(),
        ),
        f"{GATE}: its scales hold NaN or infinity",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported_in_one_line(mistake: str, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", **EVEN)
    folder = tmp_path / "quantized"
    quantize_folder(ModelWeights(source), QuantizationConfig(), folder, cpu_world(), layout="bnb")
    load_model(folder)  # it is valid so far
    break_it, expected = MISTAKES[mistake]
    break_it(folder)
    with pytest.raises(UserError) as error:
        load_model(folder)
    assert expected in str(error.value) and "\n" not in str(error.value)
    assert str(folder) in str(error.value)


def test_columns_that_blocks_do_not_divide_cannot_be_written(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source")  # down_proj has 577 columns
    with pytest.raises(UserError, match="has 577 columns; expected layout=qfsdp"):
        config = QuantizationConfig()
        quantize_folder(ModelWeights(source), config, tmp_path / "x", cpu_world(), layout="bnb")


def test_a_run_that_wants_plain_weights_is_refused(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", **EVEN)
    quantize_folder(ModelWeights(source), QuantizationConfig(), tmp_path / "p", cpu_world(), "bnb")
    expected = "quantization.format: 'none', but '.*' in the model folder is stored as nf4"
    with pytest.raises(UserError, match=expected):
        load_model(tmp_path / "p", format="none")
