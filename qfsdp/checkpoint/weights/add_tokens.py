"""A model with more tokens: rows of the embedding and the output layer, and the tokenizer's files.

A new row is the mean of the rows of all tokens before (`mean_rows.py`). The vocabulary is padded to
a multiple, with the same rows. Rows that the model has beyond its tokenizer are used first. Weights
are copied from file to file, 16 MB at a time, and keep their dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qfsdp.checkpoint.weights.convert import convert_folder, copied, copies_but, plain_config
from qfsdp.checkpoint.weights.expand import check_plain
from qfsdp.checkpoint.weights.experts import StoredAs
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.mean_rows import TABLES, MeanRows
from qfsdp.checkpoint.weights.output_folder import OutputFolder
from qfsdp.data.tokenizer_folder import TokenizerFolder, add_new_tokens
from qfsdp.distributed.world import World


@dataclass(frozen=True)
class NewTokens:
    """What is added to a model.

    Fields:
        ids: text -> id, of the new tokens; consecutive.
        rows: of the vocabulary afterwards.
        texts: name -> text of the tokenizer's files.
    """

    ids: dict[str, int]
    rows: int
    texts: dict[str, str]


def plan_tokens(
    weights: ModelWeights, tokens: list[str], special: bool, multiple: int
) -> NewTokens:
    """Checks that tokens can be added. Reads headers and the tokenizer.

    Args:
        special: whether they are special tokens, which decoding leaves out and which the text of a
            message does not spell.
        multiple: of which the number of rows is to be, if rows are added.

    Raises:
        UserError: the weights are quantized, or do not match config.json; or a token is empty,
            named twice or there already.
    """
    check_plain(weights, "add the tokens first")
    folder = TokenizerFolder(str(weights.folder))
    backend = folder.backend()
    ids = add_new_tokens(backend, tokens, special, "new_tokens")
    rows = weights.plain[TABLES[0]].rows
    return NewTokens(ids, rows_for(ids, rows, multiple), folder.texts_with(backend, ids, special))


def rows_for(ids: Mapping[str, int], rows: int, multiple: int) -> int:
    """The rows of a vocabulary that has `rows`, with new tokens."""
    needed = max(ids.values()) + 1
    return rows if needed <= rows else -(-needed // multiple) * multiple


def add_tokens(
    weights: ModelWeights, new: NewTokens, folder: Path, world: World, max_file_bytes: int
) -> None:
    """Writes a model folder with the new tokens. Every rank must call it; each rank writes a part
    of the files. Raises UserError: see `convert_folder`."""
    config = plain_config(weights.folder)
    config["vocab_size"] = new.rows
    tables = [name for name in TABLES if name in weights.plain]
    conversions = copies_but(weights, tables)
    for name in tables:
        more = MeanRows.of(weights.plain[name], min(new.ids.values()), new.rows)
        conversions[name] = copied(name, more, StoredAs({name: more.shape}))
    output = OutputFolder(folder, texts=new.texts)
    convert_folder(conversions, weights, output, config, world, max_file_bytes)
