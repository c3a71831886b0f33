"""Rotary embeddings of a `config.json`, read as transformers 5 reads them.

Published files have `rope_scaling`, `rope_theta` and `partial_rotary_factor`. transformers 5 writes
`rope_parameters`, an object with all of them, or one such object for each kind of layer. A file may
have both. Then `rope_scaling` replaces the object of all layers, and its keys those of the layers
with full attention. What transformers cannot compute, or reads in another way than its version 4
did, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.modules.families.values import Values
from qfsdp.modules.rope import RopeConfig, Scaling
from qfsdp.modules.rope_scalings import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
)

FULL, SLIDING = "full_attention", "sliding_attention"
OLD, NEW = "rope_scaling", "rope_parameters"
ORIGINAL = "original_max_position_embeddings"


def rope_object(keys: Values, absent: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object that describes the embedding of all layers.

    Args:
        keys: of the file.
        absent: the family's object for files without one.

    Raises:
        UserError: there is one for each kind of layer.
    """
    rope = keys.object(OLD) or keys.object(NEW)
    if not rope and keys.given(NEW) is None:
        rope = absent or {}
    if kind := next((kind for kind in (FULL, SLIDING) if kind in rope), None):
        raise UserError(
            f"{keys.source}: {NEW} has {kind!r}; expected the keys of one rotary embedding: this "
            "family has one for all layers"
        )
    outside, name = keys.given(ORIGINAL), rope.get("rope_type") or rope.get("type")
    if outside is None or name in (None, "default", "linear", "dynamic"):
        return rope
    return rope | {ORIGINAL: outside}  # the value outside of the object counts


def one_rope(
    keys: Values,
    head_dim: int,
    rope: dict[str, Any] | None = None,
    shares: bool = False,
    **changes: Any,
) -> RopeConfig:
    """The rotary embedding of all layers.

    Args:
        keys: of the file.
        rope: the object that describes it; None: `rope_object`.
        shares: a part of a head may be rotated (`partial_rotary_factor`).
        changes: further fields of the result.
    """
    rope = rope_object(keys) if rope is None else rope
    outer = {name: keys.given(name) for name in ("rope_theta", "partial_rotary_factor")}
    return _rope(keys, head_dim, outer | rope, shares, **changes)


def two_ropes(keys: Values, head_dim: int, sliding_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embeddings of layers with a sliding window and of those without.

    Args:
        keys: of the file.
        sliding_theta: the base of the former where their object has none.
    """
    both, old = keys.object(NEW), keys.object(OLD)
    if both and not both.keys() & {FULL, SLIDING}:
        raise UserError(
            f"{keys.source}: {NEW} has {', '.join(both)}; expected an object for each of {FULL} "
            f"and {SLIDING}"
        )
    if "type" in old and "rope_type" not in old:
        raise UserError(
            f"{keys.source}: {OLD} has 'type', which transformers ignores in this family; expected "
            "'rope_type'"
        )
    objects = Values(both, keys.source)
    outer = {"partial_rotary_factor": keys.given("partial_rotary_factor")}
    truncate = {"truncate": both.get("truncate", True)}  # that of a kind of layer is not read
    full = {"rope_theta": keys.given("rope_theta")} | objects.object(FULL) | old
    sliding = {"rope_theta": sliding_theta} | objects.object(SLIDING)
    return (
        _rope(keys, head_dim, outer | sliding | truncate, False),
        _rope(keys, head_dim, outer | full | truncate, False),
    )


def _rope(
    keys: Values, head_dim: int, values: dict[str, Any], shares: bool, **changes: Any
) -> RopeConfig:
    rope = Values(values, keys.source)
    theta = rope.number("rope_theta")
    if theta <= 1:
        raise keys.error("rope_theta", theta, "a number above 1")
    kind = rope.given("rope_type") or rope.given("type") or "default"
    share = rope.number("partial_rotary_factor", 1.0)
    if not shares:
        if share != 1 and kind != "default":  # with "default" transformers ignores it
            raise keys.error("partial_rotary_factor", share, "1: this family rotates whole heads")
        share = 1.0
    rotated = int(head_dim * share)
    if share > 1 or rotated % 2 or not rotated:
        expected = f"an even number of the {head_dim} of a head"
        raise keys.error("partial_rotary_factor", share, expected)
    scaling = _scaling(rope, values, kind, keys.size("max_position_embeddings"), rotated)
    return RopeConfig(theta, scaling, 1.0 if rotated == head_dim else share, **changes)


def _scaling(
    rope: Values, values: dict[str, Any], kind: Any, context: int, rotated: int
) -> Scaling:
    if not isinstance(kind, str) or kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise UserError(f"{rope.source}: rope type {kind!r} is unknown; expected one of {known}")
    needed, build = _SCALINGS[kind]
    if missing := [name for name in needed if name not in values]:
        raise UserError(f"{rope.source}: rope type {kind!r} needs {', '.join(missing)}")
    return build(rope, context, rotated)


# ---- scalings ------------------------------------------------------------------------------------
# The context length replaces a missing original length.


def _original(rope: Values, context: int) -> int:
    return rope.size(ORIGINAL, context)


def _dynamic(rope: Values, context: int, rotated: int) -> Scaling:
    if rotated < 4:
        raise rope.error("rope_type", "dynamic", "another for heads that rotate two numbers")
    return DynamicScaling(rope.number("factor"), context)


def _llama3(rope: Values, context: int, rotated: int) -> Scaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", high, f"more than low_freq_factor ({low})")
    return Llama3Scaling(rope.number("factor"), low, high, _original(rope, context))


def _yarn(rope: Values, context: int, rotated: int) -> Scaling:
    original = _original(rope, context)
    factor = rope.number("factor", context / original)  # where the file says null
    magnitude = _yarn_magnitude(factor)
    if rope.given("mscale") and rope.given("mscale_all_dim"):
        numerator = _yarn_magnitude(factor, rope.number("mscale"))
        magnitude = numerator / _yarn_magnitude(factor, rope.number("mscale_all_dim"))
    return YarnScaling(
        factor,
        original,
        rope.number("attention_factor", magnitude),
        rope.number("beta_fast", 32.0),
        rope.number("beta_slow", 1.0),
        rope.switch("truncate", True),
    )


def _yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(rope: Values, context: int, rotated: int) -> Scaling:
    original = _original(rope, context)
    if original < 2:
        raise rope.error(ORIGINAL, original, "at least 2")
    factor = rope.number("factor", context / original)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        rope.numbers("short_factor", rotated // 2),
        rope.numbers("long_factor", rotated // 2),
        original,
        rope.number("attention_factor", magnitude),
    )


_Build = Callable[[Values, int, int], Scaling]
_SCALINGS: dict[str, tuple[tuple[str, ...], _Build]] = {
    "default": ((), lambda rope, context, rotated: Scaling()),
    "linear": (("factor",), lambda rope, context, rotated: LinearScaling(rope.number("factor"))),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), _llama3),
    "dynamic": (("factor",), _dynamic),
    "yarn": (("factor",), _yarn),
    "longrope": (("short_factor", "long_factor"), _longrope),
}
