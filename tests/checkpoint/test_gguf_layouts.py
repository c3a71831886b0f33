"""GGUF of mixtures, and of Qwen 3.5 and Qwen3-Next, against an inverse written by heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qfsdp.checkpoint.adapter_files import save_adapter
from qfsdp.checkpoint.export.gguf_tensors import REORDERED, GgufTensor
from qfsdp.checkpoint.export.gguf_tokenizer import read_gguf_tokenizer
from qfsdp.checkpoint.weights.experts import StoredAs, of_length
from qfsdp.checkpoint.weights.merge import MergedWeight
from qfsdp.checkpoint.weights.safetensors_folder import SINGLE
from qfsdp.common.errors import UserError
from tests import hub_models
from tests.checkpoint.test_gguf import (
    NAMES,
    contents,
    experts,
    exported,
    llama,
    tokenizer_of,
    values,
    write_sentence_pieces,
)
from tests.checkpoint.test_merge import merged
from tests.data.test_tokenizer import CHATML, write_folder
from tests.models import cpu_world

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("eager")

ARCHITECTURES = {
    "qwen3_5": "qwen35",
    "qwen3_5_whole": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_5_moe_whole": "qwen35moe",
    "qwen3_next": "qwen3next",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
RECURRENT = ("qwen35", "qwen35moe", "qwen3next")
KEYS, VALUES, SIZE = 2, 6, 32  # heads of a recurrent layer, and numbers of a head
EACH = VALUES // KEYS


def random_model(name: str, folder: Path, **changes: Any) -> Any:
    """A model of transformers, in which vectors are random too, with a tokenizer."""
    given: Any = hub_models.config(name)
    text = given.get_text_config()
    if "linear_num_value_heads" in text.to_dict():
        changes = {"linear_num_value_heads": VALUES} | changes
    for key, value in changes.items():
        setattr(text, key, value)
    torch.manual_seed(1)
    model = hub_models.class_of(given).from_config(given).float().eval()
    for param in model.parameters():
        nn.init.normal_(param, std=0.05 if param.dim() > 1 else 0.4)
    model.save_pretrained(folder)
    if "qwen3_5" in name:  # a layer that predicts further tokens, which is not written
        more = {"mtp.fc.weight": torch.randn(8, 16)}
        save_file(load_file(folder / SINGLE) | more, folder / SINGLE, {"format": "pt"})
    write_folder(folder, tokenizer_of("qwen35"), chat_template=CHATML)
    return model


MORE = NAMES | {
    **{"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z"},
    **{"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"},
    **{"ssm_ba": "linear_attn.in_proj_ba", "ssm_conv1d": "linear_attn.conv1d"},
    **{"ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj"},
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{x}_shexp": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
}


def by_heads(tensor: Tensor, size: int, dim: int = 0) -> Tensor:
    """Value heads of `size` numbers in Hugging Face's order: those of a query head together."""
    found: list[Any] = [None] * VALUES
    for at, head in enumerate(tensor.split(size, dim)):
        found[at % KEYS * EACH + at // KEYS] = head
    return torch.cat(found, dim)


def as_in_transformers(kind: str, tensors: dict[str, Any], body: str) -> dict[str, Tensor]:
    """Tensors under Hugging Face's names, with its numbers in its order."""
    found = {}
    for name, tensor in tensors.items():
        value = values(tensor)
        # One name has no field.
        *block, stem, field = (f"{name}." if name.endswith("ssm_a") else name).split(".")
        prefix = f"{body}.layers.{block[1]}." if block else ""
        if stem in ("ssm_a", "ssm_dt"):
            key = prefix + "linear_attn." + ("A_log" if stem == "ssm_a" else "dt_bias")
            value = (-value).log() if stem == "ssm_a" else value
        elif stem.endswith("_exps"):
            continue
        else:
            key = f"{prefix}{MORE[stem].replace('model.', f'{body}.')}.{field}"
        if stem.endswith("norm") and stem != "ssm_norm" and kind in RECURRENT:
            value = value - 1
        if kind == "llama" and stem in ("attn_q", "attn_k"):  # neighbours become halves
            heads = value.split(SIZE)
            value = torch.cat([torch.cat((head[::2], head[1::2])) for head in heads])
        if kind.startswith("qwen35"):
            mixed = 2 * KEYS * SIZE
            if stem in ("attn_qkv", "ssm_conv1d"):
                value = torch.cat((value[:mixed], by_heads(value[mixed:], SIZE)))
            elif stem == "attn_gate":
                value = by_heads(value, SIZE)
            elif stem in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"):
                value = by_heads(value, 1)
            elif stem == "ssm_out":
                value = by_heads(value, SIZE, 1)
        value = value.unsqueeze(1) if stem == "ssm_conv1d" else value
        found[key] = value.unsqueeze(0) if stem == "ffn_gate_inp_shexp" else value
    if kind == "qwen3next":
        for name in [name for name in found if name.endswith("in_proj_qkv.weight")]:
            gates = found.pop(name.replace("qkv", "z")).split(EACH * SIZE)
            q, k, v = found.pop(name).split([KEYS * SIZE, KEYS * SIZE, VALUES * SIZE])
            heads = zip(q.split(SIZE), k.split(SIZE), v.split(EACH * SIZE), gates, strict=True)
            found[name.replace("qkv", "qkvz")] = torch.cat([torch.cat(head) for head in heads])
    return found | experts(tensors, body)


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    given = {key: value for key, value in expected.items() if ".visual." not in key}
    assert found.keys() == given.keys()
    for key, value in given.items():
        # 1 + w and -exp(A) are rounded once in the file.
        exact = not key.endswith(("norm.weight", "A_log"))
        atol = 0 if exact else 2e-7
        torch.testing.assert_close(found[key], value, atol=atol, rtol=0, msg=key)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tensors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = random_model(name, tmp_path / "model")
    fields, tensors = contents(exported(tmp_path / "model", tmp_path / "out", "gguf_type=f32"))
    kind, whole, text = ARCHITECTURES[name], name.endswith("whole"), model.config.get_text_config()
    body = "model.language_model" if whole else "model"
    check_same(as_in_transformers(kind, tensors, body), model.state_dict())
    expected = {
        "attention.key_length": SIZE,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": pytest.approx(text.rms_norm_eps),
        "rope.dimension_count": SIZE // 4 if kind in RECURRENT else SIZE,
        "block_count": 4,
        "context_length": 256,
    }
    if kind in RECURRENT:
        expected |= {"ssm.conv_kernel": 4, "ssm.state_size": SIZE, "ssm.group_count": KEYS}
        expected |= {"ssm.time_step_rank": VALUES, "ssm.inner_size": VALUES * SIZE}
        expected |= {"full_attention_interval": 4}
    if kind != "qwen35":
        inner = 192 if kind == "llama" else 64
        expected |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": inner}
    if kind in ("qwen35moe", "qwen3next", "qwen2moe"):
        expected |= {"expert_shared_feed_forward_length": 64}
    if kind.startswith("qwen35"):
        expected |= {"rope.dimension_sections": [11, 11, 10, 0]}
    assert fields["general.architecture"] == kind
    assert {key: fields[f"{kind}.{key}"] for key in expected} == expected
    assert fields["tokenizer.ggml.pre"] == "qwen35"


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_a_quantized_base_with_an_adapter(name: str, tmp_path: Path) -> None:
    """As the folder that `recipes/merge` writes. LoRA of the mixture's experts too."""
    from transformers import AutoModelForCausalLM

    random_model(name, tmp_path / "model")
    adapter = hub_models.adapter_of(name)
    model = hub_models.built(tmp_path / "model", adapter, implementation="native")
    save_adapter(model, adapter, str(tmp_path / "model"), tmp_path / "adapter", cpu_world())
    words = ["quantization.format=nf4", "model.dtype=fp32"]
    given = (tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")
    folder = merged(*given, *words, "dtype=fp32")
    words += [f"adapter={tmp_path}/adapter", "gguf_type=f32"]
    _, tensors = contents(exported(tmp_path / "model", tmp_path / "out", *words))
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    check_same(as_in_transformers(ARCHITECTURES[name], tensors, "model"), expected)


def test_rows_are_reordered_by_pieces() -> None:
    """A tensor that is reordered as a whole is held once, not once more in its new order."""
    shape = (2 * REORDERED + 100, 8)
    numbers, rows = torch.randn(shape), torch.randperm(shape[0])
    weight = MergedWeight("w", "w", shape, None, None, False, StoredAs({"w": shape}))
    kind = gguf.GGMLQuantizationType.F32
    tensor = GgufTensor("w", shape, weight, kind, rows=rows, length=len(rows))
    made = [*tensor.arrays(iter(numbers.split(300)))]
    assert [len(piece) for piece in made] == [REORDERED, REORDERED, 100]
    assert np.array_equal(np.concatenate(made), numbers[rows].numpy())


def test_rows_in_pieces_of_another_length() -> None:
    rows = torch.arange(40).view(20, 2)
    for sizes in ((20,), (3, 0, 7, 10), (5, 5, 5, 5), (1,) * 20):
        assert [*map(Tensor.tolist, of_length(rows.split(sizes), 5))] == rows.view(4, 5, 2).tolist()


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("type", ["q8_0", "f16"])
def test_types_are_those_of_gguf(name: str, type: str, tmp_path: Path) -> None:
    """Every tensor has the bytes that the package makes of the fp32 tensor. Routers, the
    convolution and what makes decays stay in fp32."""
    random_model(name, tmp_path / "model")
    _, exact = contents(exported(tmp_path / "model", tmp_path / "out", "gguf_type=f32"))
    _, tensors = contents(exported(tmp_path / "model", tmp_path / "out", f"gguf_type={type}"))
    kinds = gguf.GGMLQuantizationType
    plain = ("ssm_conv1d", "ssm_alpha", "ssm_beta", "ssm_ba", "ffn_gate_inp", "ffn_gate_inp_shexp")
    for key, tensor in tensors.items():
        stem, rows = key.split(".")[-2], values(exact[key]).numpy()
        kind = kinds.F32 if rows.ndim == 1 or stem in plain else kinds[type.upper()]
        assert tensor.tensor_type == kind, key
        made = gguf.quants.quantize(rows, kind)
        assert np.array_equal(tensor.data.view(np.uint8), made.view(np.uint8)), key


def test_sections_of_the_rotary_embedding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    rope |= {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    random_model("qwen3_5_whole", tmp_path / "model", rope_parameters=rope)
    fields, _ = contents(exported(tmp_path / "model", tmp_path / "out"))
    assert "warning: the file has the text part; for pictures" in capsys.readouterr().err
    assert fields["qwen35.rope.dimension_sections"] == [3, 3, 2, 0]
    assert fields["qwen35.rope.freq_base"] == 5e6 and fields["qwen35.rope.dimension_count"] == 16


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_5", {"linear_value_head_dim": 16}, "linear_value_head_dim 16; expected one size"),
        ("qwen3_5", {"attention_bias": True}, "attention_bias true; expected false: llama.cpp's"),
        ("qwen3_5", {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05; expected 1e-06"),
        (
            "qwen3_5",
            {"layer_types": ["full_attention", *["linear_attention"] * 3]},
            "layer_types; expected attention in one layer of so many, the last: llama.cpp's qwen35",
        ),
        ("qwen3_next", {"norm_topk_prob": False}, "norm_topk_prob false; expected true"),
        ("qwen2_moe", {"head_dim": 48}, "head_dim 48; expected 32, of hidden_size: llama.cpp's"),
        ("qwen2_moe", {"tie_word_embeddings": True}, "tie_word_embeddings true; expected false"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob false; expected true"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob true; expected false"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "layers without experts; expected a mixture in"),
        ("qwen3_next", {"mlp_only_layers": [1]}, "layers without experts; expected a mixture in"),
    ],
)
def test_what_llama_cpp_has_fixed_is_refused_in_one_line(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    random_model(name, tmp_path / "model", **changes)
    with pytest.raises(UserError, match=message) as error:
        exported(tmp_path / "model", tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_an_older_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_model("qwen3_5", tmp_path / "model")
    kinds = {kind: name for kind, name in gguf.MODEL_ARCH_NAMES.items() if name != "qwen35"}
    monkeypatch.setattr(gguf, "MODEL_ARCH_NAMES", kinds)
    with pytest.raises(UserError, match="expected `pip install -U gguf`"):
        exported(tmp_path / "model", tmp_path / "out")


def gemma3(folder: Path, **changes: Any) -> Any:
    """A model of seven layers. The sixth has no window. Feed-forwards add little."""
    model = random_model("gemma3_text", folder, num_hidden_layers=7, **changes)
    for layer in model.model.layers:
        layer.post_feedforward_layernorm.weight.data.mul_(1e-3).sub_(0.999)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    write_sentence_pieces(folder, prefix=False)
    return model


SIX = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]


def test_gemma_3(tmp_path: Path) -> None:
    model = gemma3(tmp_path / "model", layer_types=SIX)
    fields, tensors = contents(exported(tmp_path / "model", tmp_path / "out", "gguf_type=f32"))
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
    norms |= {"post_ffw_norm": "post_feedforward_layernorm"}
    norms |= {"post_attention_norm": "post_attention_layernorm"}
    found = {}
    for name, tensor in tensors.items():
        *block, stem, field = name.split(".")
        prefix = f"model.layers.{block[1]}." if block else ""
        value = values(tensor) - (1 if stem.endswith("norm") else 0)
        found[f"{prefix}{(NAMES | norms)[stem]}.{field}"] = value
    expected = model.state_dict()
    expected.pop("lm_head.weight")  # tied
    check_same(found, expected)
    wanted = {"attention.sliding_window": 40, "rope.freq_base_swa": 10000, "context_length": 256}
    wanted |= {"rope.freq_base": 1e6, "attention.key_length": 32}
    assert {key: fields[f"gemma3.{key}"] for key in wanted} == wanted
    assert not fields["tokenizer.ggml.add_space_prefix"]


def test_a_token_for_pictures_without_a_row(tmp_path: Path) -> None:
    """Gemma 3 of 1B has the tokenizer of the larger ones."""
    gemma3(tmp_path, layer_types=SIX)
    file = tmp_path / "tokenizer_config.json"
    added = {"577": {"content": "<image_soft_token>", "special": True}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"added_tokens_decoder": added}))
    assert "<image_soft_token>" not in read_gguf_tokenizer(tmp_path, 577).tokens
    assert read_gguf_tokenizer(tmp_path, 578).tokens[577] == "<image_soft_token>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": SIX[::-1]}, "layer_types; expected a sliding window in all layers but"),
        ({"query_pre_attn_scalar": 64}, "query_pre_attn_scalar 64; expected 32: llama.cpp's gemma"),
    ],
)
def test_another_gemma_3_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    gemma3(tmp_path / "model", **{"layer_types": SIX} | changes)
    with pytest.raises(UserError, match=message):
        exported(tmp_path / "model", tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("name", [*ARCHITECTURES, "gemma3"])
def test_llama_cpp_computes_the_same(name: str, tmp_path: Path) -> None:
    """All tokens at once, and the last ones with the states of those before. Gemma 3 with little of
    its feed-forwards: llama.cpp has their gelu in a table of f16."""
    if name == "gemma3":
        model = gemma3(tmp_path / "model", layer_types=SIX)
    else:
        model = random_model(name, tmp_path / "model")
    file = exported(tmp_path / "model", tmp_path / "out", "gguf_type=f32")
    runtime = llama(file, logits_all=True)
    tokens = torch.randint(4, 400, (1, 120), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(tokens, use_cache=False).logits[0]
    runtime.eval(tokens[0, :100].tolist())
    for token in tokens[0, 100:].tolist():
        runtime.eval([token])
    theirs = torch.from_numpy(np.array(runtime.scores[:120]))
    difference = ((theirs - ours).abs().max() / ours.abs().max()).item()
    print(f"{name}: logits differ by {difference:.1e}")
    assert difference < 1e-5
