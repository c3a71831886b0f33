"""Models of transformers under our linears: logits, losses and all gradients equal PEFT's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qfsdp.checkpoint.adapter_files import adapter_parameters, save_adapter
from qfsdp.checkpoint.expert_adapter_files import to_peft
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.errors import UserError
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters
from qfsdp.modules.hub_models import config as hub_config
from qfsdp.modules.hub_models.buffers import check_buffers
from qfsdp.modules.hub_models.config import Implementation
from qfsdp.modules.hub_models.decoder import HubDecoder, build_decoder
from qfsdp.modules.hub_models.experts import stacked_experts
from qfsdp.modules.hub_models.linears import linears_of_layers, reads_weight
from qfsdp.modules.hub_models.refused import check_hub_run
from qfsdp.modules.low_rank.adapted import adapted_linears
from qfsdp.modules.low_rank.linear import low_rank_linears
from tests import hub_models, tiny
from tests.hub_models import built
from tests.models import cpu_world
from tests.peft_oracle import load_dequantized

pytestmark = pytest.mark.usefixtures("eager")


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, 577, (2, 40), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = labels[0, :9] = -100
    return tokens, labels


# A single number in files; buffers that the module around them computes, and scaled logits.
SPECIAL = [
    pytest.param(name, marks=pytest.mark.long) for name in ("apertus", "falcon_h1", "llama4")
]


@pytest.mark.parametrize("name", [*hub_models.PARAMETERS, *SPECIAL])
def test_logits_loss_and_gradients_equal_pefts(name: str, tmp_path: Path) -> None:
    check_against_peft(name, tmp_path, "transformers")


@pytest.mark.parametrize("name", hub_models.HYBRID)
def test_our_own_layers_of_two_kinds_compute_the_same(name: str, tmp_path: Path) -> None:
    check_against_peft(name, tmp_path, "native")


FEW_ROWS = {"qwen3_5": ["in_proj_a", "in_proj_b"], "qwen2_moe": ["shared_expert_gate"]}


@pytest.mark.parametrize("implementation", ["transformers", "native"])
@pytest.mark.parametrize("name", FEW_ROWS)
def test_linears_of_few_rows_are_adapted_if_named(
    name: str, implementation: Implementation, tmp_path: Path
) -> None:
    adapter = hub_models.adapter_of(name)
    adapter.targets = ["all-linear", *FEW_ROWS[name]]
    if name == "qwen2_moe":  # natively all-linear means experts too
        adapter.method, adapter.targets = "lora", ["q_proj", *FEW_ROWS[name]]
    check_against_peft(name, tmp_path, implementation, adapter)


def check_against_peft(
    name: str,
    tmp_path: Path,
    implementation: Implementation,
    adapter: AdapterConfig | None = None,
) -> None:
    from peft import PeftModel
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    native = implementation == "native"
    reference: Any = hub_models.save_hub_model(name, tmp_path / "model")
    tokens, labels = batch()
    with torch.no_grad():
        plain = built(tmp_path / "model", implementation=implementation)(tokens)
    # See hub_models/documents.py and experts.py.
    own_layers = native or name in ("qwen3_5", "qwen3_5_whole", "lfm2", "falcon_h1", "deepseek_v3")
    own_layers |= name in (*hub_models.MIXTURES, "qwen2_moe")
    expected = reference(tokens, use_cache=False).logits
    bound = 1e-5 * float(expected.abs().max()) if own_layers else 0.0
    torch.testing.assert_close(plain, expected, rtol=0, atol=bound)

    default = adapter is None
    adapter = adapter or hub_models.adapter_of(name)
    model = built(tmp_path / "model", adapter, implementation=implementation)
    save_adapter(model, adapter, str(tmp_path / "model"), tmp_path / "adapter", cpu_world())
    missing, unexpected = load_dequantized(model, reference)
    beside = ("vision_tower", "visual", "multi_modal_projector", "embed_vision")
    assert not unexpected
    assert all(name == "lm_head.weight" or name.split(".")[1] in beside for name in missing)
    peft = PeftModel.from_pretrained(reference, str(tmp_path / "adapter"), is_trainable=True)
    adapted = {
        f"{n.replace('.base_layer', '')}.{m.parameter_name}".removesuffix(".weight")
        if isinstance(m, ParamWrapper)
        else n
        for n, m in peft.base_model.model.named_modules()
        if isinstance(m, LoraLayer)
    }
    assert adapted == {name for name, _ in adapted_linears(model)}
    if not native and default:
        experts = set() if adapter.targets else set(model.expert_linears)
        assert adapted == set(model.linears) - set(model.not_adapted) - experts

    logits = peft.eval()(tokens, use_cache=False).logits
    torch.testing.assert_close(model(tokens), logits, atol=3e-5, rtol=1e-5)  # up to 20
    theirs = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    theirs.backward()
    loss = model(tokens, labels=labels) / (labels != -100).sum()
    loss.backward()
    torch.testing.assert_close(loss, theirs, atol=1e-6, rtol=1e-6)
    gradients = {n: p.grad for n, p in peft.named_parameters() if p.requires_grad}
    grads = {key: param.grad for key, param in adapter_parameters(model).items()}
    ours = to_peft({key: grad for key, grad in grads.items() if grad is not None}, adapter)
    assert len(gradients) == len(ours) == len(grads)
    for key, grad in ours.items():
        name_there = key.replace(".weight", ".default.weight")
        if key.endswith("magnitude_vector"):
            name_there = f"{key}.default.weight"
        expected = gradients[name_there]
        assert expected is not None
        atol = 1e-5 * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(grad, expected, atol=atol, rtol=1e-4, msg=key)


@pytest.mark.parametrize(
    "kept",
    [ActivationConfig("full"), ActivationConfig("selective"), ActivationConfig(offload=True)],
    ids=["full", "selective", "offload"],
)
def test_gradients_do_not_depend_on_what_is_kept(kept: ActivationConfig, tmp_path: Path) -> None:
    """Gemma 4: its last layers read keys and values of earlier ones."""
    hub_models.save_hub_model("gemma4", tmp_path)
    tokens, labels = batch()
    found = []
    for activation in (None, kept):
        model = built(tmp_path, AdapterConfig("dora", rank=4, alpha=8), activation)
        model(tokens, labels=labels).backward()
        found.append({key: param.grad for key, param in adapter_parameters(model).items()})
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@tiny.needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kept"),
    [*((name, "none") for name in ("cohere2", "glm4_7", "gemma4", "qwen3_5"))]
    + [("glm4_7", "selective")],
)
def test_compiled_layers_compute_the_same(name: str, kept: Any, tmp_path: Path) -> None:
    """Rows of three lengths. Qwen3.5: one layer in four, as the others are recurrent."""
    hub_models.save_hub_model(name, tmp_path)
    model = built(tmp_path, AdapterConfig("dora", rank=4, alpha=8), ActivationConfig(kept))
    tokens, labels = batch()

    def grads(width: int) -> list[torch.Tensor]:
        model.zero_grad()
        model(tokens[:, :width], labels=labels[:, :width]).backward()
        return [param.grad.clone() for param in model.parameters() if param.grad is not None]

    eager = [grads(width) for width in (40, 33, 27)]
    torch._dynamo.reset()  # of another test of the same layers
    torch._dynamo.utils.counters.clear()
    model.compile_layers()
    compiled = [grads(width) for width in (40, 33, 27)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]
    for expected, found in zip(eager, compiled, strict=True):
        for one, other in zip(expected, found, strict=True):
            atol = 2e-5 * float(one.abs().max())  # Gemma 4: 1.5e-5 with AVX-512
            torch.testing.assert_close(other, one, atol=atol, rtol=1e-5)


def test_an_output_layer_that_files_hold_is_not_the_embeddings(tmp_path: Path) -> None:
    """Mistral Small 3: the whole model's config is silent and shares by default."""
    reference: Any = hub_models.save_hub_model("mistral3", tmp_path, tie_word_embeddings=False)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    assert content.pop("tie_word_embeddings") is False
    file.write_text(json.dumps(content))
    tokens, _ = batch()
    with torch.no_grad():
        assert torch.equal(built(tmp_path)(tokens), reference(tokens, use_cache=False).logits)


def test_an_output_layer_that_differs_from_the_tied_embeddings_is_refused(tmp_path: Path) -> None:
    """Gemma 3's file has the output layer under another name than the model."""
    hub_models.save_hub_model("gemma3", tmp_path, tie_word_embeddings=False)
    content = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    content["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = ModelConfig(str(tmp_path))
    with pytest.raises(UserError, match="'lm_head.weight' differs from .*; expected tie_word_emb"):
        config.weights().check(config.build())


def test_linears_that_peft_would_not_find_are_quantized_only() -> None:
    """PEFT renames modules as tensors of files: to "mlp.mlp.shared_experts" for instance."""
    from benchmarks.any_model import tiny_config

    name = "MistralLarge4ForConditionalGeneration"
    given = tiny_config("mistral_large4", name).to_dict() | {"architectures": [name]}
    model = build_decoder(hub_config.hub_config(given, "config.json"), torch.float32)
    kinds = {linear.partition("mlp.")[2] for linear in model.not_adapted}
    names = ("gate_proj", "up_proj", "down_proj")
    assert kinds == {*names, *(f"shared_experts.{one}" for one in names)} | {
        "experts.gate_up_proj",
        "experts.down_proj",
    }
    assert not model.expert_linears


def test_compiled_layers_are_not_under_a_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch compiles nothing under the mode of "selective": there it is "none", as ours is."""
    hub_models.save_hub_model("qwen3_5", tmp_path)
    monkeypatch.setattr(torch, "compile", lambda inner: inner)
    modes = {}
    for kept in ("selective", "full"):
        model = built(tmp_path, activation=ActivationConfig(kept))
        model.compile_layers()
        modes[kept] = [layer.forward.args[2] for layer in model.parts.layers]
    assert modes["selective"] == ["selective"] * 3 + ["none"]  # three recurrent, uncompiled
    assert modes["full"] == ["full"] * 4


def test_shared_rows_are_not_compiled() -> None:
    cfg = SimpleNamespace(compile=True, sharding=SimpleNamespace(context_parallel=2))
    with pytest.raises(UserError, match="compile: true with sharding.context_parallel; expected"):
        check_hub_run(cfg, meta("llama").config)


def test_there_are_no_tiles() -> None:
    """Said while the model is built, before weights are read."""
    with pytest.raises(UserError, match="activation.tile_tokens: auto; expected null: transformer"):
        meta("llama").set_activations(ActivationConfig("full", tile_tokens="auto"))


def test_a_config_without_model_type() -> None:
    with pytest.raises(UserError, match="x: model_type None; expected .* or llama, as tr"):
        hub_config.hub_config({"architectures": ["LlamaForCausalLM"]}, "x")


def test_linears_of_one_name_are_taken_together() -> None:
    """PEFT adapts them together: an `o_proj` narrow in one layer only is taken there too."""
    layers = nn.ModuleList(
        nn.ModuleDict({"o_proj": nn.Linear(size, 64), "router_proj": nn.Linear(64, 4)})
        for size in (64, 2048)
    )
    taken, plain, if_named = linears_of_layers(layers, "layers")
    assert taken == ["layers.0.o_proj", "layers.1.o_proj"]
    assert plain == if_named == ["layers.0.router_proj", "layers.1.router_proj"]


def test_linears_that_have_a_number_for_a_name_stay_plain() -> None:
    """PEFT would take the layers of that number too. CTRL's feed-forward is such a sequence."""
    layers = nn.ModuleList(
        nn.ModuleDict({"dense": nn.Linear(64, 64), "ffn": nn.Sequential(nn.Linear(64, 64))})
        for _ in range(2)
    )
    taken, plain, if_named = linears_of_layers(layers, "h")
    assert taken == ["h.0.dense", "h.1.dense"]
    assert (plain, if_named) == (["h.0.ffn.0", "h.1.ffn.0"], [])


def test_layers_that_share_weights_are_refused() -> None:
    with pytest.raises(UserError, match="Zamba2ForCausalLM has layers that share weights"):
        meta("zamba2")


def meta(name: str) -> HubDecoder:
    """A model without storage."""
    given = hub_models.config(name)
    content = given.to_dict() | {"architectures": given.architectures}
    model = build_decoder(hub_config.hub_config(content, "config.json"), torch.float32)
    assert isinstance(model, HubDecoder)
    return model


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        ("all-linear", set()),
        (["all-linear", "experts.down_proj"], {"experts.down_proj"}),
        (r".*\.experts\..*", set(hub_models.EXPERT_NAMES)),
    ],
)
def test_experts_are_adapted_if_they_are_named(targets: Any, adapted: set[str]) -> None:
    model = meta("gemma4_moe")
    config = AdapterConfig("lora", rank=4, targets=targets, expert_rank="divided")
    add_adapters(model, config)
    found = {n: m for n, m in low_rank_linears(model) if ".experts." in n}
    assert {".".join(name.split(".")[-2:]) for name in found} == adapted
    assert all(m.lora_B.size(1) == 2 for m in found.values())  # two experts per token
    dense = {n for n, _ in adapted_linears(model)} - found.keys()
    assert not dense if isinstance(targets, str) and adapted else dense


def test_a_name_that_stands_for_experts_alone_is_refused() -> None:
    with pytest.raises(UserError) as error:
        add_adapters(meta("deepseek_v3"), AdapterConfig("lora", targets=["down_proj"]))
    assert str(error.value) == (
        "adapter.targets: 'down_proj' also names experts of this model; expected targets without "
        "it, or experts.gate_up_proj and experts.down_proj"
    )


def test_experts_of_other_forms_stay_as_they_are() -> None:
    """gpt-oss: transposed, with biases."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    with torch.device("meta"):
        experts = GptOssExperts(GptOssConfig(hidden_size=64, intermediate_size=64))
    assert list(stacked_experts(experts)) == []


def test_a_config_may_hold_infinity() -> None:
    given = {"architectures": ["BambaForCausalLM"], "model_type": "bamba"}
    given["time_step_limit"] = [0.0, {"__float__": "Infinity"}]  # as transformers writes it
    assert hub_config.hub_config(given, "config.json").hf.time_step_limit[1] == float("inf")


def test_a_single_number_that_is_trained_is_refused() -> None:
    hf = nn.Module()
    hf.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(UserError, match="folder: Module keeps a single number, scale"):
        check_buffers(hf, "folder")


def test_a_weight_that_a_module_reads_itself_stays_plain() -> None:
    from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
    from transformers.models.llama.modeling_llama import LlamaAttention

    assert reads_weight(FalconMambaMixer, "dt_proj")
    assert not reads_weight(LlamaAttention, "q_proj")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["LamaForCausalLM"], "model_type": "lama"},
            "architecture 'LamaForCausalLM' is unknown to qfsdp and to transformers .*; the "
            "nearest that is known is LlamaForCausalLM",
        ),
        (
            {
                "architectures": ["OwnForCausalLM"],
                "model_type": "own",
                "auto_map": {"AutoModel": "modeling_own.Own"},
                "transformers_version": "4.57.0",
            },
            r"\(the folder was written by 4.57.0\); its own code \(auto_map\) is not run",
        ),
        (
            {"architectures": ["BertLMHeadModel"], "model_type": "bert"},
            "BertLMHeadModel is an encoder; expected a causal language model",
        ),
        (
            {"architectures": ["BertForMaskedLM"], "model_type": "bert"},
            "architecture 'BertForMaskedLM' is no causal language model; expected BertLM",
        ),
        (
            {"architectures": ["BartForCausalLM"], "model_type": "bart"},
            "BartForCausalLM is an encoder and a decoder",
        ),
        (
            {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"},
            "'WhisperForConditionalGeneration' is no causal language model",
        ),
        (
            {"architectures": [], "model_type": "lfm2"},
            r"architectures is \[\]; expected a list with the class of the model, such as",
        ),
        (
            {
                "architectures": ["GemmaForCausalLM"],
                "model_type": "gemma",
                "use_bidirectional_attention": True,
            },
            "in GemmaForCausalLM tokens see those after them .use_bidirectional_attention.; expec",
        ),
        (
            {"architectures": ["Emu3ForCausalLM"], "model_type": "emu3"},
            "Emu3ForCausalLM takes more than text; expected Emu3ForConditionalGeneration",
        ),
        (
            {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"},
            "Gemma3nForConditionalGeneration of transformers .* was not found to train as "
            "transformers does; expected one of docs/reference/models.md, or "
            r"model\.implementation=transformers",
        ),
        (
            {
                "architectures": ["Lfm2ForCausalLM"],
                "model_type": "lfm2",
                "vocab_size": 0,
            },
            "expected integers above 0",
        ),
        (
            {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"},
            "RwkvForCausalLM divides its weights in place before it answers; such a model is not",
        ),
    ],
)
def test_what_is_not_trained_is_refused_by_its_config(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as error:
        hub_config.model_config(tmp_path)
    assert "\n" not in str(error.value)


def test_transformers_builds_what_our_decoder_does_not_compute() -> None:
    """Granite 4's layers with Mamba and its experts: we build those without, of the same class."""
    mamba = {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"}
    mamba |= hub_models.SIZES | {"layer_types": ["mamba", "attention"] * 2}
    for experts, kinds in ((4, mamba["layer_types"]), (0, mamba["layer_types"]), (0, None)):
        config = mamba | {"num_local_experts": experts, "layer_types": kinds}
        assert isinstance(hub_config.model_config_of(config, "x"), hub_config.HubConfig)
        with pytest.raises(UserError, match="expected (0|full_attention for every layer)"):
            hub_config.model_config_of(config, "x", "native")


def test_a_class_may_be_spelled_in_another_way() -> None:
    config = {"architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe"}  # Phi-3.5-MoE
    assert hub_config.model_config_of(config, "x").architecture == "PhimoeForCausalLM"


def test_a_missing_transformers_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    config = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"expected `pip install 'transformers>=5.23,<6'`"):
        hub_config.model_config(tmp_path)
