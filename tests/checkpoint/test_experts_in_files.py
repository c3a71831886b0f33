"""Experts are loaded from every form of files, and written as their family's folders have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qfsdp.checkpoint.weights.expand import expand_folder
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import load_base
from qfsdp.checkpoint.weights.quantize import quantize_folder
from qfsdp.checkpoint.weights.safetensors_folder import SINGLE
from qfsdp.checkpoint.weights.save import save_model
from qfsdp.common.errors import UserError
from qfsdp.distributed.sharding import shard_model
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from tests.checkpoint.test_fp8_folders import to_fp8
from tests.models import build_meta_model, cpu_world, load_model, loaded
from tests.ranks import run_ranks

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 131}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
COUNT = {"num_experts": 5, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**SIZES, **COUNT, "moe_intermediate_size": 36, "norm_topk_prob": True},
    "mixtral": {**SIZES, "num_local_experts": 5, "intermediate_size": 36},
    "gpt_oss": {**SIZES, "num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 96},
}
GPT_EXPERTS = "model.layers.0.mlp.experts"
TOKENS = torch.randint(1, 131, (2, 9), generator=torch.Generator().manual_seed(1))

pytestmark = pytest.mark.usefixtures("eager")


def reference(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, **CONFIGS.get(family, SIZES) | changes, tie_word_embeddings=False
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Written by transformers."""
    made = {}
    for family in CONFIGS:
        made[family] = tmp_path_factory.mktemp("model") / family
        reference(family).save_pretrained(made[family])
    return made


def transformers_logits(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(TOKENS).logits


def our_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS)


def edited(folder: Path, to: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A copy of a model folder with other tensors."""
    to.mkdir()
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / SINGLE)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, to / SINGLE)
    return to


@pytest.mark.parametrize("family", CONFIGS)
def test_what_transformers_writes_is_loaded_and_what_we_write_it_loads(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Trained and frozen weights: the same tensors, names included, as transformers wrote."""
    expected = transformers_logits(folders[family])
    model = load_model(folders[family], format="none")
    torch.testing.assert_close(our_logits(model), expected, rtol=0, atol=1e-4)
    before = load_file(folders[family] / SINGLE)
    for trained in (True, False):
        folder = tmp_path / str(trained)
        model.requires_grad_(trained)
        save_model(model, ModelWeights(folders[family]), torch.float32, folder, cpu_world())
        after = load_file(folder / SINGLE)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(transformers_logits(folder), expected)


def logits_of_frozen(cases: list[tuple[Path, str]]) -> list[list[Tensor]]:
    """Of a base in memory, and of one that stays on disk."""
    found = []
    for folder, dtype in cases:
        found.append([])
        for where in ("none", "disk"):
            sharding = ShardingConfig(offload_base=where, ring_memory="4MiB")
            model = build_meta_model(folder, "none", dtype=dtype).requires_grad_(False)
            shard_model(model, sharding, cpu_world())
            load_base(model, ModelWeights(folder), torch.device("cpu"), sharding)
            found[-1].append(our_logits(model))
    return found


def test_on_disk_are_rows_of_several_tensors_and_of_numbers_in_fp8(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    fp8 = to_fp8(folders["qwen3_moe"], tmp_path / "fp8")
    cases = [(folders["gpt_oss"], "fp32"), (fp8, "bf16")]  # the latter has a tensor for each expert
    for resident, on_disk in run_ranks(2, logits_of_frozen, cases)[1]:
        assert torch.equal(resident, on_disk)


def fuse(tensors: dict[str, Tensor], count: int) -> None:
    for stem in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        of = [
            [tensors.pop(f"{stem}.experts.{n}.{name}_proj.weight") for n in range(count)]
            for name in ("gate", "up", "down")
        ]
        both = [torch.cat(pair) for pair in zip(of[0], of[1], strict=True)]
        tensors[f"{stem}.experts.gate_up_proj"] = torch.stack(both)
        tensors[f"{stem}.experts.down_proj"] = torch.stack(of[2])


def test_one_tensor_for_all_experts_is_the_same(folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders["qwen3_moe"]
    fused = edited(source, tmp_path / "fused", lambda t: fuse(t, 5))
    both = [load_model(folder, format="none").state_dict() for folder in (source, fused)]
    assert both[0].keys() == both[1].keys()
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])


def load_all(builds: list[tuple[Path, str]]) -> list[dict[str, list[Tensor]]]:
    return [loaded(folder, format=format) for folder, format in builds]


@pytest.mark.long
def test_seven_ranks_load_what_one_loads(folders: dict[str, Path], tmp_path: Path) -> None:
    """More ranks than experts; no number of rows is divisible."""
    shipped = with_blocks(folders["gpt_oss"], tmp_path / "shipped")
    builds = [(folder, "nf4") for folder in folders.values()]
    builds += [(folders["gpt_oss"], "none"), (shipped, "mxfp4")]
    expected = load_all(builds)
    for rank in run_ranks(7, load_all, builds):
        for found, want in zip(rank, expected, strict=True):
            assert found.keys() == want.keys()
            for name in want:
                assert all(torch.equal(a, b) for a, b in zip(found[name], want[name], strict=True))


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    """GLM-4.5's files hold one layer more than `num_hidden_layers`, with embeddings of its own."""
    glm = {"n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
    reference("glm4_moe", **glm, intermediate_size=36).save_pretrained(tmp_path / "less")

    def add(tensors: dict[str, Tensor]) -> None:
        last, extra = "model.layers.1.", "model.layers.2."
        copies = {
            n.replace(last, extra): t.clone() for n, t in tensors.items() if n.startswith(last)
        }
        tensors |= copies | {f"{extra}embed_tokens.weight": torch.zeros(131, 64)}

    folder = edited(tmp_path / "less", tmp_path / "more", add)
    quantize_folder(ModelWeights(folder), QuantizationConfig(), tmp_path / "nf4", cpu_world())
    expected = our_logits(load_model(tmp_path / "less"))
    for found in (folder, tmp_path / "nf4"):
        assert torch.equal(our_logits(load_model(found)), expected)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    config["num_nextn_predict_layers"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"model\.layers\.2\..* is not part of this architecture"):
        load_model(folder)


# ---- MXFP4 -------------------------------------------------------------------------------------


def with_blocks(folder: Path, to: Path) -> Path:
    """gpt-oss as published: random blocks and scales for the experts."""
    generator = torch.Generator().manual_seed(3)

    def quantize(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
            experts, cols, rows = tensors.pop(name).shape
            shape = (experts, rows, cols // 32)
            bytes_of = {"high": 256, "size": (*shape, 16), "dtype": torch.uint8}
            tensors[f"{name}_blocks"] = torch.randint(**bytes_of, generator=generator)
            scales = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
            tensors[f"{name}_scales"] = scales

    edited(folder, to, quantize)
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (to / "config.json").write_text(json.dumps(config))
    return to


def rows_of(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Blocks and scales of a projection, side by side."""
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    return torch.cat([blocks.flatten(2), scales], dim=2).flatten(0, 1)


def test_shipped_gpt_oss_keeps_its_bytes(folders: dict[str, Path], tmp_path: Path) -> None:
    """Loaded, written by rows, loaded again; and its values are transformers'."""
    shipped = with_blocks(folders["gpt_oss"], tmp_path / "shipped")
    tensors = load_file(shipped / SINGLE)
    quantization = QuantizationConfig("mxfp4", ["gate_up_proj"])
    quantize_folder(ModelWeights(shipped), quantization, tmp_path / "rows", cpu_world())
    for folder in (shipped, tmp_path / "rows"):
        model = load_model(folder, format="mxfp4")
        for layer, linear in ((0, "gate_up_proj"), (1, "down_proj")):
            name = f"model.layers.{layer}.mlp.experts.{linear}"
            weight = model.get_parameter(f"{name}.weight").data
            assert isinstance(weight, QuantizedTensor)
            assert torch.equal(weight.qdata, rows_of(tensors, name))
            stored = tensors[f"{name}_bias"].flatten()
            assert torch.equal(model.get_parameter(f"{name}.bias"), stored)


def test_shipped_gpt_oss_has_the_logits_of_transformers(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """transformers dequantizes it; so does our save."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    shipped = with_blocks(folders["gpt_oss"], tmp_path / "shipped")
    how = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        shipped, dtype=torch.float32, quantization_config=how
    )
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    save_model(
        load_model(shipped, format="mxfp4", targets=["gate_up_proj"]),
        ModelWeights(shipped),
        torch.float32,
        tmp_path / "plain",
        cpu_world(),
    )
    model = load_model(shipped, format="mxfp4", targets=["gate_up_proj"])
    torch.testing.assert_close(our_logits(model), expected, rtol=0, atol=1e-4)
    assert torch.equal(transformers_logits(tmp_path / "plain"), expected)


def test_an_expanded_mixture_has_the_same_logits(folders: dict[str, Path], tmp_path: Path) -> None:
    for family in ("qwen3_moe", "mixtral"):
        expand_folder(ModelWeights(folders[family]), 1, tmp_path / family, cpu_world())
        both = [load_model(f, format="none") for f in (folders[family], tmp_path / family)]
        assert len(both[1].model.layers) == 3
        assert torch.equal(*(our_logits(model) for model in both))


# ---- mistakes ----------------------------------------------------------------------------------


def rename(old: str, new: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def change(name: str, how: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: how(tensors[name])})


QWEN = "model.layers.1.mlp.experts"
UP = f"{QWEN}.2.up_proj.weight"
MISTAKES: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any], str]] = {
    "a projection is missing": (
        "qwen3_moe",
        lambda t: t.pop(UP),
        f"{{folder}}: tensor '{UP}' is missing",
    ),
    "an expert is missing": (
        "qwen3_moe",
        lambda t: [t.pop(name) for name in list(t) if name.startswith(f"{QWEN}.4.")],
        f"{{folder}}: expert {QWEN}.4 is missing; config.json says that there are 5",
    ),
    "an expert is one too many": (
        "qwen3_moe",
        lambda t: t.update({f"{QWEN}.5.up_proj.weight": t[UP].clone()}),
        f"{{folder}}: '{QWEN}.5' is one too many; config.json says 5",
    ),
    "another shape": (
        "qwen3_moe",
        change(UP, lambda t: t[1:]),
        f"{{file}}: tensor '{UP}' has shape [35, 64]; expected [36, 64], as config.json says",
    ),
    "experts of several dtypes": (
        "qwen3_moe",
        change(UP, lambda t: t.bfloat16()),
        f"{{file}}: tensor '{UP}' is BF16; expected F32, as '{QWEN}.0.gate_proj.weight' is",
    ),
    "a fused tensor of another number of experts": (
        "qwen3_moe",
        lambda t: fuse(t, 4) or [t.pop(name) for name in list(t) if ".experts.4." in name],
        "{file}: tensor 'model.layers.0.mlp.experts.down_proj' has shape [4, 64, 36]; expected "
        "[5, out, in], as config.json says",
    ),
    "blocks without scales": (
        "mxfp4",
        lambda t: t.pop(f"{GPT_EXPERTS}.down_proj_scales"),
        f"{{folder}}: tensor '{GPT_EXPERTS}.down_proj_scales' is missing; "
        f"'{GPT_EXPERTS}.down_proj_blocks' is there",
    ),
    "scales of the wrong shape": (
        "mxfp4",
        change(f"{GPT_EXPERTS}.down_proj_scales", lambda t: t[:, :, :2]),
        f"{{file}}: tensor '{GPT_EXPERTS}.down_proj_scales' is U8 [3, 64, 2]; expected U8 "
        "[3, 64, 3], MXFP4's blocks of 32 weights",
    ),
    "blocks of another dtype": (
        "mxfp4",
        change(f"{GPT_EXPERTS}.down_proj_blocks", lambda t: t.to(torch.int8)),
        f"{{file}}: tensor '{GPT_EXPERTS}.down_proj_blocks' is I8 [3, 64, 3, 16]; expected U8",
    ),
    "a scale that is NaN": (
        "mxfp4",
        change(f"{GPT_EXPERTS}.down_proj_scales", lambda t: t.index_fill(1, torch.tensor(3), 255)),
        f"{{folder}}: {GPT_EXPERTS}.down_proj.weight: its scales hold NaN or infinity",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported_in_one_line(
    mistake: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    family, edit, text = MISTAKES[mistake]
    source, format = folders.get(family), "nf4"
    if source is None:
        source, format = with_blocks(folders["gpt_oss"], tmp_path / "shipped"), "mxfp4"
    folder = edited(source, tmp_path / "broken", edit)
    with pytest.raises(UserError) as error:
        load_model(folder, format=format)
    message = str(error.value)
    assert message.startswith(text.format(folder=folder, file=folder / SINGLE)), message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("name", [UP, "model.layers.0.mlp.experts.gate_up_projs.3.weight"])
def test_experts_that_bitsandbytes_quantized_one_by_one_are_refused(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    from bitsandbytes.functional import quantize_4bit

    def quantize(tensors: dict[str, Tensor]) -> None:
        codes, state = quantize_4bit(
            torch.randn(64, 64), blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        fields = state.as_dict(packed=True)
        tensors |= {name: codes, **{f"{name}.{key}": value for key, value in fields.items()}}

    folder = edited(folders["qwen3_moe"], tmp_path / "bnb", quantize)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=f"{name}' is quantized by itself; expected the model in 16"
    ):
        ModelWeights(folder)


def test_layouts_without_a_form_for_experts_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="layout: bnb has no form for the experts of a mixture"):
        source = ModelWeights(folders["qwen3_moe"])
        quantize_folder(source, QuantizationConfig(), tmp_path / "bnb", cpu_world(), "bnb")


def test_mixtral_in_the_names_of_transformers_5(folders: dict[str, Path], tmp_path: Path) -> None:
    config = (folders["mixtral"] / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    model = reference("mixtral")
    save_file(model.state_dict(), tmp_path / SINGLE, metadata={"format": "pt"})
    with torch.device("meta"):
        decoder = Decoder(DecoderConfig.from_dir(tmp_path))
    load_base(decoder, ModelWeights(tmp_path), torch.device("cpu"))
    with torch.no_grad():
        assert (our_logits(decoder) - model(TOKENS).logits).abs().max() < 1e-4
