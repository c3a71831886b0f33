"""`adapter_config.json`: the settings of an adapter in PEFT's format.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. PEFT has options that
qfsdp/modules/adapters/linears.py does not; those that would change the results are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from qfsdp.checkpoint.expert_adapter_files import target_settings
from qfsdp.common.errors import UserError
from qfsdp.common.files import why
from qfsdp.hub.download import hub_name
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import SCALED_INPUTS
from qfsdp.modules.adapters.places import ends_with
from qfsdp.modules.adapters.trained_rows import DELTA, FIELD, are_ids, by_module
from qfsdp.modules.adapters.whole import KEY, WHOLE

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
HEAD_KEY = "base_model.model.score.weight"  # of `qfsdp.modules.score_head`
PEFT_HEADS = {"score", "classifier"}  # what PEFT names in every adapter of task type SEQ_CLS
LARGEST_ALPHA = 1e30  # it is used in fp32
# `peft_type` -> end of the key that every adapted linear has exactly once.
KEY_ENDS = {"LORA": ".lora_A.weight", "IA3": ".ia3_l", "MISS": ".miss_block"}
KEY_ENDS["OFT"] = ".oft_R.weight"
# Settings that a run must share with the adapter that it starts from: our field -> PEFT's key.
SHARED_FIELDS = {"method": "use_dora", "rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora"}
# PEFT's keys with any value: names, training options, and the adapted linears, which the tensors
# show. Any other key that turns something on is refused.
IGNORED_KEYS = {
    *("auto_mapping", "inference_mode", "runtime_config", "velora_config"),
    *("target_modules", "target_parameters", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "fan_in_fan_out"),
    *("feedforward_modules", "init_ia3_weights", "use_cayley_neumann", "modules_to_save"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # see UNCHANGED_BASE_INIT
}
EXPECTED_OFT = {"use_cayley_neumann": True, "num_cayley_neumann_terms": 5}
# A name in layers that stand deeper than "model.layers".
_IN_DEEP_LAYER = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*){2,})\.\d+\.")
# Initializations that leave the base unchanged. PiSSA, LoftQ and others change it.
UNCHANGED_BASE_INIT = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


def peft_config(
    config: AdapterConfig, linears: list[str], base: str, tensors: Mapping[str, Tensor]
) -> dict[str, object]:
    """The content of `adapter_config.json`.

    Args:
        linears: names of the adapted linears, without experts; whole names if `config.selects`.
        base: a folder or a hub name.
        tensors: the adapters, by our keys.
    """
    repository, revision = hub_name(base) or (base, None)
    has_head = HEAD_KEY in tensors
    settings: dict[str, object] = {
        "task_type": "SEQ_CLS" if has_head else "CAUSAL_LM",
        "base_model_name_or_path": repository,
        "revision": revision,
        "target_modules": linears,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": ["score"] if has_head else config.modules_to_save,
        **excluded_modules(tensors),
    }
    if config.method == "ia3":
        scaled = [name for name in linears if name.rpartition(".")[2] in SCALED_INPUTS]
        more = {"peft_type": "IA3", "feedforward_modules": scaled, "init_ia3_weights": True}
        return more | settings
    if config.method == "miss":
        more = {"peft_type": "MISS", "r": config.rank, "miss_dropout": config.dropout}
        return more | {"init_weights": True, "mini_r": 1, "bias": "none"} | settings
    if config.method == "oft":
        more = {"peft_type": "OFT", "oft_block_size": config.block_size, "r": 0, "bias": "none"}
        # PEFT warns of older versions, which had another series.
        more |= {**EXPECTED_OFT, "init_weights": True, "peft_version": "0.18.0"}
        return more | settings
    return {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_dora": config.method == "dora",
        "use_rslora": config.rslora,
        "bias": "none",
        "init_lora_weights": True,
        FIELD: config.trainable_token_indices,
    } | (settings | target_settings(config, linears, tensors))


def excluded_modules(keys: Iterable[str]) -> dict[str, str]:
    """PEFT's `exclude_modules` for an adapter of the text model in a larger one: a pattern of all
    names but those of its layers, since a vision model may have linears of the same last names.

    Empty if layers stand right below the body ("model.layers").

    Args:
        keys: of the adapters' tensors.
    """
    names = [key.removeprefix("base_model.model.") for key in keys]
    deep = {match[1] for name in names if (match := _IN_DEEP_LAYER.match(name))}
    if len(deep) != 1:
        return {}
    return {"exclude_modules": rf"(?!{re.escape(deep.pop())}\.\d|lm_head$).*"}


def read_peft_config(folder: Path) -> dict[str, Any]:
    """The content of `adapter_config.json`, checked: `config_of` can read it. Raises UserError: the
    file is missing or broken, or has an option that qfsdp lacks."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise UserError(missing_files(folder))
    try:
        written = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: not an adapter's config ({why(error)}); expected JSON") from None
    if not isinstance(written, dict):
        raise UserError(f"{file}: {written!r:.50} is no JSON object; expected an adapter's config")
    kind = written.get("peft_type")
    if not isinstance(kind, str) or kind not in KEY_ENDS:
        raise UserError(f"{file}: peft_type {kind!r}; expected {', '.join(KEY_ENDS)}")
    for key, value in written.items():
        if (reason := _unsupported(key, value, written)) is not None:
            raise UserError(f"{file}: {key} {value!r}: {reason}")
    if kind in ("LORA", "MISS"):
        _check_types(file, written)
    if kind == "OFT":
        _check_oft(file, written)
    return written


def config_of(written: Mapping[str, Any], modules: Iterable[str] | None = None) -> AdapterConfig:
    """The section `adapter` of a checked config, without `targets`.

    Args:
        modules: names of the adapted linears; patterns that match none are left out.
    """
    if written["peft_type"] == "IA3":
        return AdapterConfig("ia3")
    if written["peft_type"] == "MISS":
        return AdapterConfig("miss", rank=written["r"])
    if written["peft_type"] == "OFT":
        return AdapterConfig("oft", block_size=written["oft_block_size"])

    def numbers(key: str, type: Callable[[Any], Any]) -> dict[str, Any] | None:
        given = (written.get(key) or {}).items()
        used = (e for e in given if modules is None or any(ends_with(e[0], m) for m in modules))
        return {end: type(number) for end, number in used} or None

    return AdapterConfig(
        method="dora" if written.get("use_dora") else "lora",
        rank=int(written["r"]),
        alpha=float(written["lora_alpha"]),
        rank_pattern=numbers("rank_pattern", int),
        alpha_pattern=numbers("alpha_pattern", float),
        rslora=bool(written.get("use_rslora")),
    )


def _check_types(file: Path, written: dict[str, Any]) -> None:
    rank: Any = written.get("r")
    alpha: Any = written.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise _wrong(file, written, "r", "an integer of at least 1")
    if written["peft_type"] == "MISS":
        return
    if not (type(alpha) in (int, float) and 0 < alpha < LARGEST_ALPHA):
        raise _wrong(file, written, "lora_alpha", "a number above 0")
    for key in ("use_dora", "use_rslora"):
        if written.get(key) not in (None, True, False):
            raise _wrong(file, written, key, "true or false")


def _wrong(file: Path, written: dict[str, Any], key: str, expected: str) -> UserError:
    return UserError(f"{file}: {key} {written.get(key)!r:.50}; expected {expected}")


def _check_oft(file: Path, written: dict[str, Any]) -> None:
    """Checks that an adapter is OFT of the form that `qfsdp.modules.adapters.oft` has."""
    for key, expected in EXPECTED_OFT.items():
        if written.get(key) != expected:
            raise _wrong(file, written, key, repr(expected))
    size = written.get("oft_block_size")
    if type(size) is not int or size < 2:
        raise _wrong(file, written, "oft_block_size", "an integer of at least 2")


def _unsupported(key: str, value: Any, written: dict[str, Any]) -> str | None:
    """Why an adapter with this setting cannot be loaded; None if it can."""
    if key == "bias":
        return None if value == "none" else "qfsdp trains no biases"
    if key == "init_lora_weights":
        kept = value in UNCHANGED_BASE_INIT
        return None if kept else "this initialization changed the base that the adapter belongs to"
    if key == "ensure_weight_tying" and (written.get("modules_to_save") or written.get(FIELD)):
        return None
    if key == "init_weights":
        return None if isinstance(value, bool) else "qfsdp has the default form alone"
    if key in ("rank_pattern", "alpha_pattern"):
        return None if not value or _is_pattern(key, value) else "expected a number for each name"
    # Switches, lists and sections turn options on; numbers and names are their parameters.
    turned_on = value is True or (bool(value) and isinstance(value, list | dict))
    known = {*IGNORED_KEYS, *SHARED_FIELDS.values(), FIELD}
    return "qfsdp does not have this option" if turned_on and key not in known else None


def _is_pattern(key: str, value: Any) -> bool:
    """Whether a value is of the form of `adapter.rank_pattern` or `adapter.alpha_pattern`."""
    types = (int,) if key == "rank_pattern" else (int, float)
    if not isinstance(value, dict) or not all(type(v) in types for v in value.values()):
        return False
    with suppress(re.error):
        return all(re.compile(name) and 0 < v < LARGEST_ALPHA for name, v in value.items())
    return False


def whole_names(file: Path, written: Mapping[str, Any], keys: Iterable[str]) -> list[str] | None:
    """`adapter.modules_to_save` of an adapter with these keys. Raises UserError: it has others than
    `WHOLE`, or lacks the weight of one."""
    names, given = written.get("modules_to_save") or [], set(keys)
    last = {str(name).rpartition(".")[2] for name in names} - PEFT_HEADS
    found = [name for name in WHOLE if f"{KEY}{WHOLE[name]}.weight" in given]
    if not last <= WHOLE.keys():
        expected = f"expected some of {', '.join(WHOLE)}"
        raise UserError(f"{file}: modules_to_save {names!r:.80}; {expected}")
    if missing := sorted(last - {*found}):
        place = WHOLE[missing[0]]
        raise UserError(f"{file}: modules_to_save {names}, but {place!r} is not in the folder")
    return found if last else None


def row_ids(
    file: Path, written: Mapping[str, Any], keys: Iterable[str]
) -> list[int] | dict[str, list[int]] | None:
    """`adapter.trainable_token_indices` of an adapter with these keys, in its shortest form. Raises
    UserError: they are no ids of tokens, or of other modules than `WHOLE`."""
    if not (given := written.get(FIELD)):
        return None
    named = by_module(given)
    of = {str(name).rpartition(".")[2]: ids for name, ids in named.items()}
    if not of.keys() <= WHOLE.keys() or not all(map(are_ids, of.values())):
        expected = f"expected different ids of tokens, of {' or '.join(WHOLE)}"
        raise UserError(f"{file}: {FIELD} {given!r:.80}; {expected}")
    tied = f"{KEY}{WHOLE['lm_head']}.{DELTA}" not in set(keys)
    if tied and of.get("lm_head") == of.get("embed_tokens"):
        del of["lm_head"]
    return of["embed_tokens"] if [*of] == ["embed_tokens"] else of


def why_unread(key: str) -> str:
    """Why a tensor of an adapter's file is no adapter of the model: the end of a message."""
    if ".lora_embedding_" in key:
        return "adapts embeddings, which qfsdp does not; expected target_modules without them"
    if key == HEAD_KEY:
        return "is the head of a reward model or classifier; expected recipes/score"
    if key.endswith((".embed_tokens.weight", ".lm_head.weight")):
        return (
            "is a whole layer, as PEFT writes with save_embedding_layers; expected adapters alone"
        )
    return "is not among this model's adapters"


def why_missing(key: str) -> str:
    """What to do where an adapter's file lacks a tensor of the model: the end of a message."""
    if key != HEAD_KEY:
        return "is missing"
    return "is missing; expected a reward model's; recipes/merge makes a base of another adapter"


def missing_files(folder: Path) -> str:
    """The message for a folder that is not a whole adapter."""
    expected = f"expected an adapter in PEFT's format, {CONFIG_FILE} and {WEIGHTS_FILE}"
    if (folder / PICKLE_FILE).is_file() and not (folder / WEIGHTS_FILE).is_file():
        return f"{folder / PICKLE_FILE}: a pickle file, which can run code; {expected}"
    if (folder / "adapter" / CONFIG_FILE).is_file():
        return f"{folder}: not an adapter's folder; did you mean {folder / 'adapter'}?"
    if not folder.exists():
        return f"{folder} does not exist; {expected}"
    file = next(f for f in (folder / CONFIG_FILE, folder / WEIGHTS_FILE) if not f.is_file())
    return f"{file} {'is no file' if file.exists() else 'does not exist'}; {expected}"
