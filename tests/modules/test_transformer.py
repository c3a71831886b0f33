"""The decoder against `transformers`: logits, gradients, generation, and errors in config.json."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from qfsdp.common.errors import UserError
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.rope import RopeConfig, rotate
from qfsdp.modules.rope_scalings import Llama3Scaling
from qfsdp.modules.transformer import Decoder

SEQ = 40
POSITIONS = torch.arange(SEQ)[None], torch.tensor([[SEQ]])  # and lengths of documents
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
TINY: dict[str, PreTrainedConfig] = {
    "llama2": LlamaConfig(**{**SIZES, "num_key_value_heads": 6}),
    "llama3.1": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama3.2-tied": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "llama-linear-rope": LlamaConfig(**SIZES, rope_parameters=LINEAR_ROPE),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral-window": MistralConfig(**SIZES, sliding_window=7),
    "mistral-no-window": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-window": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3-tied-biases": Qwen3Config(
        **SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=True
    ),
}
ARCHITECTURE = {
    LlamaConfig: "LlamaForCausalLM",
    MistralConfig: "MistralForCausalLM",
    Qwen2Config: "Qwen2ForCausalLM",
    Qwen3Config: "Qwen3ForCausalLM",
}


def config_dict(config: PreTrainedConfig) -> dict[str, Any]:
    """The config.json that `save_pretrained` writes, with every default."""
    return {**config.to_dict(), "architectures": [ARCHITECTURE[type(config)]]}


def reference(name: str) -> PreTrainedModel:
    """A tiny `transformers` model; random norms and biases, so that none can be left out."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TINY[name], attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(".bias"):
                parameter.normal_()
    return model


def ours(model: PreTrainedModel, **changes: Any) -> Decoder:
    """Our decoder with the weights of `model`; every key must match. `changes`: of all layers."""
    config = DecoderConfig.from_dict(config_dict(model.config))
    layers = tuple(dataclasses.replace(kind, **changes) for kind in config.layers)
    decoder = Decoder(dataclasses.replace(config, layers=layers))
    decoder.load_state_dict(model.state_dict(), strict=True)
    return decoder


def random_tokens(batch: int = 2) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (batch, SEQ), generator=torch.manual_seed(1))


def max_difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_logits_match_transformers(name: str) -> None:
    model, tokens = reference(name), random_tokens()
    expected = model(tokens).logits
    assert expected.std() > 0.3  # else the bound below would say little
    assert max_difference(ours(model)(tokens), expected) < 1e-4


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("llama3.1", {"rope": RopeConfig()}),
        ("llama-linear-rope", {"rope": RopeConfig(theta=5000.0)}),
        ("mistral-window", {"window": None}),
        ("qwen2-window", {"window": 7}),
    ],
)
@torch.no_grad()
def test_config_switches_change_the_logits(name: str, without: dict[str, Any]) -> None:
    model, tokens = reference(name), random_tokens()
    assert max_difference(ours(model, **without)(tokens), model(tokens).logits) > 0.05


@pytest.mark.parametrize("name", ["llama3.2-tied", "mistral-window", "qwen2", "qwen3"])
def test_gradients_match_transformers(name: str) -> None:
    model, tokens = reference(name), random_tokens()
    decoder = ours(model)
    for network in (model, decoder):
        output = network(tokens)
        logits = output if isinstance(output, Tensor) else output.logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    expected = dict(model.named_parameters())
    assert expected.keys() == dict(decoder.named_parameters()).keys()
    for parameter_name, parameter in decoder.named_parameters():
        gradient, want = parameter.grad, expected[parameter_name].grad
        assert gradient is not None and want is not None
        # Measured: at most 2.5e-6 of the largest gradient.
        assert max_difference(gradient, want) < 1e-4 * want.abs().max(), parameter_name


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Against the formula: each pair of numbers is turned by its angle."""
    first, second = x.chunk(2, dim=-1)
    (c, _), (_, s) = cos.chunk(2, dim=-1), sin.chunk(2, dim=-1)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(x, cos, sin, interleaved=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_rotation_and_its_gradient_are_autograds(dtype: torch.dtype, compiled: bool) -> None:
    tables = ours(reference("llama3.1")).config.layers[0].rope.tables(8, *POSITIONS, dtype)
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, 2, SEQ, 6, 8, generator=generator).to(dtype)
    results = []
    for turn in (rotated, rotate_halves):
        given = x.clone().requires_grad_()
        if compiled:
            turn = torch.compile(turn, backend="aot_eager", fullgraph=True)
        y = turn(given, *tables)
        y.backward(grad)
        results.append((y.detach(), given.grad))
    for ours_, want in zip(*reversed(results), strict=True):
        assert torch.equal(ours_, want)


def test_no_gradient_of_a_compiled_layer_is_added_up_one_by_one() -> None:
    """Autograd's gradient of an index is an `index_put`: on GPUs atomics or a sort."""
    decoder = ours(reference("llama3.1"))
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    layer, backend = decoder.model.layers[0], aot_autograd(fw_compiler=keep, bw_compiler=keep)
    x = torch.randn(2, SEQ, SIZES["hidden_size"], requires_grad=True)
    tables = decoder.config.layers[0].rope.tables(8, *POSITIONS, x.dtype)
    torch._dynamo.reset()
    block = torch.compile(layer.block, fullgraph=True, backend=backend)
    block(x, *tables, None).sum().backward()
    assert len(graphs) == 2
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert any("aten.index." in name for name in names)
    assert not [name for name in names if "index_put" in name or "scatter" in name]


@pytest.mark.parametrize("compiled", [False, True])
def test_activation_checkpointing_changes_no_bit(compiled: bool) -> None:
    model, tokens = reference("qwen3"), random_tokens()
    results = []
    for mode in ("none", "full"):
        decoder = ours(model)
        decoder.set_activations(ActivationConfig(mode))
        if compiled:
            for layer in decoder.model.layers:
                layer.block = torch.compile(layer.block, backend="aot_eager", fullgraph=True)
        logits = decoder(tokens)
        logits.square().mean().backward()
        results.append([logits, *(p.grad for p in decoder.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_activation_checkpointing_keeps_only_layer_inputs() -> None:
    decoder, tokens = ours(reference("llama3.1")), random_tokens()
    saved_bytes = {}
    for mode in ("none", "full"):
        decoder.set_activations(ActivationConfig(mode))
        storages = {}

        def remember(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            logits = decoder(tokens)
        saved_bytes[mode] = sum(n for key, n in storages.items() if key not in weights)
        del logits
    assert saved_bytes["full"] < saved_bytes["none"] / 4


@pytest.mark.parametrize("name", ["llama3.1", "mistral-window"])
@torch.no_grad()
def test_packed_sequences_equal_separate_ones(name: str) -> None:
    decoder, tokens = ours(reference(name)), random_tokens(batch=1)
    lengths = [13, SEQ - 13]
    document = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    mask = (document[:, None] == document).tril()[None, None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = decoder(tokens, positions, mask)
    separate = torch.cat([decoder(part) for part in tokens.split(lengths, dim=1)], dim=1)
    assert max_difference(packed, separate) < 1e-5
    assert max_difference(packed, decoder(tokens)) > 0.05


@torch.no_grad()
def test_explicit_causal_mask_equals_none() -> None:
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        decoder, tokens = ours(reference("llama3.1")).to(dtype), random_tokens()
        mask = torch.ones(2, 1, SEQ, SEQ, dtype=torch.bool).tril()
        assert max_difference(decoder(tokens, mask=mask), decoder(tokens)) < bound


@pytest.mark.parametrize("name", ["llama3.1", "llama3.2-tied"])
def test_is_built_on_meta_in_the_default_dtype(name: str) -> None:
    config = DecoderConfig.from_dict(config_dict(TINY[name]))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            decoder = Decoder(config)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {(p.device.type, p.dtype) for p in decoder.parameters()} == {("meta", torch.bfloat16)}
    assert not list(decoder.buffers())
    assert decoder(torch.zeros(1, 5, dtype=torch.long, device="meta")).shape == (1, 5, 101)
    names = [name for name, _ in decoder.named_parameters()]
    assert ("lm_head.weight" in names) != config.tie_word_embeddings
    decoder.to_empty(device="cpu")
    decoder.tie_weights()
    assert [name for name, _ in decoder.named_parameters()] == names


# --- SmolLM2-135M-Instruct ---------------------------------------------------------------------

TEXTS = [
    "The capital of France is Paris, and the capital of Italy is",
    "Q: A box holds 12 eggs. How many eggs are in 7 boxes?\nA: 12 * 7 = 84",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
]


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm2_dir, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def our_smollm2(smollm2_dir: Path) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(DecoderConfig.from_dir(smollm2_dir))
    weights = load_file(smollm2_dir / "model.safetensors")
    assert weights.keys() == dict(decoder.named_parameters()).keys()
    decoder.load_state_dict(weights, strict=False, assign=True)
    decoder.tie_weights()
    return decoder


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.mark.parametrize("text", TEXTS)
@torch.no_grad()
def test_smollm2_logits(
    text: str, smollm2: PreTrainedModel, our_smollm2: Decoder, tokenizer: Any
) -> None:
    tokens = tokenizer(text, return_tensors="pt").input_ids
    assert max_difference(our_smollm2(tokens), smollm2(tokens).logits) < 1e-4


@torch.no_grad()
def test_smollm2_right_padding_needs_no_mask(
    smollm2: PreTrainedModel, our_smollm2: Decoder, tokenizer: Any
) -> None:
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="right")
    real = batch.attention_mask.bool()
    assert not real.all()
    expected = smollm2(**batch).logits
    assert max_difference(our_smollm2(batch.input_ids)[real], expected[real]) < 1e-4


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_greedy_continuation(
    smollm2: PreTrainedModel, our_smollm2: Decoder, tokenizer: Any
) -> None:
    chat = [{"role": "user", "content": "Explain in a paragraph how rain forms."}]
    tokens = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids
    expected = smollm2.generate(tokens, do_sample=False, max_new_tokens=50)
    assert expected.shape[1] == tokens.shape[1] + 50
    while tokens.shape[1] < expected.shape[1]:
        following = our_smollm2(tokens)[:, -1:].argmax(-1)
        tokens = torch.cat((tokens, following), dim=1)
    assert torch.equal(tokens, expected)


@pytest.mark.long
@torch.no_grad()
def test_smollm2_bf16_logits(smollm2: PreTrainedModel, smollm2_dir: Path, tokenizer: Any) -> None:
    tokens = tokenizer(TEXTS[1], return_tensors="pt").input_ids
    expected = smollm2(tokens).logits
    low = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.bfloat16).eval()
    logits = ours(low).bfloat16()(tokens)
    assert logits.dtype == torch.bfloat16
    # Measured: no bit differs from transformers in bf16; from fp32 at most 1.6, on average 0.15
    # (logits reach 30). The bounds leave room for another CPU's kernels.
    assert max_difference(logits, low(tokens).logits) <= 0.25
    assert max_difference(logits, expected) < 2.0
    assert (logits - expected).abs().mean() < 0.25


# --- config.json -------------------------------------------------------------------------------

OLD_SPELLING: dict[str, dict[str, Any]] = {
    "llama3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "linear": {
        **SIZES,
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_theta": 20000.0,
    },
    "mistral-7b-v0.3": {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32768,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    **{
        # No optional key at all: every default must be the one Hugging Face takes.
        f"minimal-{name}": {
            **{key: 64 for key in SIZES if key != "num_key_value_heads"},
            "hidden_size": 128,
            "architectures": [name],
        }
        for name in ARCHITECTURE.values()
    },
}


@pytest.mark.parametrize("name", OLD_SPELLING)
def test_config_is_read_as_transformers_reads_it(name: str) -> None:
    old = OLD_SPELLING[name]
    config_class = next(c for c, known in ARCHITECTURE.items() if known in old["architectures"])
    new = config_class(**json.loads(json.dumps(old))).to_dict()
    assert "rope_theta" not in new and "rope_theta" in new["rope_parameters"]
    assert DecoderConfig.from_dict(old) == DecoderConfig.from_dict(new)


def test_config_fields_of_llama_3_1() -> None:
    config = DecoderConfig.from_dict(OLD_SPELLING["llama3.1-8b"])
    assert (config.head_dim, config.num_key_value_heads, config.norm.eps) == (128, 8, 1e-5)
    rope = RopeConfig(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert {kind.rope for kind in config.layers} == {rope}
    assert not config.tie_word_embeddings and config.shortest_window is None


PHI = {"architectures": ["Phi3ForCausalLM"]}  # a part of a head is rotated


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", *ARCHITECTURE.values()]),
        ({"architectures": None}, ["architecture None", "LlamaForCausalLM"]),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, ["spiral", "llama3"]),
        ({"rope_scaling": {"type": "linear"}}, ["linear", "factor"]),
        (PHI | {"partial_rotary_factor": 1.5}, ["partial_rotary_factor", "1.5"]),
        (PHI | {"partial_rotary_factor": 0.4}, ["partial_rotary_factor is 0.4", "even number of"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"vocab_size": None}, ["vocab_size", "None"]),
        ({"num_hidden_layers": "three"}, ["num_hidden_layers", "three"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "0"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads", "4", "6"]),
        ({"num_hidden_layers": 10_000_000}, ["num_hidden_layers is 10000000", "at most 10000"]),
        ({"vocab_size": 10**12}, ["vocab_size is 1000000000000", "at most 16777216"]),
        ({"vocab_size": -5}, ["vocab_size is -5", "positive integer"]),
        ({"hidden_size": 10**15}, ["hidden_size", "at most"]),
        ({"num_attention_heads": 7}, ["num_attention_heads is 7", "divisor of hidden_size"]),
        ({"head_dim": 0}, ["head_dim is 0", "positive integer"]),
        ({"head_dim": 15}, ["head_dim is 15", "even number"]),
        ({"rope_theta": 0}, ["rope_theta is 0", "above 0"]),
        ({"rope_theta": -1.0}, ["rope_theta is -1.0", "above 0"]),
        ({"rope_theta": "big"}, ["rope_theta is 'big'", "above 0"]),
        ({"rope_scaling": [2]}, ["rope_scaling is [2]", "an object"]),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ["factor is 0", "above 0"]),
        ({"rms_norm_eps": math.nan}, ["rms_norm_eps is nan", "above 0"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps is 'small'", "above 0"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings is 'no'", "true or false"]),
        ({"max_position_embeddings": 0}, ["max_position_embeddings is 0", "positive integer"]),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": -3},
            ["sliding_window is -3", "positive integer"],
        ),
    ],
)
def test_config_errors_name_file_and_value(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    config = {**SIZES, "architectures": ["LlamaForCausalLM"], **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as caught:
        DecoderConfig.from_dir(tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in [str(tmp_path / "config.json"), *words])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{]", "JSON"),
        ("[1]", "JSON object"),
        ("[" * 100_000, "JSON: maximum recursion depth"),
    ],
)
def test_unreadable_config_is_a_user_error(content: str | None, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        (folder / "config.json").write_text(content)
    with pytest.raises(UserError) as caught:
        DecoderConfig.from_dir(folder)
    assert str(folder / "config.json") in str(caught.value) and words in str(caught.value)


def test_layer_types_say_which_layers_have_the_window() -> None:
    config = config_dict(TINY["qwen2-window"])
    config["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    assert [kind.window for kind in DecoderConfig.from_dict(config).layers] == [7, None, 7]


@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["full_attention", "chunked", "full"]])
def test_other_layer_types_are_a_user_error(kinds: list[str]) -> None:
    config = config_dict(TINY["qwen2-window"]) | {"layer_types": kinds}
    with pytest.raises(UserError, match="layer_types is .*sliding_attention for each of 3 layers"):
        DecoderConfig.from_dict(config)
