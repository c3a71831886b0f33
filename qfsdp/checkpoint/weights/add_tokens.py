"""A model with more tokens: rows of the embedding and the output layer, and the tokenizer's files.

A new row is the mean of the rows of all tokens before, so a new token is as likely as the usual one
and moves no logit far (https://nlp.stanford.edu/~johnhew/vocab-expansion.html). The vocabulary is
padded to a multiple, with the same rows. Rows that the model has beyond its tokenizer are used
first. Weights are copied from file to file, 16 MB at a time, and keep their dtype.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qfsdp.checkpoint.weights.convert import CPU, WeightConversion, convert_folder, copies_but
from qfsdp.checkpoint.weights.experts import StoredAs
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import check_finite
from qfsdp.checkpoint.weights.output_folder import OutputFolder
from qfsdp.checkpoint.weights.read import Pieces, Read
from qfsdp.checkpoint.weights.write import SafetensorsFile
from qfsdp.common.errors import UserError
from qfsdp.common.files import to_json
from qfsdp.data.tokenizer_folder import TokenizerFolder, read_json
from qfsdp.distributed.world import World
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.transformer import Decoder

TABLES = ("model.embed_tokens.weight", "lm_head.weight")


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
    from tokenizers import AddedToken

    if weights.quantized:
        raise UserError(
            f"model.path: '{weights.folder}' holds quantized weights; expected plain ones: add the "
            "tokens first, and quantize the result (recipes/quantize)"
        )
    with torch.device("meta"):
        weights.check(Decoder(DecoderConfig.from_dir(weights.folder)))
    backend = TokenizerFolder(str(weights.folder)).backend()
    for at, token in enumerate(tokens):
        if not token.strip() or token in tokens[:at]:
            expected = "expected different texts that are not empty"
            raise UserError(f"new_tokens: {token!r}; {expected}")
        if (known := backend.token_to_id(token)) is not None:
            raise UserError(f"new_tokens: {token!r} is token {known} already; expected new ones")
    made = [AddedToken(token, normalized=False, special=special) for token in tokens]
    add = backend.add_special_tokens if special else backend.add_tokens
    add(made)
    vocabulary = backend.get_vocab()
    ids = {token: vocabulary[token] for token in tokens}
    rows = weights.plain[TABLES[0]].rows
    needed = -(-(max(ids.values()) + 1) // multiple) * multiple
    texts = {"tokenizer.json": backend.to_str(pretty=True) + "\n"}
    settings = read_json(weights.folder / "tokenizer_config.json")
    if isinstance(settings.get("added_tokens_decoder"), dict):
        flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        settings["added_tokens_decoder"] |= {
            str(index): {"content": token, **flags, "special": special}
            for token, index in ids.items()
        }
        texts["tokenizer_config.json"] = to_json(settings, indent=2) + "\n"
    return NewTokens(ids, needed if max(ids.values()) >= rows else rows, texts)


def add_tokens(
    weights: ModelWeights, new: NewTokens, folder: Path, world: World, max_file_bytes: int
) -> None:
    """Writes a model folder with the new tokens. Every rank must call it; each rank writes a part
    of the files. Raises UserError: see `convert_folder`."""
    config = json.loads((weights.folder / "config.json").read_text(encoding="utf-8"))
    config["vocab_size"] = new.rows
    tables = [name for name in TABLES if name in weights.plain]
    conversions = copies_but(weights, tables)
    conversions |= {name: _extended(weights, name, new) for name in tables}
    output = OutputFolder(folder, texts=new.texts)
    convert_folder(conversions, weights, output, config, world, max_file_bytes)


def _extended(weights: ModelWeights, name: str, new: NewTokens) -> WeightConversion:
    stored: Any = weights.plain[name]
    target = StoredAs({name: (new.rows, *stored.shape[1:])})

    def write(file: SafetensorsFile, pieces: Pieces) -> None:
        target.write(file, _rows(name, next(pieces), new))

    read = Read(stored, range(stored.rows), CPU)
    return WeightConversion(target.group(stored.dtype), [read], write)


def _rows(name: str, pieces: Iterator[Tensor], new: NewTokens) -> Iterator[Tensor]:
    """The rows that there are, with the mean of those before the first new one in place of it and
    of all that follow."""
    first, at, total, known = min(new.ids.values()), 0, torch.zeros(()), 0
    dtype = torch.float32
    for piece in pieces:
        check_finite(name, piece)
        kept, dtype = piece[: max(0, first - at)], piece.dtype
        total, known = total + kept.double().sum(0), known + len(kept)
        if len(kept):
            yield kept
        at += len(piece)
    mean = (total / max(1, known)).to(dtype)
    step = max(1, (1 << 20) // mean.numel())
    for start in range(known, new.rows, step):
        yield mean.expand(min(step, new.rows - start), -1).contiguous()
