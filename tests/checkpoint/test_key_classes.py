"""What a resumed run may change: every key has a class; absent keys; texts and paths."""

from __future__ import annotations

import dataclasses
import os
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from qfsdp.checkpoint.compatibility import _content, check_settings, read_settings, write_settings
from qfsdp.checkpoint.key_classes import ABSENT, CLASSES, class_of, names_a_file
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.common.errors import UserError
from qfsdp.common.file_digests import file_digest
from qfsdp.data.reading import NOT_IN_RESULTS
from tests.released.make import HERE, STEP
from tests.tiny import ROOT, load_recipe, write_tiny_model

TRAINING = [p.stem for p in (ROOT / "recipes").glob("*.py") if "\n    resume: str" in p.read_text()]


def keys(schema: Any, prefix: str = "") -> typing.Iterator[str]:
    """The dotted names of a config's fields, of sections too."""
    hints = typing.get_type_hints(schema)
    for entry in dataclasses.fields(schema):
        kind = hints[entry.name]
        if dataclasses.is_dataclass(kind) and kind.__name__ != "Component":
            yield from keys(kind, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}"


def test_every_key_of_the_training_recipes_has_a_class() -> None:
    assert len(TRAINING) == 6
    known = {key for name in TRAINING for key in keys(load_recipe(name).Config)}
    assert known == CLASSES.keys()
    assert class_of("model (its weights)") == class_of("adapters.a.lr") == "same"
    assert {class_of(f"dataset.sets.chat.{name}") for name in NOT_IN_RESULTS} == {"free"}
    assert {class_of(f"adapters.a.dataset.{name}") for name in NOT_IN_RESULTS} == {"free"}


def compared(folder: Path, was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    write_settings(folder, was, step=3, world_size=1)
    return check_settings(now, folder)


def test_keys_that_a_checkpoint_does_not_have(tmp_path: Path) -> None:
    before = {"quantization.format": "nf4", "seed": 0}
    assert compared(tmp_path, before, before | {"quantization.expert_chunk": "1MiB"}) == []
    assert compared(tmp_path, before | {"quantization.expert_chunk": "1GiB"}, before) == []
    later = before | {"model.router_aux_loss": 0.5, "epochs": 3, "clip_grad_norm": 1.0}
    (line,) = compared(tmp_path, before, later)
    unknown = "model.router_aux_loss=0.5, epochs=3 (default then: 1)"
    assert line.endswith(f"does not record {unknown}: not compared")
    (line,) = compared(tmp_path, later, later | {"epochs": 4, "clip_grad_norm": 0.001})
    assert line.endswith("epochs: was 3, is 4; clip_grad_norm: was 1.0, is 0.001")
    with pytest.raises(UserError, match="router_aux_loss: was 0.5, is 0.001; expected"):
        compared(tmp_path, later, later | {"model.router_aux_loss": 0.001})
    adam = {"optimizer._component_": "torch.optim.AdamW"}  # a default, written out or not
    assert compared(tmp_path, adam, adam | {"optimizer.weight_decay": 0.01}) == []
    assert compared(tmp_path, adam | {"optimizer.betas": [0.9, 0.999]}, adam) == []
    with pytest.raises(UserError, match="optimizer.weight_decay: was 0.01, is 0.1; expected"):
        compared(tmp_path, adam, adam | {"optimizer.weight_decay": 0.1})


def test_what_earlier_checkpoints_do_not_record_is_told() -> None:
    assert {key for key, kind in CLASSES.items() if kind == "told"} <= ABSENT.keys()
    for name in sorted(path.parent.name for path in HERE.glob("*/run")):
        run = HERE / name / "run"
        written = OmegaConf.load(run / "config.yaml")  # of a run with defaults
        values = {key: OmegaConf.select(written, key, default=ABSENT[key]) for key in ABSENT}
        assert values == ABSENT, name
        folder = run / f"checkpoints/step_{STEP:08}"
        same = read_settings(folder)["facts"] | ABSENT
        assert check_settings(same, folder) == []
        told = check_settings(same | {"clip_grad_norm": 0.001, "max_steps": 9}, folder)
        assert len(told) == 1 and "clip_grad_norm" in told[0] and "max_steps" in told[0]


def test_only_paths_are_taken_for_paths(tmp_path: Path) -> None:
    for text in ("dora", "train", "nf4", "json"):
        (tmp_path / text).mkdir()
    flat = {"adapter.method": "dora", "dataset.split": "train", "quantization.format": "nf4"}
    flat |= {"dataset.source": "json", "dataset.data_files": "rows.jsonl"}
    flat |= {"tokenizer.chat_template": "plain", "tokenizer.path": "here"}
    flat |= {"adapter.start_from": "there", "dataset.system_prompt": "x" * 300}
    paths = [key for key in flat if names_a_file(key, flat)]
    assert paths == ["dataset.data_files", "tokenizer.path", "adapter.start_from"]
    assert _content("tokenizer.chat_template", "{{ x }}" * 300) == {}
    # An earlier version has hashed the folder.
    assert compared(tmp_path, {"adapter.method": "content 0123"}, {"adapter.method": "dora"}) == []


def test_every_byte_is_compared(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    text = "".join(f'{{"text": "row {i:06}"}}\n' for i in range(4000))
    rows.write_text(text)
    found = _content("dataset.source", str(rows))
    os.utime(rows, ns=(0, 0))
    rows.write_text(text.replace("row 001000", "row 00one0"))
    os.utime(rows, ns=(0, 0))
    changed = _content("dataset.source", str(rows))
    assert [changed[key] == found[key] for key in found] == [True, False]
    with pytest.raises(UserError, match=r"dataset.source \(all bytes\): was "):
        compared(tmp_path, found, changed)
    weights = ModelWeights(write_tiny_model(tmp_path / "model"))
    file, before = weights.folder / "model.safetensors", (weights.fingerprint, weights.digest)
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"].view(torch.uint8)[100, 5] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    again = ModelWeights(weights.folder)
    assert before[0] == again.fingerprint and before[1] != again.digest
    split = ModelWeights(write_tiny_model(tmp_path / "split", shards=3))
    assert split.digest == weights.digest


def test_a_digest_is_remembered_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qfsdp.common import file_digests

    monkeypatch.setattr(file_digests, "SETTLED_S", -1.0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))  # where they are kept
    file = tmp_path / "file"
    file.write_text("one")
    first = file_digest(file)
    file_digests._known.clear()
    with monkeypatch.context() as patch:
        patch.setattr(file_digests, "range_digest", None)  # not called
        assert file_digest(file) == first
    times = file.stat()
    file.write_text("two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file_digest(file) != first
