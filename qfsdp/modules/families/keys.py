"""Reads and checks the keys of a `config.json` that several families have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from qfsdp.modules.decoder_parts import (
    DecoderParts,
    ExpertsConfig,
    LayerConfig,
    NormConfig,
    RouterConfig,
)
from qfsdp.modules.families.rope_keys import FULL, SLIDING, one_rope, two_ropes
from qfsdp.modules.families.values import Values
from qfsdp.modules.rope import RopeConfig

# Of one value: published files have one, transformers 5 writes another.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


class Keys(Values):
    """The keys of a whole `config.json`."""

    def __init__(self, values: dict[str, Any], source: str, **defaults: Any) -> None:
        super().__init__(values, source, **{"rope_theta": RopeConfig.theta} | defaults)

    # ---- what every decoder has ----------------------------------------------------------------

    def sizes(self, intermediate: str) -> dict[str, Any]:
        """The fields of `DecoderParts` that are plain numbers, and whether embeddings are tied;
        `intermediate` names the key of the feed-forward's size."""
        heads, head_dim = self.size("num_attention_heads"), self.head_dim()
        kv_heads = self.size("num_key_value_heads", heads)
        if heads % kv_heads:
            expected = f"a divisor of num_attention_heads ({heads})"
            raise self.error("num_key_value_heads", kv_heads, expected)
        return {
            "vocab_size": self.size("vocab_size"),
            "hidden_size": self.size("hidden_size"),
            "intermediate_size": self.size(intermediate),
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
        count = self.first_of(EXPERT_COUNTS, EXPERT_COUNTS[0])
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

    def same_layers(self, window: int | None = None, **rope: Any) -> tuple[LayerConfig, ...]:
        """All layers alike; `rope`: see `one_rope`."""
        layer = LayerConfig(window, self.rope(**rope))
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

    def rope(self, **how: Any) -> RopeConfig:
        """The rotary embedding of all layers; `how`: see `one_rope`."""
        return one_rope(self, self.head_dim(), **how)

    def sliding_and_full(self, sliding_theta: float, every: int) -> tuple[LayerConfig, ...]:
        """Layers with a sliding window, and every `every`-th without, each kind with its own rotary
        embedding; `sliding_theta`: see `two_ropes`."""
        sliding, full = two_ropes(self, self.head_dim(), sliding_theta)
        windows = self.windows(lambda index: (index + 1) % every != 0)
        return tuple(LayerConfig(window, sliding if window else full) for window in windows)


Read = Callable[[dict[str, Any], str], DecoderParts]
FAMILIES: dict[str, Read] = {}  # architecture in `config.json` -> what reads it


def family(
    architecture: str,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    intermediate: str = "intermediate_size",
    **defaults: Any,
) -> Callable[[Callable[[Keys], dict[str, Any]]], Callable[[Keys], dict[str, Any]]]:
    """Registers a family: a function that returns the fields of `DecoderParts` in which it differs
    from a decoder with `Keys.sizes`, layers that are all alike, and `Keys.norm`.

    Args:
        architecture: its name in `config.json`.
        activation: key and value; another value is refused.
        intermediate: see `Keys.sizes`.
        defaults: Hugging Face's values for keys that a file leaves out.
    """

    def register(parts: Callable[[Keys], dict[str, Any]]) -> Callable[[Keys], dict[str, Any]]:
        def read(config: dict[str, Any], source: str) -> DecoderParts:
            keys = Keys(config, source, **defaults)
            keys.only(*activation)
            fields = keys.sizes(intermediate) | parts(keys)
            for name, usual in (("layers", keys.same_layers), ("norm", keys.norm)):
                fields[name] = fields[name] if name in fields else usual()
            return DecoderParts(**fields)

        FAMILIES[architecture] = read
        return parts

    return register
