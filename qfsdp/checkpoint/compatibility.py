"""Settings that a resumed run must share with the run of its checkpoint.

A run resumes bit for bit only with the same base weights, trained parameters, training settings,
and samples in the same order. Paths may differ: models, tokenizers and data files are compared by
content. The number of ranks, the micro-batches and the length of the run may differ as well.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from qfsdp.checkpoint.adapter_config_file import WEIGHTS_FILE
from qfsdp.checkpoint.key_classes import ABSENT, NOT_RECORDED, class_of, names_a_file
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.common.errors import UserError
from qfsdp.common.file_digests import file_digest
from qfsdp.common.files import to_json
from qfsdp.common.messages import flat
from qfsdp.common.printable import SECRET, masked
from qfsdp.common.sealed import Damaged, read_sealed, sealed_json
from qfsdp.config.component import Component, further_keys, passed_by_name
from qfsdp.config.load import kept_places, resolved_yaml
from qfsdp.data import StepLoader, StreamLoader
from qfsdp.data.files.rows import content_digest
from qfsdp.data.loader import MapDataset
from qfsdp.data.row_tokenizer import TokenizedDataset
from qfsdp.distributed.exchange import World
from qfsdp.hub.download import SMALL_FILES, hub_name, local_folder
from qfsdp.modules.decoder_config import read_config

CONTENT = "content "
HIDDEN = "sha256 "  # begins a digest of a value that a config reads from the environment
SAMPLES_OF_A_STEP = "batch_size * gradient_accumulation_steps * ranks"
SETTINGS_FILE = "facts.json"
SAMPLE_BYTES = 4096
SAMPLED_ROWS = 8
WEIGHT_FILES = (".safetensors", ".bin", ".pth", ".pt", ".gguf")
MODEL, CONFIG = "model (its weights)", "model (its config.json)"  # the latter since 0.3
NOT_COMPUTED = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
NOT_COMPUTED |= {"auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"}
"""Keys of `config.json` that change no number of a run."""
WHOLE = " (all bytes)"
"""The end of keys with a digest of everything. The key without it has a hash of samples, by which
checkpoints of earlier versions are compared; a key of one side only is not compared."""


def config_settings(cfg: Any) -> dict[str, Any]:
    """Key -> value of the settings in a config whose class is not "free" (`key_classes`).

    Reads all bytes of the base, of data files and of the tokenizer, if they are not known from an
    earlier start (`qfsdp.common.file_digests`).

    Args:
        cfg: a recipe's config; `model.folder` is a Hugging Face model folder.
    """
    keys = flat(masked(OmegaConf.to_container(OmegaConf.create(resolved_yaml(cfg)), resolve=True)))
    settings = {k: v for k, v in keys.items() if class_of(k) != "free" and v != SECRET}
    for key in [key for key in settings if names_a_file(key, keys)]:
        settings |= _content(key, settings[key])
    from_environment = {".".join(place) for place in kept_places(cfg)}
    for key in settings:
        if any(f"{place}.".startswith(f"{key}.") for place in from_environment):
            settings[key] = _hidden(settings[key])
    if getattr(cfg, "reference", None) == "start" and cfg.adapter.start_from is not None:
        weights = local_folder(cfg.adapter.start_from) / WEIGHTS_FILE  # the reference; read again
        settings["adapter.start_from (its weights)"] = file_digest(weights)[:16]
    models = {"": cfg.model}
    if (teacher := getattr(cfg, "teacher", None)) is not None:
        models["teacher."] = teacher.model
        if teacher.adapter is not None:
            weights = local_folder(teacher.adapter) / WEIGHTS_FILE
            settings["teacher.adapter (its weights)"] = file_digest(weights)[:16]
    for of, model in models.items():
        base = ModelWeights(model.folder)
        settings[of + MODEL] = base.fingerprint[:16]
        if base.digest is not None:
            settings[of + MODEL + WHOLE] = base.digest[:32]
        settings[of + CONFIG] = _config_digest(base.folder)
    return settings


def data_settings(loader: StepLoader | StreamLoader) -> dict[str, Any]:
    """The number of samples, the samples per step, and a hash of the tokens of a few samples: what
    a step number refers to."""
    split = {SAMPLES_OF_A_STEP: loader.global_batch_size}
    if isinstance(loader, StreamLoader):
        return loader.settings | split
    dataset = loader.dataset
    settings: dict[str, Any] = {"dataset (its length)": len(dataset)}
    settings["dataset (its tokens)"] = sampled_tokens(dataset)
    if isinstance(arrays := getattr(dataset, "dataset", dataset), TokenizedDataset):
        whole = hashlib.sha256()
        for array in (arrays.tokens, arrays.labels, arrays.ends):  # also of rows without a file
            whole.update(memoryview(array).cast("B") if len(array) else b"")
        settings["dataset (its tokens)" + WHOLE] = whole.hexdigest()[:32]
    return settings | split


def sampled_tokens(dataset: MapDataset) -> str:
    """A hash of the tokens of a few samples."""
    size, digest = len(dataset), hashlib.sha256()
    for index in range(0, size, -(-size // SAMPLED_ROWS)):
        sample = dataset[index]
        for name in ("tokens", "labels", "mask"):
            if name in sample:
                digest.update(f"{name} {torch.as_tensor(sample[name]).tolist()}".encode())
    return digest.hexdigest()[:16]


def settings_of_machines(settings: Callable[[], dict[str, Any]], world: World) -> dict[str, Any]:
    """The settings of this run on rank 0, compared with those of every other machine; every rank
    must call it. Ranks with another learning rate or other weights would train without a word, and
    with fewer rows wait for each other.

    Args:
        settings: computes them, on one rank of each machine.

    Raises:
        UserError: machines differ; on every rank.
    """
    several = world.size > world.local_size
    asked = world.rank == 0 or (several and os.environ.get("LOCAL_RANK") == "0")
    mine = settings() if asked else {}
    of_ranks = world.gather(mine) if several else [mine]
    for rank, theirs in enumerate(of_ranks):
        for key in sorted(of_ranks[0].keys() | theirs.keys()) if theirs else ():
            first, other = of_ranks[0].get(key), theirs.get(key)
            if first != other and not (key.endswith(WHOLE) and None in (first, other)):
                found = f"{key}: {first} on rank 0, and {other} on the machine of rank {rank}"
                raise UserError(f"{found}; expected the same config and files on all machines")
    return mine


def check_settings(mine: Mapping[str, Any], folder: Path) -> list[str]:
    """Compares a run's settings with those of the checkpoint `folder`.

    A key that is absent on one side has the default of its component there, or what its absence
    meant (`key_classes`).

    Args:
        mine: all settings, or those known so far; keys of other sections are not compared.

    Returns:
        What a user should know: keys of class "told" that differ, and keys that an earlier version
        has not recorded and that are not as they were by default.

    Raises:
        UserError: others differ; names all of them, with both values.
    """
    # As JSON: what is not finite is null there.
    mine = json.loads(to_json(dict(mine)))
    theirs = json.loads(to_json(read_settings(folder)["facts"]))
    # A setting that only the checkpoint's optimizer, dataset, ... has is a difference too.
    sections = {key.partition(".")[0] for key in mine}
    keys = [*mine, *(k for k in theirs if k.partition(".")[0] in sections and k not in mine)]
    differing: list[str] = []
    told: list[str] = []
    unknown: list[str] = []
    for key in keys:
        kind = class_of(key)
        both = key in mine and key in theirs
        if kind == "free" or (key.endswith((WHOLE, CONFIG)) and not both):
            continue
        if key not in theirs and (kind == "told" or key in NOT_RECORDED):
            if mine[key] != (default := ABSENT.get(key)):
                then = "" if default is None else f" (default then: {default})"
                unknown.append(f"{key}={mine[key]}{then}")
            continue
        was, now = _value(theirs, mine, key), _value(mine, theirs, key)
        if str(now).startswith(HIDDEN) or str(was).startswith(HIDDEN):
            was, now = _hidden(was), _hidden(now)
        # Earlier versions took any text for a path, if there was such a file.
        was_content = str(was).startswith(CONTENT) and key + WHOLE not in theirs
        if was == now or (was_content and not str(now).startswith(CONTENT)):
            continue
        (told if kind == "told" else differing).append(_difference(key, was, now))
    if differing:
        adapter = folder / "adapter"
        start = f", which adapter.start_from={adapter} begins with this adapter"
        raise UserError(
            f"resume: '{folder}' was trained with other settings: {'; '.join(differing)}; "
            f"expected the same, or a new run with another output_dir{start * adapter.is_dir()}"
        )
    lines = [f"changed since '{folder.name}': {'; '.join(told)}"] if told else []
    if unknown:
        lines.append(f"'{folder.name}' does not record {', '.join(unknown)}: not compared")
    return lines


def _value(settings: Mapping[str, Any], other: Mapping[str, Any], key: str) -> Any:
    """The value of a key; where a component's argument is absent, its default.

    Args:
        other: has the key; of the same component.
    """
    if key in settings or key in ABSENT:
        return settings.get(key, ABSENT.get(key))
    parent, _, name = key.rpartition(".")
    path = settings.get(f"{parent}._component_")
    if path is None or path != other.get(f"{parent}._component_"):
        return None
    with suppress(UserError):
        target = Component(path).resolve()
        if name in (known := passed_by_name(target)):
            return _as_json(known[name].default)
        return next((f.default for f in fields(further_keys(target)) if f.name == name), None)
    return None


def _as_json(value: Any) -> Any:
    """A default of a component, as YAML would give it; null for what YAML cannot give."""
    try:
        return json.loads(to_json(value))
    except TypeError:
        return None


def write_settings(folder: Path, settings: Mapping[str, Any], **more: Any) -> None:
    """Writes settings and more JSON values to a checkpoint's folder."""
    (folder / SETTINGS_FILE).write_text(sealed_json({**more, "facts": settings}))


def read_settings(folder: Path) -> dict[str, Any]:
    """The values that `write_settings` wrote; the settings are at "facts". Raises Damaged: the file
    is missing or broken."""
    if not folder.is_dir():
        raise Damaged("a file, not a folder" if folder.is_file() else "missing")
    values = read_sealed(folder / SETTINGS_FILE)
    numbers = [values.get("step"), values.get("world_size")]
    files = values.get("files", {})
    if (
        not isinstance(values.get("facts"), dict)
        or not all(type(number) is int and number >= 0 for number in numbers)
        or not isinstance(files, dict)
        or not all(isinstance(f, dict) and type(f.get("bytes")) is int for f in files.values())
    ):
        raise Damaged(f"{SETTINGS_FILE}: not the facts of a checkpoint")
    return values


# ---- content instead of paths --------------------------------------------------------------------


def _sampled_hash(file: Path) -> str:
    """A hash of a file's size, and of 4 KB at its start, in its middle and at its end."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(file, "rb") as stream:
        for at in (0, size // 2, max(0, size - SAMPLE_BYTES)):
            stream.seek(at)
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _config_digest(folder: Path) -> str:
    """Of what `config.json` says of the computation: a rotary base, say, has no part in weights."""
    config, _ = read_config(folder)
    told = {k: v for k, v in flat(config).items() if not NOT_COMPUTED & set(k.split("."))}
    return hashlib.sha256(to_json(told, sort_keys=True).encode()).hexdigest()[:32]


def _content(key: str, value: str) -> dict[str, str]:
    """Hashes of samples and of all bytes, if `value` names a file or a folder. Weights are left
    out; `ModelWeights` and `adapter.start_from (its weights)` have them."""
    try:
        path = local_folder(value)
        if not path.exists():
            return {}
    except OSError:  # a text that is too long for a path
        return {}
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    if hub_name(value):  # other programs may have put other files into the cache
        files = [file for file in files if file.name in SMALL_FILES]
    if path.is_dir():
        files = [f for f in files if f.suffix not in WEIGHT_FILES and not f.name.startswith(".")]
    sampled, whole = hashlib.sha256(), hashlib.sha256()
    for file in files:
        sampled.update(_sampled_hash(file).encode())
    if key.endswith("source"):  # files in folders too
        whole.update(content_digest(value).encode())
    else:
        whole.update("".join(map(file_digest, files)).encode())
    return {key: f"{CONTENT}{sampled.hexdigest()[:16]}", key + WHOLE: whole.hexdigest()[:32]}


def _hidden(value: Any) -> Any:
    """A digest of what was read from the environment, which may be a secret; no digests of paths'
    contents, and of null."""
    if value is None or str(value).startswith((HIDDEN, CONTENT)):
        return value
    return HIDDEN + hashlib.sha256(to_json(value).encode()).hexdigest()[:32]


def _difference(key: str, was: Any, now: Any) -> str:
    was, now = ("null" if value is None else value for value in (was, now))
    advice = f" (global_batch_size={was} keeps it)" if key == SAMPLES_OF_A_STEP else ""
    return f"{key}: was {was}, is {now}{advice}"
