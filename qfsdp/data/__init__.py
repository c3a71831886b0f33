"""Tokenizers, datasets and batches.

Reads rows from files or the Hugging Face hub, turns them into tokens and labels, packs samples and
hands each rank its batches. The builders exported here are the names that configs use, such as
`_component_: qfsdp.data.instruct_dataset`. Importing the package needs torch only: `tokenizers`,
`jinja2`, `datasets` and torchtune are imported inside the functions that use them.
"""

from __future__ import annotations

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
from qfsdp.data.loader import IGNORE_INDEX, Batch, StepLoader, collate
from qfsdp.data.mixture import mixed_dataset
from qfsdp.data.packing import PackedDataset
from qfsdp.data.preferences.datasets import (
    hh_dataset,
    kto_dataset,
    orca_pairs_dataset,
    preference_dataset,
    ultrafeedback_dataset,
)
from qfsdp.data.pretokenized import pretokenized_dataset
from qfsdp.data.stream import StreamLoader, packed, step_loader
from qfsdp.data.text import text_dataset
from qfsdp.data.tokenized_dataset import TokenizedDataset
from qfsdp.data.tokenizer import HFTokenizer, hf_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "HFTokenizer",
    "PackedDataset",
    "StepLoader",
    "StreamLoader",
    "TokenizedDataset",
    "alpaca_dataset",
    "build_dataset",
    "chat_dataset",
    "check_data",
    "check_dataset",
    "check_source",
    "collate",
    "dummy_dataset",
    "gsm8k_dataset",
    "guanaco_dataset",
    "hf_tokenizer",
    "hh_dataset",
    "instruct_dataset",
    "kto_dataset",
    "mixed_dataset",
    "openassistant_dataset",
    "orca_math_dataset",
    "orca_pairs_dataset",
    "packed",
    "preference_dataset",
    "pretokenized_dataset",
    "sharegpt_dataset",
    "step_loader",
    "sql_create_context_dataset",
    "text_dataset",
    "ultrafeedback_dataset",
]
