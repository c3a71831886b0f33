"""The shape of a decoder, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qfsdp.cli.errors import UserError

EXPANDED = "expanded_layers"  # key of config.json: indices of layers that block expansion added

# Per architecture: Hugging Face's defaults for keys that config.json leaves out, and values that
# its model code fixes, whatever config.json says.
_ARCHITECTURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LlamaForCausalLM": (
        {"max_position_embeddings": 2048},
        {"use_sliding_window": False, "max_window_layers": 0},
    ),
    "MistralForCausalLM": (
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        {
            "use_sliding_window": True,
            "max_window_layers": 0,
            "qkv_bias": False,
            "o_bias": False,
            "mlp_bias": False,
        },
    ),
    "Qwen2ForCausalLM": (
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        {"qkv_bias": True, "o_bias": False, "mlp_bias": False},
    ),
    "Qwen3ForCausalLM": (
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        {"mlp_bias": False, "qk_norm": True},
    ),
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (arXiv:2104.09864): its base, and its stretching for long contexts.

    `rope_type` is "default", "linear" (all frequencies divided by `factor`) or "llama3" (low
    frequencies divided, high ones kept, a ramp between). Only "llama3" uses the last three fields.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @classmethod
    def from_dict(cls, config: dict[str, Any], source: str) -> RopeConfig:
        """Reads the new keys (`rope_parameters`) or the old ones (`rope_theta`, `rope_scaling`).

        Raises `UserError`, which names `source`, for an unknown rope type or a missing number.
        """
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in _ROPE_KEYS:
            known = ", ".join(_ROPE_KEYS)
            raise UserError(
                f"{source}: rope type {rope_type!r} is unknown; expected one of {known}"
            )
        rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if rotated != 1.0:
            raise UserError(f"{source}: partial_rotary_factor is {rotated!r}; expected 1.0")
        # As in Hugging Face, the context length replaces a missing original length.
        rope = {"original_max_position_embeddings": config["max_position_embeddings"], **rope}
        missing = [key for key in _ROPE_KEYS[rope_type] if key not in rope]
        if missing:
            raise UserError(f"{source}: rope type {rope_type!r} needs {', '.join(missing)}")
        theta = rope.get("rope_theta") or config.get("rope_theta") or cls.theta
        return cls(theta, rope_type, **{key: rope[key] for key in _ROPE_KEYS[rope_type]})

    def inverse_frequencies(self, head_dim: int, device: torch.device) -> Tensor:
        """Radians per position of every rotated pair: fp32 `[head_dim // 2]`."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        inverse = 1.0 / self.theta**exponents
        if self.rope_type == "linear":
            return inverse / self.factor
        if self.rope_type == "llama3":
            # By a pair's turns within the original context: few (a low frequency) -> stretched,
            # many -> kept, between the two limits -> a linear ramp.
            turns = self.original_max_position_embeddings * inverse / (2 * math.pi)
            keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            return torch.lerp(inverse / self.factor, inverse, keep.clamp(0, 1))
        return inverse


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a dense decoder; fields are named as in `config.json` where it has them.

    `sliding_window` is the number of positions that a token sees, itself included (None: all before
    it). The first `max_window_layers` layers ignore it (Qwen's key; 0 for Mistral).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    rope: RopeConfig = RopeConfig()

    @classmethod
    def from_dir(cls, path: str | Path) -> DecoderConfig:
        """Reads `<path>/config.json`. Raises `UserError`, which names the file and the mistake."""
        file = Path(path) / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            why = error.strerror
            raise UserError(f"{file}: {why}; expected a Hugging Face model folder") from None
        except ValueError as error:
            raise UserError(f"{file}: not valid JSON: {error}") from None
        if not isinstance(config, dict):
            raise UserError(f"{file}: holds a {type(config).__name__}; expected a JSON object")
        return cls.from_dict(config, source=str(file))

    @classmethod
    def from_dict(cls, config: dict[str, Any], source: str = "config.json") -> DecoderConfig:
        """Reads a parsed Hugging Face `config.json`; `source` names it in errors.

        Raises `UserError` for an architecture, activation or rope type that `Decoder` does not
        support, and for sizes that are missing, not positive integers, or do not divide.
        """
        architecture = (config.get("architectures") or [None])[0]
        if architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise UserError(
                f"{source}: architecture {architecture!r} is unknown; expected one of {known}"
            )
        defaults, fixed = _ARCHITECTURES[architecture]
        bias = config.get("attention_bias", False)
        config = {"qkv_bias": bias, "o_bias": bias, **defaults, **config, **fixed}
        if config.get("hidden_act", "silu") != "silu":
            raise UserError(f"{source}: hidden_act is {config['hidden_act']!r}; expected 'silu'")
        if not config["use_sliding_window"]:
            config["sliding_window"] = None
        elif config["max_window_layers"] and config.get("layer_types"):
            config["max_window_layers"] = _leading_full_attention(config["layer_types"], source)
        if config.get("num_key_value_heads") is None:
            config["num_key_value_heads"] = config.get("num_attention_heads")
        if config.get("head_dim") is None:
            _check_sizes(config, ("hidden_size", "num_attention_heads"), source)
            config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
        _check_sizes(config, _SIZES, source)
        if config["num_attention_heads"] % config["num_key_value_heads"]:
            raise UserError(
                f"{source}: num_key_value_heads is {config['num_key_value_heads']}; expected a "
                f"divisor of num_attention_heads ({config['num_attention_heads']})"
            )
        config["rope"] = RopeConfig.from_dict(config, source)
        known_keys = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in config.items() if key in known_keys})


def _leading_full_attention(layer_types: list[str], source: str) -> int:
    """Number of the first layers, which attend without the window; all later ones must have it."""
    full = layer_types.count("full_attention")
    if "sliding_attention" in layer_types[:full]:
        raise UserError(f"{source}: layer_types mixes kinds; expected full_attention layers first")
    return full


def _check_sizes(config: dict[str, Any], names: tuple[str, ...], source: str) -> None:
    for name in names:
        value = config.get(name)
        if type(value) is not int or value < 1:
            raise UserError(f"{source}: {name} is {value!r}; expected a positive integer")
