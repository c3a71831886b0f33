"""What an adapter was trained over: its base, and how the base was loaded.

A run writes `qfsdp_base.json` beside the adapter, with the dtype and the quantization of the base
and the tokenizer's node, and copies the tokenizer. The name of the base is in PEFT's
`adapter_config.json`. Recipes that use an adapter take all of it from there: their `Config` is an
`OfAdapter`. Keys of a config file or of the command line win, and a line tells what differs.

A merged or fully finetuned model has the file too: it says that no weight is quantized.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qfsdp.checkpoint.adapter_config_file import CONFIG_FILE, read_peft_config
from qfsdp.checkpoint.saved_template import TOKENIZER_FILES, adapter_template
from qfsdp.common.errors import UserError
from qfsdp.common.files import json_object, to_json
from qfsdp.common.terminal import warn
from qfsdp.config.component import Component
from qfsdp.config.load import get_key, to_yaml
from qfsdp.data.tokenizer_folder import texts_in
from qfsdp.hub.download import hub_name, local_folder, small_folder, split_name
from qfsdp.modules.adapters.config import BASE_STARTS

BASE_FILE = "qfsdp_base.json"
DEMO_MODEL = "${oc.env:QFSDP_CACHE,${oc.env:HOME}/.cache/qfsdp}/SmolLM2-135M-Instruct"
OURS = "qfsdp.data.hf_tokenizer"
_QUANTIZATION = ("format", "targets", "compute")


def model_tokenizer() -> Component:
    """The default of a key `tokenizer`: the one in the model's folder."""
    return Component(OURS, {"path": "${model.path}"})


# ---- writing -------------------------------------------------------------------------------------


def adapter_texts(cfg: Any) -> dict[str, str]:
    """The files that a run writes beside its adapter: name -> text.

    Args:
        cfg: the config of a training recipe.
    """
    texts = adapter_template(cfg.tokenizer, cfg.dataset)
    settings = _settings_of(yaml.safe_load(to_yaml(cfg)))
    if cfg.tokenizer.path == OURS:
        folder = local_folder(cfg.tokenizer.kwargs["path"])
        texts |= texts_in(folder, TOKENIZER_FILES)
        if more := cfg.tokenizer.build().texts:
            texts |= more
            del settings["tokenizer"]["new_tokens"]
        if more or settings["tokenizer"]["path"] != "${model.path}":
            settings["tokenizer"]["path"] = "."  # the adapter's folder
    return texts | {BASE_FILE: to_json(settings, indent=2) + "\n"}


def _settings_of(run: dict[str, Any]) -> dict[str, Any]:
    """What `qfsdp_base.json` keeps of a run's config."""
    model, tokenizer = run["model"], run.get("tokenizer")
    quantization = run.get("quantization") or {}
    if run.get("adapter", {}).get("init") in BASE_STARTS:  # the written adapter is of W itself
        quantization = quantization | {"format": "none"}
    keys = ["dtype", *(["implementation"] if model.get("implementation") == "transformers" else [])]
    keys += ["mean_rows"] if model.get("mean_rows") else []
    found = {
        "model": {key: model[key] for key in keys},
        "quantization": {key: quantization[key] for key in _QUANTIZATION if key in quantization},
    }
    if isinstance(tokenizer, dict):
        if tokenizer.get("_component_") == OURS:  # the template is a file beside the adapter
            tokenizer = {key: tokenizer[key] for key in tokenizer if key != "chat_template"}
        if tokenizer.get("path") == model["path"]:
            tokenizer = tokenizer | {"path": "${model.path}"}
        found["tokenizer"] = tokenizer
    return found


def whole_model(dtype: str) -> dict[str, str]:
    """The file for a model whose weights a run has changed: name -> text. Recipes that would
    quantize the model without a key compute with its weights as they are then.

    Args:
        dtype: `model.dtype` of the run, or of the merge.
    """
    settings = {"model": {"dtype": dtype}, "quantization": {"format": "none"}}
    return {BASE_FILE: to_json(settings, indent=2) + "\n"}


# ---- reading -------------------------------------------------------------------------------------


class OfAdapter:
    """A recipe's `Config` with a key `adapter` or `adapters`: what no key gives of `model`,
    `quantization` and `tokenizer` comes from the adapter's folder, or without an adapter from the
    model's."""

    @classmethod
    def below(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Keys that are weaker than those of `tree`, and stronger than the defaults. Raises
        UserError: the adapter names no base, or a folder that is not there, and `tree` has no
        `model.path`."""
        adapter, model = next(_adapters(tree), None), get_key(tree, "model.path")
        of_adapter = None if adapter is None else base_of(adapter)
        found = {"model": {"path": DEMO_MODEL}} if of_adapter is None else of_adapter
        if adapter is None and isinstance(model, str):
            found = _settings_file(local_folder(model)) or found
        if of_adapter is not None and model is None:
            path, file = of_adapter.get("model", {}).get("path"), f"{adapter}/{CONFIG_FILE}"
            if path is None:
                told = f"model.path: none, and {file} names no base"
                raise UserError(f"{told}; expected model.path=MODEL")
            if split_name(path) is None and not Path(path).expanduser().exists():
                told = f"model.path: {path!r}, which {file} names, does not exist"
                raise UserError(f"{told}; expected model.path=MODEL, where the base is now")
        return {key: value for key, value in found.items() if key in cls.__annotations__}


def _adapters(tree: Any) -> Iterator[str]:
    """The adapters of a config's tree, or of a config, in the order of its keys."""
    one: Any = None
    several: Any = None
    if isinstance(tree, dict):
        with suppress(OmegaConfBaseException):
            config = OmegaConf.create(tree)
            one, several = OmegaConf.select(config, "adapter"), OmegaConf.select(config, "adapters")
    else:
        one, several = get_key(tree, "adapter"), get_key(tree, "adapters")
    entries = several.values() if hasattr(several, "values") else several or ()
    for entry in (one, *entries):  # of recipes/merge they are sections
        if isinstance(name := get_key(entry, "path") or entry, str):
            yield name


def base_of(adapter: str) -> dict[str, Any] | None:
    """Sections `model`, `quantization` and `tokenizer` as the run had them; what is not known is
    left out. None if the folder is no adapter.

    Args:
        adapter: a folder in PEFT's format, or a name on the hub.
    """
    folder = small_folder("adapter", adapter, "adapter")
    if not (written := json_object(folder / CONFIG_FILE)):
        return None  # `tell_another_base` says why
    base, revision = written.get("base_model_name_or_path"), written.get("revision")
    found = _settings(folder)
    if isinstance(base, str) and base:
        path = f"{base}@{revision}" if isinstance(revision, str) and hub_name(base) else base
        found["model"] = {"path": path} | found.get("model", {})
    return found


def _settings(folder: Path) -> dict[str, Any]:
    """The content of `qfsdp_base.json`, or the same of the run's config beside the adapter."""
    if found := _settings_file(folder):
        return found
    try:
        return _settings_of(yaml.safe_load((folder.parent / "config.yaml").read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return {}


def _settings_file(folder: Path) -> dict[str, Any]:
    """The content of `qfsdp_base.json`; nothing if there is none, or a broken one."""
    try:
        found = json.loads((folder / BASE_FILE).read_bytes())
        if "tokenizer" in found and found["tokenizer"].get("path") == ".":
            found["tokenizer"]["path"] = str(folder)
        return dict(found)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def tell_another_base(cfg: Any) -> None:
    """A line for every key whose value is not the one that an adapter was trained with.

    This is no error: some merge an adapter that was trained over 4-bit weights into the weights in
    full precision.

    Args:
        cfg: a config with a key `adapter` or `adapters`.

    Raises:
        UserError: an adapter's folder or its `adapter_config.json` is missing or broken.
    """
    for adapter in _adapters(cfg):
        folder = local_folder(adapter)
        read_peft_config(folder)
        for section, values in (base_of(adapter) or {}).items():
            for name, trained in values.items() if section in ("model", "quantization") else ():
                used = get_key(cfg, f"{section}.{name}")
                if used != trained and not (name == "path" and _same(used, trained)):
                    _tell(f"{section}.{name}: {used!r}", adapter, repr(trained))
        tokenizer = get_key(cfg, "tokenizer")
        if tokenizer is None or tokenizer.path != OURS:
            continue
        mine = local_folder(str(tokenizer.kwargs.get("path"))) / TOKENIZER_FILES[0]
        saved = folder / TOKENIZER_FILES[0]
        if saved.is_file() and mine.is_file() and saved.read_bytes() != mine.read_bytes():
            _tell(f"tokenizer.path: {tokenizer.kwargs['path']!r}", adapter, f"'{saved}'")


def _same(used: str, trained: str) -> bool:
    """Whether two paths are one model, or the one that was trained is not on this machine."""
    folder = local_folder(trained)
    if not folder.exists():
        return hub_name(trained) is None
    return folder.resolve() == local_folder(used).resolve()


def _tell(given: str, adapter: str, trained: str) -> None:
    warn(f"{given}, but {adapter} was trained with {trained}: the result is not what training ran")
