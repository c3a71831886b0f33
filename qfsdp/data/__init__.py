"""From a file of prompts and answers to this rank's batches.

Importing this package needs torch alone: `tokenizers`, `jinja2`, `datasets` and torchtune are
imported by the functions that use them.
"""

from __future__ import annotations

from qfsdp.data.datasets import TokenizedDataset, chat_dataset, check_source, instruct_dataset
from qfsdp.data.loader import IGNORE_INDEX, Batch, StepLoader, collate
from qfsdp.data.packing import PackedDataset
from qfsdp.data.tokenizer import HFTokenizer, hf_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "HFTokenizer",
    "PackedDataset",
    "StepLoader",
    "TokenizedDataset",
    "chat_dataset",
    "check_source",
    "collate",
    "hf_tokenizer",
    "instruct_dataset",
]
