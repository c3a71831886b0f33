"""What transformers reads under other names than ours, and which of two equal tensors it keeps."""

from __future__ import annotations

import re
from contextlib import closing

import torch

from qfsdp.checkpoint.weights.read import PIECE_BYTES, STORED_DTYPES, OpenFiles, StoredTensor
from qfsdp.modules.decoder_parts import DecoderParts

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PREDICTOR = re.compile(r"(model\.)?mtp\.")  # layers that predict more tokens


def with_our_names(
    tensors: dict[str, StoredTensor], parts: DecoderParts
) -> dict[str, StoredTensor]:
    """The same tensors, where those that transformers reads under other names have ours.

    A model that was saved without its output layer has no `model.`; transformers 5 has Mixtral's
    mixtures at `mlp`; the text of a whole Qwen 3.5 may be read alone; and a tied weight may stand
    at either of its places.
    """
    bare = any(n.startswith("layers.") for n in tensors) and EMBEDDINGS not in tensors
    found = {}
    for name, tensor in tensors.items():
        if bare and not name.startswith(("model.", "lm_head.", "mtp.")):
            name = f"model.{name}"
        if parts.experts is not None and parts.mlp.module != "mlp":
            name = name.replace(".mlp.", f".{parts.mlp.module}.")
        if parts.recurrent is not None and not parts.takes_more_than_text:
            name = name.replace("model.language_model.", "model.")
        found[name] = tensor
    embeddings = f"{parts.body}.embed_tokens.weight"
    if parts.tie_word_embeddings and embeddings not in found and HEAD in found:
        found[embeddings] = found.pop(HEAD)
    return found


def same_values(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors hold the same numbers, in the narrower of their dtypes."""
    if a.shape != b.shape:
        return False
    narrow = min((STORED_DTYPES[t.dtype] for t in (a, b)), key=lambda dtype: dtype.itemsize)
    step = max(1, PIECE_BYTES // max(1, a.row_bytes))
    with closing(OpenFiles()) as files:
        for start in range(0, a.rows, step):
            rows = min(step, a.rows - start)
            pieces = [torch.empty(rows, *t.shape[1:], dtype=STORED_DTYPES[t.dtype]) for t in (a, b)]
            for tensor, piece in zip((a, b), pieces, strict=True):
                files.read_rows(tensor, start, piece)
            if not torch.equal(*(piece.to(narrow) for piece in pieces)):
                return False
    return True
