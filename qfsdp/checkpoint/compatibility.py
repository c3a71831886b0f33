"""Settings that a resumed run must share with the run of its checkpoint.

A run resumes bit for bit only with the same base weights, trained parameters, training settings,
and samples in the same order. Paths may differ: models, tokenizers and data files are compared by
content. The number of ranks, the micro-batches and the length of the run may differ as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from qfsdp.checkpoint.adapter_config_file import WEIGHTS_FILE
from qfsdp.checkpoint.digests import Damaged, read_sealed, sealed_json
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.cli.config import to_yaml
from qfsdp.cli.errors import UserError
from qfsdp.cli.files import sha256, to_json
from qfsdp.cli.hub import SMALL_FILES, hub_name, local_folder
from qfsdp.data import StepLoader, StreamLoader
from qfsdp.data.reading import NOT_IN_RESULTS

SHARED_SECTIONS = (
    *("adapter", "trainable", "quantization", "optimizer", "lr_scheduler"),
    *("tokenizer", "dataset", "loss", "reference"),
)
SHARED_KEYS = ("model.dtype", "seed", "max_seq_len")
ADDED_LATER = {"quantization.compute": "bf16"}  # what checkpoints without the key were trained with
SAMPLES_OF_A_STEP = "batch_size * gradient_accumulation_steps * ranks"
SETTINGS_FILE = "facts.json"
SAMPLE_BYTES = 4096
SAMPLED_ROWS = 8
WEIGHT_FILES = (".safetensors", ".bin", ".pth", ".pt", ".gguf")


def config_settings(cfg: Any) -> dict[str, Any]:
    """Key -> value of the settings in a config; reads a few KB of every base tensor.

    Args:
        cfg: a recipe's config; `model.folder` is a Hugging Face model folder.
    """
    tree = OmegaConf.to_container(OmegaConf.create(to_yaml(cfg)), resolve=True)
    flat = _flatten(tree)
    settings = {
        key: _content(value)
        for key, value in flat.items()
        if key in SHARED_KEYS
        or (key.partition(".")[0] in SHARED_SECTIONS and key.split(".")[-1] not in NOT_IN_RESULTS)
    }
    if getattr(cfg, "reference", None) == "start" and cfg.adapter.start_from is not None:
        weights = local_folder(cfg.adapter.start_from) / WEIGHTS_FILE  # the reference; read again
        settings["adapter.start_from (its weights)"] = sha256(weights)[:16]
    return settings | {"model (its weights)": ModelWeights(cfg.model.folder).fingerprint[:16]}


def data_settings(loader: StepLoader | StreamLoader) -> dict[str, Any]:
    """The number of samples, the samples per step, and a hash of the tokens of a few samples: what
    a step number refers to."""
    split = {SAMPLES_OF_A_STEP: loader.global_batch_size}
    if isinstance(loader, StreamLoader):
        return loader.settings | split
    dataset, digest = loader.dataset, hashlib.sha256()
    size = len(dataset)
    for index in range(0, size, -(-size // SAMPLED_ROWS)):
        sample = dataset[index]
        for name in ("tokens", "labels", "mask"):
            if name in sample:
                digest.update(f"{name} {torch.as_tensor(sample[name]).tolist()}".encode())
    return {
        "dataset (its length)": size,
        "dataset (its tokens)": digest.hexdigest()[:16],
    } | split


def check_settings(mine: Mapping[str, Any], folder: Path) -> None:
    """Compares a run's settings with those of the checkpoint `folder`.

    Args:
        mine: all settings, or those known so far; keys of other sections are not compared.

    Raises:
        UserError: some differ; names all of them, with both values.
    """
    # As JSON: what is not finite is null there.
    mine = json.loads(to_json(dict(mine)))
    theirs = ADDED_LATER | json.loads(to_json(read_settings(folder)["facts"]))
    # A setting that only the checkpoint's optimizer, dataset, ... has is a difference too.
    sections = {key.partition(".")[0] for key in mine} & set(SHARED_SECTIONS)
    keys = [*mine, *(k for k in theirs if k.partition(".")[0] in sections and k not in mine)]
    differing = [
        _difference(key, theirs.get(key), mine.get(key))
        for key in keys
        if theirs.get(key) != mine.get(key)
    ]
    if differing:
        raise UserError(
            f"resume: '{folder}' was trained with other settings: {'; '.join(differing)}; "
            "expected the same, or a new run with another output_dir"
        )


def write_settings(folder: Path, settings: Mapping[str, Any], **more: Any) -> None:
    """Writes settings and more JSON values to a checkpoint's folder."""
    (folder / SETTINGS_FILE).write_text(sealed_json({**more, "facts": settings}))


def read_settings(folder: Path) -> dict[str, Any]:
    """The values that `write_settings` wrote; the settings are at "facts".

    Raises:
        Damaged: the file is missing or broken.
    """
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


def _sampled_hash(stream: Any, begin: int, end: int) -> str:
    """A hash of 4 KB at the start, in the middle and at the end of a range of bytes."""
    digest = hashlib.sha256(str(end - begin).encode())
    for at in (begin, (begin + end) // 2, max(begin, end - SAMPLE_BYTES)):
        stream.seek(at)
        digest.update(stream.read(min(SAMPLE_BYTES, end - at)))
    return digest.hexdigest()[:16]


def _content(value: Any) -> Any:
    """`value`, or a hash of the files if it names a file or a folder; weights are left out."""
    path = local_folder(value) if isinstance(value, str) and value else None
    if path is None or not path.exists():
        return value
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    if hub_name(value):  # other programs may have put other files into the cache
        files = [file for file in files if file.name in SMALL_FILES]
    digest = hashlib.sha256()
    for file in files:
        if path.is_file() or not (file.suffix in WEIGHT_FILES or file.name.startswith(".")):
            with open(file, "rb") as stream:
                digest.update(_sampled_hash(stream, 0, file.stat().st_size).encode())
    return f"content {digest.hexdigest()[:16]}"


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    parts = [_flatten(value, f"{prefix}.{key}" if prefix else key) for key, value in tree.items()]
    return {key: value for part in parts for key, value in part.items()}


def _difference(key: str, was: Any, now: Any) -> str:
    was, now = ("null" if value is None else value for value in (was, now))
    advice = f" (global_batch_size={was} keeps it)" if key == SAMPLES_OF_A_STEP else ""
    return f"{key}: was {was}, is {now}{advice}"
