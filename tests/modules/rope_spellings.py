"""Every spelling of a rotary embedding in a `config.json`, and our logits beside transformers'.

    python -m tests.modules.rope_spellings [model type ...]

prints a line for every file that differs, and a table. A row of it is a kind of embedding and a
place where a file can say it. Its columns count the files whose logits are equal, that we refuse,
that differ, and for which transformers has no logits. `DETAILS` lists the files of a row: they say
the base, the rotated share, the original context and the like in different places. Logits are
compared within the original context and beyond it. Tests run a slice of it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.modules.random_configs import ALWAYS, LAYERS, OPTIONS, SHARES, compare

Config = dict[str, Any]
HEAD_DIM, CONTEXT, ORIGINAL = 16, 32, 16
LENGTHS = (12, 40)
KINDS: dict[str, Config] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "beta_fast": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"factor": 4.0},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}
OTHER = "other"  # in an object that disagrees: the same kind, with other values
BASE, SHARE, LENGTH = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"


def rope(kind: str, pairs: int, other: bool = False) -> Config:
    """The object of a kind; `other`: with other values."""
    values = KINDS[kind] | {"rope_type": kind}
    if kind == "longrope":
        values["short_factor"] = [1.0 + 0.1 * index for index in range(pairs)]
        values["long_factor"] = [1.5 + 0.5 * index for index in range(pairs)]
    if kind in ("yarn", "llama3", "longrope"):
        values[LENGTH] = ORIGINAL
    return values | ({BASE: 300.0, "factor": 8.0} if other else {})


def _as_type(values: Config) -> Config:
    return {"type": values["rope_type"]} | {k: v for k, v in values.items() if k != "rope_type"}


def _nested(full: Config, sliding: Config) -> Config:
    return {"full_attention": dict(full), "sliding_attention": dict(sliding)}


# What a file says: of the object of a kind, and of another that disagrees with it.
PLACES: dict[str, Callable[[Config, Config], Config]] = {
    "rope_scaling": lambda one, other: {"rope_scaling": one},
    "rope_scaling, type": lambda one, other: {"rope_scaling": _as_type(one)},
    "rope_scaling, both types": lambda one, other: {"rope_scaling": one | {"type": "linear"}},
    "rope_parameters": lambda one, other: {"rope_parameters": one},
    "rope_parameters, type": lambda one, other: {"rope_parameters": _as_type(one)},
    "both, equal": lambda one, other: {"rope_scaling": dict(one), "rope_parameters": one},
    "both, unlike": lambda one, other: {"rope_scaling": one, "rope_parameters": other},
    "both, new default": lambda one, other: {
        **{"rope_scaling": one, "rope_parameters": {"rope_type": "default", BASE: 300.0}}
    },
    "both, old null": lambda one, other: {"rope_scaling": None, "rope_parameters": one},
    "both, old empty": lambda one, other: {"rope_scaling": {}, "rope_parameters": one},
    "nested": lambda one, other: {"rope_parameters": _nested(one, other)},
    "nested, type": lambda one, other: {"rope_parameters": _nested(_as_type(one), _as_type(other))},
    "nested, full only": lambda one, other: {"rope_parameters": {"full_attention": one}},
    "nested, sliding only": lambda one, other: {"rope_parameters": {"sliding_attention": one}},
    "nested, a null": lambda one, other: {
        "rope_parameters": {"full_attention": one, "sliding_attention": None}
    },
    "nested beside old": lambda one, other: {
        **{"rope_scaling": one, "rope_parameters": _nested(other, one)}
    },
    "nested in rope_scaling": lambda one, other: {"rope_scaling": _nested(one, other)},
}
# Changes of (the object, what stands outside of it).
DETAILS: dict[str, tuple[Config, Config]] = {
    "plain": ({}, {}),
    "base in the object": ({BASE: 50.0}, {}),
    "base outside": ({}, {BASE: 50.0}),
    "base in both": ({BASE: 50.0}, {BASE: 700.0}),
    "base null": ({BASE: None}, {}),
    "base null outside": ({}, {BASE: None}),
    "share in the object": ({SHARE: 0.5}, {}),
    "share outside": ({}, {SHARE: 0.5}),
    "share in both": ({SHARE: 0.5}, {SHARE: 0.25}),
    "share of 1 in both": ({SHARE: 1.0}, {SHARE: 1.0}),
    "share null": ({SHARE: None}, {}),
    "share null outside": ({}, {SHARE: None}),
    "length in the object alone": ({LENGTH: 8}, {}),
    "length outside alone": ({LENGTH: OTHER}, {LENGTH: 8}),
    "length in both": ({LENGTH: 16}, {LENGTH: 8}),
    "length nowhere": ({LENGTH: OTHER}, {}),
    "length null": ({LENGTH: None}, {}),
    "length null outside": ({}, {LENGTH: None}),
    "truncate false": ({"truncate": False}, {}),
    "truncate null": ({"truncate": None}, {}),
    "truncate outside": ({}, {"truncate": False}),
    "factor null": ({"factor": None}, {}),
    "factor missing": ({"factor": OTHER}, {}),
    "factor an integer": ({"factor": 4}, {}),
    "attention_factor": ({"attention_factor": 0.7}, {}),
    "attention_factor null": ({"attention_factor": None}, {}),
    "mscale": ({"mscale": 0.7, "mscale_all_dim": 0.4}, {}),
    "mscale of 0": ({"mscale": 1.0, "mscale_all_dim": 0}, {}),
    "beta null": ({"beta_fast": None, "beta_slow": None}, {}),
    "kind null": ({"rope_type": None}, {}),
    "kind missing": ({"rope_type": OTHER}, {}),
    "unknown key": ({"finetuned": True}, {"rope_interleaved": False}),
}


def spelled(model_type: str, kind: str, place: str, detail: str) -> Config:
    """The content of a `config.json`. A detail's value `OTHER` removes a key."""
    inside, outside = DETAILS[detail]
    config: Config = {
        "vocab_size": 67,
        "hidden_size": 64,
        "intermediate_size": 52,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": 0,
        **ALWAYS.get(model_type, {}),
    }
    if "sliding_window" in OPTIONS[model_type]:
        config["sliding_window"] = 11
    share = inside.get(SHARE, outside.get(SHARE)) or (0.5 if model_type in SHARES[1:] else 1.0)
    pairs = int(HEAD_DIM * share) // 2 if model_type in SHARES else HEAD_DIM // 2
    one, other = rope(kind, pairs) | inside, rope(kind, pairs, other=True) | inside
    one, other = ({k: v for k, v in x.items() if v != OTHER} for x in (one, other))
    if "type" in place and "rope_type" not in one:
        place = place.split(",")[0]
    return {
        **config,
        **PLACES[place](one, other),
        **outside,
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
    }


def files(model_types: list[str]) -> Iterator[tuple[str, str, str, str]]:
    for model_type in model_types:
        for kind in KINDS:
            for place in PLACES:
                for detail in DETAILS:
                    yield model_type, kind, place, detail


def main(model_types: list[str]) -> None:
    logging.disable(logging.WARNING)
    started, table = time.monotonic(), defaultdict[tuple[str, str], Counter[str]](Counter)
    lines, worst = Counter[str](), 0.0
    for model_type, kind, place, detail in files(model_types or list(OPTIONS)):
        name = f"{model_type}; {kind}; {place}; {detail}"
        try:
            outcome, what = compare(model_type, spelled(model_type, kind, place, detail), LENGTHS)
        except Exception as error:
            outcome, what = "differs", repr(error)
        table[kind, place][outcome] += 1
        if outcome == "equal":
            worst = max(worst, what)
        if outcome == "differs":
            print(f"{name}: {what}", flush=True)
        elif outcome != "equal":
            lines[f"{outcome}: {what[:150]}"] += 1
    columns = ("equal", "refused", "differs", "no oracle")
    print(f"| kind | place | {' | '.join(columns)} |\n|---|---|{'--:|' * len(columns)}")
    for (kind, place), counts in table.items():
        print(f"| {kind} | {place} | {' | '.join(str(counts[name]) for name in columns)} |")
    for text, times in lines.most_common(25):
        print(f"{times:5d} {text}")
    total = sum(table.values(), Counter[str]())
    print(f"{total}; largest difference {worst:.1e}; {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
