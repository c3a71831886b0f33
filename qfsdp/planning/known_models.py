"""Shapes of known models, so that an estimate needs no download."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from qfsdp.checkpoint.weights.expand import blocks_of_rate, expanded_config
from qfsdp.common.errors import UserError
from qfsdp.hub.download import find_model_file, local_folder
from qfsdp.modules.hub_models.config import AnyConfig, Implementation, model_config_of

# Name -> the fields of config.json that give the shape.
_FILE = Path(__file__).with_suffix(".json")
# Words in a model's name that do not change its shape.
_VARIANTS = {"meta", "instruct", "chat", "it", "hf", "base", "bnb", "4bit", "nf4", "hqq"}


def find_config(path: str) -> dict[str, Any]:
    """The parsed `config.json` of a model folder or of a known model.

    A known model is found by the last part of `path`, in any variant:
    "models/Meta-Llama-3-70B-Instruct", "Qwen/Qwen2.5-7B". With "-pro" or "-pro-RATE" at the end, as
    in the shipped configs, it is what recipes/block_expansion makes of it at that rate (0.25). Of
    other names on the hub, only the small files are downloaded. Raises UserError: `config.json`
    cannot be read; or `path` is neither a folder nor a known model."""
    file = local_folder(path) / "config.json"
    if file.is_file():
        try:
            config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{file}: cannot be read: {error}; expected JSON") from None
        return config
    known: dict[str, dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
    name = _known_name(Path(path).name, known)
    if name is None:
        if (on_hub := _on_hub(path)) is not None:
            return on_hub
        raise UserError(
            f"model.path: '{path}' is not a model folder; expected a folder with config.json, or "
            f"a known model: {', '.join(known)}"
        )
    if (pro := re.search(r"-pro(?:-([\d.]+))?$", path)) is None:
        return known[name]
    blocks = blocks_of_rate(known[name]["num_hidden_layers"], float(pro[1] or 0.25))
    return expanded_config(known[name], blocks)


def planned_config(model: Any) -> AnyConfig:
    """What a section `model` builds; raises UserError as `find_config` and `model_config`."""
    content = json.dumps(find_config(model.path))
    return _parsed(content, f"{model.path}/config.json", model.implementation)


@lru_cache(maxsize=4)
def _parsed(content: str, source: str, implementation: Implementation) -> AnyConfig:
    """One object for each model, as those of transformers keep the module that they built."""
    return model_config_of(json.loads(content), source, implementation)


def stored_formats(config: dict[str, Any]) -> dict[str, str]:
    """Parameter name -> format, for the weights that a model's files hold quantized as its
    `config.json` says: the experts of gpt-oss."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    layers = range(config["num_hidden_layers"] if method == "mxfp4" else 0)
    stacks = [f"mlp.experts.{name}.weight" for name in ("gate_up_proj", "down_proj")]
    return {f"model.layers.{layer}.{stack}": "mxfp4" for layer in layers for stack in stacks}


def _on_hub(path: str) -> dict[str, Any] | None:
    """The `config.json` of a name on the hub; None if the hub does not know it."""
    try:
        file = find_model_file(path, "config.json")
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None
    except (OSError, ValueError, UserError):
        return None


def _known_name(name: str, known: dict[str, dict[str, Any]]) -> str | None:
    """The longest known name that `name` begins with, else the first that begins with `name`."""
    words = _words(name)
    found = [c for c in known if words[: len(_words(c))] == _words(c)]
    if not found and len(words) > 1:
        return next((c for c in known if _words(c)[: len(words)] == words), None)
    return max(found, key=len, default=None)


def _words(name: str) -> list[str]:
    name = re.sub(r"^llama(?=\d)", "llama-", name.lower().removeprefix("meta-"))
    return [word for word in name.split("-") if word not in _VARIANTS]
