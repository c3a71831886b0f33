"""`tokenizer.new_tokens`: a run gives them rows, and trains these."""

from __future__ import annotations

from typing import Any

from qfsdp.checkpoint.weights.add_tokens import rows_for
from qfsdp.checkpoint.weights.mean_rows import MULTIPLE
from qfsdp.common.errors import UserError


def new_tokens_of(cfg: Any) -> Any:
    """`tokenizer.new_tokens`; None if a config has no tokenizer, which rows of ids do not need."""
    tokenizer = getattr(cfg, "tokenizer", None)
    return None if tokenizer is None else tokenizer.kwargs.get("new_tokens")


def add_new_tokens(cfg: Any) -> None:
    """Sets what new tokens need in a run's config: `model.mean_rows`, and
    `adapter.trainable_token_indices` if neither that nor whole modules are given.

    `config.yaml` of the run and its checkpoints have the numbers. Raises UserError: a token is
    there already, named twice or empty; or the model cannot have more rows."""
    if (tokens := new_tokens_of(cfg)) is None:
        return
    if cfg.model.quantize_cache is not None:
        given = f"model.quantize_cache: '{cfg.model.quantize_cache}'"
        raise UserError(f"{given}; expected null with tokenizer.new_tokens")
    ids = cfg.tokenizer.build().new_tokens
    model, adapter, cfg.model.mean_rows = cfg.model, cfg.adapter, None
    config = model.any_config()
    model.mean_rows = [min(ids.values()), rows_for(ids, config.vocab_size, MULTIPLE)]
    model.any_config()  # finds what it cannot be
    if adapter.modules_to_save is None and adapter.trainable_token_indices is None:
        if not adapter.is_low_rank:
            given = f"tokenizer.new_tokens: {tokens}, and adapter.method is {adapter.method}"
            expected = "expected lora, dora or adapter.modules_to_save=[embed_tokens,lm_head]"
            raise UserError(f"{given}; {expected}")
        of_each = {"embed_tokens": [*ids.values()], "lm_head": [*ids.values()]}
        tied = config.tie_word_embeddings
        adapter.trainable_token_indices = of_each["embed_tokens"] if tied else of_each
