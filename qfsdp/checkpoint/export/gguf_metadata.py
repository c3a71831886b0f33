"""The metadata of a GGUF file: what llama.cpp has to know to compute a model.

llama.cpp has one graph for every architecture, with fewer switches than `DecoderParts`. What its
graph does not compute is refused here, in one line and before any weight is read.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qfsdp.common.errors import UserError
from qfsdp.common.terminal import warn
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.decoder_parts import DecoderParts
from qfsdp.modules.rope import RopeConfig, Scaling
from qfsdp.modules.rope_scalings import LinearScaling, Llama3Scaling, YarnScaling

if TYPE_CHECKING:
    import gguf

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "Gemma3ForCausalLM": "gemma3",
    "MixtralForCausalLM": "llama",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
    "Qwen3NextForCausalLM": "qwen3next",
}
"""`architectures` of config.json -> llama.cpp's name."""
NEIGHBOURS = ("llama", "smollm3", "granite")  # rotate these in a head, not i and i + half
BIASES = ("llama", "qwen2", "qwen2moe")  # where queries, keys and values may have them
SECTIONS = [11, 11, 10]
"""Of Qwen 3.5: how many pairs of a head turn by time, height and width. Of text all three are one
number, so they change nothing; llama.cpp reads no file without them."""


@dataclass(frozen=True)
class GgufModel:
    """A model as llama.cpp computes it.

    Fields:
        architecture: llama.cpp's name.
        parts: the decoder.
        rope: the rotary embedding of all layers.
        name: of the model, for people.
        sections: of the rotary embedding, see `SECTIONS`; None: it has none.
    """

    architecture: str
    parts: DecoderConfig
    rope: RopeConfig
    name: str
    sections: list[int] | None = None

    @property
    def context(self) -> int:
        """The longest row that llama.cpp computes as training did: but for Gemma 3 it has no
        sliding window for these architectures, so a window ends the context."""
        window = None if self.architecture == "gemma3" else self.parts.shortest_window
        most = self.parts.max_position_embeddings
        return most if window is None else min(window, most)

    def rope_factors(self) -> Tensor | None:
        """By what each frequency of Llama 3's scaling is divided, fp32 `[head_dim // 2]`; None for
        scalings that llama.cpp has a key for."""
        if not isinstance(self.rope.scaling, Llama3Scaling):
            return None
        args = (self.rope.theta, self.parts.head_dim, torch.zeros(1, 1))
        return Scaling().inverse(*args) / self.rope.scaling.inverse(*args)

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        """Adds sizes, norms and the rotary embedding to a file's metadata."""
        import gguf

        parts, scaling = self.parts, self.rope.scaling
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(self.name)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_vocab_size(parts.vocab_size)
        writer.add_context_length(self.context)
        writer.add_embedding_length(parts.hidden_size)
        writer.add_feed_forward_length(parts.intermediate_size)
        writer.add_block_count(parts.num_hidden_layers)
        writer.add_head_count(parts.num_attention_heads)
        writer.add_head_count_kv(parts.num_key_value_heads)
        writer.add_key_length(parts.head_dim)
        writer.add_value_length(parts.head_dim)
        writer.add_layer_norm_rms_eps(parts.norm.eps)
        writer.add_rope_dimension_count(self.rope.rotated(parts.head_dim))
        writer.add_rope_freq_base(self.rope.theta)
        if isinstance(scaling, LinearScaling):
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(scaling.factor)
        if isinstance(scaling, YarnScaling):
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(scaling.factor)
            writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
        if self.architecture == "granite":
            writer.add_embedding_scale(parts.multipliers.embedding)
            writer.add_residual_scale(parts.multipliers.residual)
            writer.add_logit_scale(1.0 / parts.multipliers.logits)
            writer.add_attention_scale(parts.attention.scale or 1.0)
        if self.architecture == "gemma3":
            window, rope = _sliding(parts)
            writer.add_sliding_window(window)
            writer.add_rope_freq_base_swa(rope.theta)
        if self.sections is not None:
            writer.add_rope_dimension_sections((self.sections + [0])[:4])
        if (experts := parts.experts) is not None:
            writer.add_expert_count(experts.count)
            writer.add_expert_used_count(experts.top_k)
            writer.add_expert_feed_forward_length(experts.intermediate_size)
            if experts.shared is not None:
                writer.add_expert_shared_feed_forward_length(experts.shared.intermediate_size)
        if (part := parts.recurrent) is not None:
            writer.add_ssm_conv_kernel(part.taps)
            writer.add_ssm_state_size(part.key_dim)
            writer.add_ssm_group_count(part.key_heads)
            writer.add_ssm_time_step_rank(part.value_heads)
            writer.add_ssm_inner_size(part.widths[2])
            writer.add_full_attention_interval(_interval(parts))


def gguf_model(folder: Path) -> GgufModel:
    """The model in a folder. Reads `config.json` only. Raises UserError: llama.cpp's graph of this
    architecture computes something else, or the architecture is not in `ARCHITECTURES`."""
    file = folder / "config.json"
    parts = DecoderConfig.from_dir(folder)  # checks that the file is a config
    names = json.loads(file.read_text(encoding="utf-8"))["architectures"]
    name = names[0] if isinstance(names, list) else names
    if name not in ARCHITECTURES:
        raise UserError(f"{file}: gguf has no {name} here; expected {', '.join(ARCHITECTURES)}")
    kind = ARCHITECTURES[name]
    sections = _sections(file, parts) if kind.startswith("qwen35") else None
    model = GgufModel(kind, parts, _rope(file, kind, parts), folder.resolve().name, sections)
    if kind not in BIASES and parts.attention.qkv_bias:
        raise UserError(f"{file}: attention_bias true; expected false: llama.cpp's {kind} has none")
    if isinstance(model.rope.scaling, Llama3Scaling) and kind != "llama":
        raise UserError(
            f"{file}: rope type 'llama3'; expected another: llama.cpp's {kind} has no such scaling"
        )
    fixed = (_of_llama, _of_qwen2, _of_gemma3, _of_experts, _of_layers)
    for wrong, found, expected in (fact for facts in fixed for fact in facts(kind, parts)):
        if wrong:
            raise UserError(
                f"{file}: {found}; expected {expected}: llama.cpp's {kind} has no other"
            )
    return model


def _interval(parts: DecoderParts) -> int:
    """One layer in so many has attention, the last of each; 0: another pattern."""
    kinds = [layer.recurrent for layer in parts.layers]
    every = kinds.index(False) + 1 if False in kinds else 0
    return every if every and kinds == _all_but_every(every, parts) else 0


def _all_but_every(every: int, parts: DecoderParts) -> list[bool]:
    """For each layer whether its number, from 1, is no multiple of `every`."""
    return [bool((index + 1) % every) for index in range(parts.num_hidden_layers)]


Fixed = tuple[bool, str, str]  # whether a model differs, what it has, and what llama.cpp has


def _of_llama(kind: str, parts: DecoderParts) -> Iterator[Fixed]:
    """What llama.cpp's graphs of variants of Llama have fixed."""
    if kind in ("smollm3", "granite"):
        yield parts.mlp.bias, "mlp_bias true", "false"
    if kind == "smollm3":
        rotated = [layer.rope is not None for layer in parts.layers]
        yield rotated != _all_but_every(4, parts), "no_rope_layers", "every fourth"


def _of_qwen2(kind: str, parts: DecoderParts) -> Iterator[Fixed]:
    """What llama.cpp does not load."""
    if kind in ("qwen2", "qwen2moe"):
        heads = parts.hidden_size / parts.num_attention_heads
        yield parts.head_dim != heads, f"head_dim {parts.head_dim}", f"{heads:g}, of hidden_size"
    tied = kind == "qwen2moe" and parts.tie_word_embeddings
    yield tied, "tie_word_embeddings true", "false"


def _of_gemma3(kind: str, parts: DecoderParts) -> Iterator[Fixed]:
    """What llama.cpp's graph of Gemma 3 has fixed; its model of 27B is known by its layers."""
    if kind != "gemma3":
        return
    windows, usual = [layer.window is not None for layer in parts.layers], _all_but_every(6, parts)
    yield windows != usual, "layer_types", "a sliding window in all layers but every sixth"
    swa = _sliding(parts)[1]
    yield swa != RopeConfig(swa.theta), "a scaling of layers with a window", "none"
    size = parts.hidden_size / parts.num_attention_heads
    size = size if parts.num_hidden_layers == 62 else parts.head_dim
    scale = parts.attention.scale or 0.0
    wrong = not math.isclose(scale, size**-0.5, rel_tol=1e-6)
    yield wrong, f"query_pre_attn_scalar {scale**-2:g}", f"{size:g}"


def _sliding(parts: DecoderParts) -> tuple[int, RopeConfig]:
    """The window and the rotary embedding of layers with a sliding window."""
    found = ((layer.window, layer.rope) for layer in parts.layers)
    return next((w, rope) for w, rope in found if w is not None and rope is not None)


def _of_experts(kind: str, parts: DecoderParts) -> Iterator[Fixed]:
    """What llama.cpp's graph of a mixture has fixed."""
    if parts.experts is None:
        return
    sparse = not all(layer.mixture for layer in parts.layers)
    yield sparse, "layers without experts", "a mixture in every layer"
    normalised = kind != "qwen2moe"
    wrong = parts.experts.router.normalised != normalised
    yield wrong, f"norm_topk_prob {str(not normalised).lower()}", str(normalised).lower()


def _of_layers(kind: str, parts: DecoderParts) -> Iterator[Fixed]:
    """What llama.cpp's graphs of recurrent layers have fixed."""
    if (part := parts.recurrent) is None:
        return
    dims = f"linear_key_head_dim {part.key_dim}, linear_value_head_dim {part.value_dim}"
    yield not _interval(parts), "layer_types", "attention in one layer of so many, the last"
    yield part.key_dim != part.value_dim, dims, "one size"
    eps = parts.norm.eps
    yield eps != 1e-6, f"rms_norm_eps {eps}", "1e-06, as of queries and keys"


def _sections(file: Path, parts: DecoderParts) -> list[int]:
    """Of the rotary embedding, as the file or the family has them."""
    config = json.loads(file.read_text(encoding="utf-8"))
    text = config.get("text_config", config) if parts.takes_more_than_text else config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return list(rope.get("mrope_section") or SECTIONS)


def _rope(file: Path, kind: str, parts: DecoderConfig) -> RopeConfig:
    """The rotary embedding of all layers, of Gemma 3 of those without a window; refuses what
    llama.cpp has no key for."""
    layers = [layer for layer in parts.layers if not layer.recurrent]
    if kind == "smollm3":
        layers = [layer for layer in layers if layer.rope is not None]
    if kind == "gemma3":
        layers = [layer for layer in layers if layer.window is None]
    ropes = {layer.rope for layer in layers}
    rope = next(iter(ropes), None)
    expected = "expected one rotary embedding of whole heads for all layers"
    shares = rope is not None and rope.share != 1 and parts.recurrent is None
    if len(ropes) > 1 or rope is None or shares or rope.query_scaling is not None:
        raise UserError(f"{file}: rotary embeddings that llama.cpp does not have; {expected}")
    kinds = (Scaling, LinearScaling, Llama3Scaling, YarnScaling)
    scaling = rope.scaling
    if type(scaling) not in kinds:
        raise UserError(
            f"{file}: rope type {type(scaling).__name__.removesuffix('Scaling').lower()!r}; "
            "expected default, linear, llama3 or yarn: llama.cpp has no other"
        )
    if isinstance(scaling, YarnScaling):
        usual = YarnScaling(scaling.factor, scaling.original_max_position_embeddings, 0.0)
        # llama.cpp computes the magnitude from the factor, as the paper does.
        magnitude = 1.0 if scaling.factor <= 1 else 0.1 * math.log(scaling.factor) + 1.0
        if scaling != replace(usual, magnitude=magnitude):
            raise UserError(
                f"{file}: yarn with settings of its own; expected factor and "
                "original_max_position_embeddings only"
            )
    return rope


def warn_of_limits(model: GgufModel) -> None:
    """Says on standard error where a sliding window ends the context, and where a part of the model
    is left out."""
    if model.parts.takes_more_than_text:
        warn("the file has the text part; for pictures llama.cpp's converter makes an mmproj file")
    if model.context < model.parts.max_position_embeddings:
        warn(
            f"the context is {model.context} tokens, the model's sliding window: "
            f"llama.cpp's {model.architecture} has none"
        )
