"""What a run was trained on, in facts that a continued run must share with it.

A checkpoint goes on bit by bit only where these are the same: the weights of the base, what is
trained, how, and on which samples in which order. Where things lie is not among them: models,
tokenizers and data files are compared by content. Nor is how the work is spread over ranks and
micro-batches, nor how long the run is to be.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.cli.config import to_yaml
from qfsdp.cli.errors import UserError
from qfsdp.data import StepLoader

COMPARED = (
    *("adapter", "trainable", "quantization", "optimizer", "lr_scheduler"),
    *("tokenizer", "dataset"),
)
COMPARED_KEYS = ("model.dtype", "seed", "max_seq_len")
SAMPLE_BYTES = 4096
SAMPLED_ROWS = 8
WEIGHT_FILES = (".safetensors", ".bin", ".pth", ".pt", ".gguf")


def config_facts(cfg: Any) -> dict[str, Any]:
    """Key -> value of what the config says; reads a few KB of every base tensor.

    Args:
        cfg: a recipe's config, with `model.folder` a Hugging Face model folder.
    """
    tree = OmegaConf.to_container(OmegaConf.create(to_yaml(cfg)), resolve=True)
    flat = _flatten(tree)
    facts = {
        key: _content(value)
        for key, value in flat.items()
        if key in COMPARED_KEYS or key.partition(".")[0] in COMPARED
    }
    return facts | {"model (its weights)": ModelWeights(cfg.model.folder).fingerprint[:16]}


def data_facts(loader: StepLoader) -> dict[str, Any]:
    """What a step number means: the number of samples, how many make a step, and what a few of
    them look like once they are tokens."""
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
        "batch_size * gradient_accumulation_steps * ranks": loader.global_batch_size,
    }


def check_facts(mine: Mapping[str, Any], folder: Path) -> None:
    """Compares a run's facts with those in checkpoint `folder`, as far as `mine` has them.

    Raises:
        UserError: some differ; all that do are named, with both values.
    """
    theirs = read_facts(folder)["facts"]
    # A part that the other optimizer, dataset, ... did not have counts as a difference too.
    parts = {key.partition(".")[0] for key in mine} & set(COMPARED)
    keys = [*mine, *(key for key in theirs if key.partition(".")[0] in parts and key not in mine)]
    differing = [
        f"{key}: was {_word(theirs.get(key))}, is {_word(mine.get(key))}"
        for key in keys
        if theirs.get(key) != mine.get(key)
    ]
    if differing:
        raise UserError(
            f"resume: '{folder}' was trained otherwise: {'; '.join(differing)}; set these back, or "
            "start anew with another output_dir"
        )


FACTS_FILE = "facts.json"


def write_facts(folder: Path, facts: Mapping[str, Any], **more: Any) -> None:
    """Puts them into a checkpoint's folder, beside anything else that JSON can say."""
    (folder / FACTS_FILE).write_text(json.dumps({**more, "facts": facts}, indent=2) + "\n")


def read_facts(folder: Path) -> dict[str, Any]:
    """What `write_facts` wrote; raises UserError where that is missing or broken."""
    try:
        written = json.loads((folder / FACTS_FILE).read_text())
        return {**written, "facts": dict(written["facts"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / FACTS_FILE}: cannot be read ({error!r})") from None


# ---- content instead of paths --------------------------------------------------------------


def _samples(stream: Any, begin: int, end: int) -> str:
    """A checksum of 4 KB at the start, in the middle and at the end of a range of bytes."""
    digest = hashlib.sha256(str(end - begin).encode())
    for at in (begin, (begin + end) // 2, max(begin, end - SAMPLE_BYTES)):
        stream.seek(at)
        digest.update(stream.read(min(SAMPLE_BYTES, end - at)))
    return digest.hexdigest()[:16]


def _content(value: Any) -> Any:
    """A checksum instead of a string that names a file or a folder; weights are left out."""
    path = Path(value).expanduser() if isinstance(value, str) and value else None
    if path is None or not path.exists():
        return value
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    digest = hashlib.sha256()
    for file in files:
        if path.is_file() or not (file.suffix in WEIGHT_FILES or file.name.startswith(".")):
            with open(file, "rb") as stream:
                samples = _samples(stream, 0, file.stat().st_size)
            digest.update(f"{samples}".encode())
    return f"content {digest.hexdigest()[:16]}"


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    parts = [_flatten(value, f"{prefix}.{key}" if prefix else key) for key, value in tree.items()]
    return {key: value for part in parts for key, value in part.items()}


def _word(value: Any) -> str:
    return "null" if value is None else str(value)
