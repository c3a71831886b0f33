"""Tokenizers, datasets and batches: rows become tokens and labels, packs, and each rank's batches.

The names here are those that configs use, such as `_component_: qfsdp.data.instruct_dataset`. Each
is imported when it is first used, so that rows can be looked at without torch. `tokenizers`,
`jinja2`, `datasets` and torchtune are imported inside the functions that use them.
"""
# ruff: noqa: F401

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qfsdp.data.batch import IGNORE_INDEX, Batch
    from qfsdp.data.components import build_dataset, check_data, check_dataset
    from qfsdp.data.conversations import chat_dataset, instruct_dataset
    from qfsdp.data.dummy import dummy_dataset
    from qfsdp.data.files.rows import check_source
    from qfsdp.data.known_datasets import (
        alpaca_dataset,
        gsm8k_dataset,
        guanaco_dataset,
        openassistant_dataset,
        orca_math_dataset,
        sharegpt_dataset,
        sql_create_context_dataset,
    )
    from qfsdp.data.loader import StepLoader, collate
    from qfsdp.data.mixture import mixed_dataset
    from qfsdp.data.packing import PackedDataset
    from qfsdp.data.preferences.datasets import (
        class_dataset,
        hh_dataset,
        kto_dataset,
        orca_pairs_dataset,
        preference_dataset,
        ultrafeedback_dataset,
    )
    from qfsdp.data.pretokenized import pretokenized_dataset, text_dataset
    from qfsdp.data.stream import Loader, StreamLoader, packed, step_loader
    from qfsdp.data.tokenized_dataset import TokenizedDataset
    from qfsdp.data.tokenizer import HFTokenizer, hf_tokenizer

# Module -> what it exports here.
_NAMES = {
    "batch": "IGNORE_INDEX Batch",
    "components": "build_dataset check_data check_dataset",
    "conversations": "chat_dataset instruct_dataset",
    "dummy": "dummy_dataset",
    "files.rows": "check_source",
    "known_datasets": "alpaca_dataset gsm8k_dataset guanaco_dataset openassistant_dataset "
    "orca_math_dataset sharegpt_dataset sql_create_context_dataset",
    "loader": "StepLoader collate",
    "mixture": "mixed_dataset",
    "packing": "PackedDataset",
    "preferences.datasets": "class_dataset hh_dataset kto_dataset orca_pairs_dataset "
    "preference_dataset ultrafeedback_dataset",
    "pretokenized": "pretokenized_dataset text_dataset",
    "stream": "Loader StreamLoader packed step_loader",
    "tokenized_dataset": "TokenizedDataset",
    "tokenizer": "HFTokenizer hf_tokenizer",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_MODULES]

PREFERENCES = frozenset(_NAMES["preferences.datasets"].split())
"""The datasets of preference tuning, by name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
