"""Reads and checks the keys of a `config.json` that several families have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from qfsdp.cli.errors import UserError
from qfsdp.modules.decoder_parts import MOST_LAYERS, ExpertsConfig, LayerConfig, RouterConfig
from qfsdp.modules.norms import NormConfig
from qfsdp.modules.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    Scaling,
    Unscaled,
    YarnScaling,
)

_MOST = {"num_hidden_layers": MOST_LAYERS, "max_position_embeddings": 2**31 - 1}
_MOST_SIZE = 2**24  # of all others
# Of one value: published files have one, transformers 5 writes another.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
FULL, SLIDING = "full_attention", "sliding_attention"


class Keys:
    """The keys of one object of a `config.json`.

    Every method raises `UserError`, which names `source`, key and value, if the value is not as
    expected. A key with the value null counts as missing, except in `given` and `switch`.

    Args:
        values: the parsed object.
        source: names the file in errors.
        defaults: Hugging Face's values for keys that the file leaves out.
    """

    def __init__(self, values: dict[str, Any], source: str, **defaults: Any) -> None:
        self.source, self._values, self._defaults = source, values, defaults

    def given(self, name: str) -> Any:
        """The value, null included, or the family's default, or None."""
        return self._values.get(name, self._defaults.get(name))

    def size(self, name: str, default: int | None = None) -> int:
        value, most = self._or(name, default), _MOST.get(name, _MOST_SIZE)
        if type(value) is not int or value < 1:
            raise self.error(name, value, "a positive integer")
        if value > most:
            raise self.error(name, value, f"at most {most}")
        return value

    def count(self, name: str) -> int:
        value = self.given(name)
        if type(value) is not int or value < 0:
            raise self.error(name, value, "an integer of at least 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value: Any = self._or(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(name, value, "a number above 0")
        return float(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        value = self.given(name)
        valid = isinstance(value, list) and len(value) == count
        if not valid or not all(type(x) in (int, float) and 0 < x < math.inf for x in value):
            raise self.error(name, value, f"{count} numbers above 0")
        return tuple(float(x) for x in value)

    def switch(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name, self._defaults.get(name, default))
        if type(value) is not bool:
            raise self.error(name, value, "true or false")
        return value

    def only(self, name: str, expected: Any, absent: Any = None) -> None:
        """Refuses every value but `expected`. A missing key means `absent` or, without one,
        `expected`."""
        value = self.given(name)
        if value is None:
            value = expected if absent is None else absent
        if value != expected:
            wanted = repr(expected) if isinstance(expected, str) else str(expected).lower()
            raise self.error(name, value, "null" if expected is None else wanted)

    def object(self, name: str) -> dict[str, Any]:
        value = self.given(name) or {}
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return value

    def of_layers(self, name: str, kinds: tuple[Any, ...]) -> list[Any] | None:
        """One of `kinds` for every layer, or None where the key is missing."""
        value, count = self.given(name), self.size("num_hidden_layers")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count or any(x not in kinds for x in value):
            if isinstance(value, list) and len(value) >= count:
                value = next(x for x in value if x not in kinds)
            known = " or ".join(str(kind) for kind in kinds)
            raise self.error(name, value, f"{known} for each of {count} layers")
        return value[:count]

    def error(self, name: str, value: Any, expected: str) -> UserError:
        return UserError(f"{self.source}: {name} is {value!r}; expected {expected}")

    def _or(self, name: str, default: Any) -> Any:
        value = self.given(name)
        return default if value is None else value

    # ---- what every decoder has ----------------------------------------------------------------

    def sizes(self) -> dict[str, Any]:
        """The fields of `DecoderParts` that are plain numbers, and whether embeddings are tied."""
        heads, head_dim = self.size("num_attention_heads"), self.head_dim()
        kv_heads = self.size("num_key_value_heads", heads)
        if heads % kv_heads:
            expected = f"a divisor of num_attention_heads ({heads})"
            raise self.error("num_key_value_heads", kv_heads, expected)
        return {
            "vocab_size": self.size("vocab_size"),
            "hidden_size": self.size("hidden_size"),
            "intermediate_size": self.size("intermediate_size"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": self.size("max_position_embeddings"),
            "tie_word_embeddings": self.switch("tie_word_embeddings"),
        }

    def head_dim(self) -> int:
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if self.given("head_dim") is None and hidden % heads:
            expected = f"a divisor of hidden_size ({hidden}), or head_dim"
            raise self.error("num_attention_heads", heads, expected)
        head_dim = self.size("head_dim", hidden // heads)
        if head_dim % 2:
            raise self.error("head_dim", head_dim, "an even number")
        return head_dim

    def norm(self, **kind: Any) -> NormConfig:
        return NormConfig(self.number("rms_norm_eps", 1e-6), **kind)

    def experts(
        self,
        size: str = "moe_intermediate_size",
        stored: tuple[str, str, str] = ExpertsConfig.stored,
        **router: Any,
    ) -> ExpertsConfig:
        """The mixture of experts; `size` names the key of an expert's size, `router` has fields of
        `RouterConfig`. A family's default count has the first name of `EXPERT_COUNTS`."""
        count = next((name for name in EXPERT_COUNTS if name in self._values), EXPERT_COUNTS[0])
        experts, top_k = self.size(count), self.size("num_experts_per_tok")
        if top_k > experts:
            raise self.error("num_experts_per_tok", top_k, f"at most {count} ({experts})")
        aux_loss = self.given("router_aux_loss_coef") or 0.0
        if type(aux_loss) not in (int, float) or not 0 <= aux_loss < math.inf:
            raise self.error("router_aux_loss_coef", aux_loss, "a number of at least 0")
        how = RouterConfig(**router, family_aux_loss=float(aux_loss))
        return ExpertsConfig(experts, top_k, self.size(size), how, stored=stored)

    # ---- layers --------------------------------------------------------------------------------

    def window(self) -> int | None:
        return None if self.given("sliding_window") is None else self.size("sliding_window")

    def same_layers(
        self, window: int | None = None, interleaved: bool = False
    ) -> tuple[LayerConfig, ...]:
        """All layers alike."""
        layer = LayerConfig(window, self.rope(interleaved))
        return (layer,) * self.size("num_hidden_layers")

    def mixtures(self, layers: Iterable[LayerConfig]) -> tuple[LayerConfig, ...]:
        """These layers, with a mixture of experts in each."""
        return tuple(replace(layer, mixture=True) for layer in layers)

    def windows(self, sliding: Callable[[int], bool]) -> list[int | None]:
        """The window of every layer: as `layer_types` says or, without that key, of those whose
        index is `sliding`."""
        count, window = self.size("num_hidden_layers"), self.window()
        kinds = self.of_layers("layer_types", (FULL, SLIDING))
        if kinds is None:
            return [window if sliding(index) else None for index in range(count)]
        return [window if kind == SLIDING else None for kind in kinds]

    def rope(self, interleaved: bool = False) -> RopeConfig:
        """The rotary embedding of all layers."""
        return self.rope_of(self.rope_object(), interleaved=interleaved)

    def two_ropes(self, sliding_theta: float | None = None) -> tuple[RopeConfig, RopeConfig]:
        """The rotary embeddings of layers with a sliding window and of those without.

        The old keys scale only the latter, and `sliding_theta` is the base of the former.
        """
        new = Keys(self.object("rope_parameters"), self.source)
        theta = {} if sliding_theta is None else {"rope_theta": sliding_theta}
        sliding = theta | new.object(SLIDING)
        full = self.object("rope_scaling") | new.object(FULL)
        return self.rope_of(sliding), self.rope_of(full)

    def rope_object(self) -> dict[str, Any]:
        """The object of the new keys (`rope_parameters`) or the old ones (`rope_scaling`)."""
        return self.object("rope_parameters") or self.object("rope_scaling")

    def rope_of(self, rope: dict[str, Any], **changes: Any) -> RopeConfig:
        """The rotary embedding that the object `rope` describes; missing keys are the file's."""
        names = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        outer = {name: self.given(name) for name in names if self.given(name) is not None}
        keys = Keys(rope, self.source, **outer)
        theta = keys.number("rope_theta", RopeConfig.theta)
        share, head_dim = keys.number("partial_rotary_factor", 1.0), self.head_dim()
        rotated = int(head_dim * share)
        if share > 1 or rotated % 2 or not rotated:
            expected = f"an even number of the {head_dim} of a head"
            raise self.error("partial_rotary_factor", share, expected)
        scaling = self._scaling(keys, rotated)
        return RopeConfig(theta, scaling, 1.0 if rotated == head_dim else share, **changes)

    def _scaling(self, keys: Keys, rotated: int) -> Scaling:
        kind = keys.given("rope_type") or keys.given("type") or "default"
        if not isinstance(kind, str) or kind not in _SCALINGS:
            known = ", ".join(_SCALINGS)
            raise UserError(
                f"{self.source}: rope type {kind!r} is unknown; expected one of {known}"
            )
        needed, build = _SCALINGS[kind]
        if missing := [name for name in needed if keys.given(name) is None]:
            raise UserError(f"{self.source}: rope type {kind!r} needs {', '.join(missing)}")
        return build(keys, self.size("max_position_embeddings"), rotated)


# ---- scalings ------------------------------------------------------------------------------------
# As in Hugging Face, the context length replaces a missing original length.


def _original(keys: Keys, context: int) -> int:
    return keys.size("original_max_position_embeddings", context)


def _llama3(keys: Keys, context: int, rotated: int) -> Scaling:
    low, high = keys.number("low_freq_factor"), keys.number("high_freq_factor")
    return Llama3Scaling(keys.number("factor"), low, high, _original(keys, context))


def _yarn(keys: Keys, context: int, rotated: int) -> Scaling:
    factor = keys.number("factor")
    magnitude = _yarn_magnitude(factor)
    if keys.given("mscale") and keys.given("mscale_all_dim"):
        numerator = _yarn_magnitude(factor, keys.number("mscale"))
        magnitude = numerator / _yarn_magnitude(factor, keys.number("mscale_all_dim"))
    return YarnScaling(
        factor,
        _original(keys, context),
        keys.number("attention_factor", magnitude),
        keys.number("beta_fast", 32.0),
        keys.number("beta_slow", 1.0),
        keys.switch("truncate", True),
    )


def _yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(keys: Keys, context: int, rotated: int) -> Scaling:
    original = _original(keys, context)
    factor = keys.number("factor", context / original)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        keys.numbers("short_factor", rotated // 2),
        keys.numbers("long_factor", rotated // 2),
        original,
        keys.number("attention_factor", magnitude),
    )


_Build = Callable[[Keys, int, int], Scaling]
_SCALINGS: dict[Any, tuple[tuple[str, ...], _Build]] = {
    "default": ((), lambda keys, context, rotated: Unscaled()),
    "linear": (("factor",), lambda keys, context, rotated: LinearScaling(keys.number("factor"))),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), _llama3),
    "dynamic": (
        ("factor",),
        lambda keys, context, rotated: DynamicScaling(keys.number("factor"), context),
    ),
    "yarn": (("factor",), _yarn),
    "longrope": (("short_factor", "long_factor"), _longrope),
}
