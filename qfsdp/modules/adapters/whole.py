"""Modules that are trained as a whole beside the adapters: `adapter.modules_to_save`, as in PEFT.

Their weights are fp32, as adapters are. A module casts what it computes to the model's dtype: the
embedding the rows that it finds, the output layer its weight, once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from qfsdp.common.errors import UserError

KEY = "base_model.model."  # begins PEFT's keys
# Name in the config -> name in a decoder.
WHOLE = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
EMBEDDING, HEAD = (f"{KEY}{name}.weight" for name in WHOLE.values())


class WholeEmbedding(nn.Embedding):
    """An embedding with fp32 weights, whose outputs are of `compute_dtype`."""

    compute_dtype = torch.float32

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(self.compute_dtype)


def train_whole(model: nn.Module, names: list[str] | None) -> None:
    """Makes the modules `names` trained and fp32. Call it on the meta device, after the adapters
    are added and everything else is frozen. Raises UserError: a module is quantized, adapted or
    tied to one that is not named; or the model is one of transformers."""
    if names is None:
        return
    given = f"adapter.modules_to_save: [{', '.join(names)}]"
    decoder = cast(Any, model)
    if (why := not_by_name(decoder)) is not None:
        raise UserError(f"{given}; expected null, as {why}")
    if decoder.config.tie_word_embeddings and len(names) < len(WHOLE):
        tied = f"[{', '.join(WHOLE)}]"
        raise UserError(f"{given}, and this model ties both weights; expected {tied}")
    for name in names:
        module = model.get_submodule(WHOLE[name])
        if not isinstance(module, nn.Embedding | nn.Linear):
            kind = "adapted" if hasattr(module, "is_reference") else "quantized"
            raise UserError(f"{given}, and {name} is {kind}; expected it plain, or not named here")
        if isinstance(module, nn.Embedding):
            embedding: Any = module
            embedding.__class__ = WholeEmbedding
            embedding.compute_dtype = module.weight.dtype
        module.weight = nn.Parameter(module.weight.detach().float())
    decoder.tie_weights()
    decoder.whole_modules = {WHOLE[name] for name in names}


def not_by_name(model: Any) -> str | None:
    """Why modules of `WHOLE` have other names in a model; None: they have these."""
    if hasattr(model, "linears"):
        return "transformers computes this model"
    return "this model takes more than text" if model.config.takes_more_than_text else None


def whole_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """PEFT's key -> weight, of every module that is trained as a whole; a tied one once."""
    names = getattr(model, "whole_modules", ())
    params = model.named_parameters() if names else ()
    return {f"{KEY}{n}": param for n, param in params if n.rpartition(".")[0] in names}


def ties_whole(model: nn.Module) -> bool:
    """Whether the two modules are trained, and are one weight."""
    return len(getattr(model, "whole_modules", ())) > len(whole_parameters(model))


def keep_computed(model: nn.Module) -> None:
    """Holds these modules in the model's dtype, for inference: nothing casts them for each token.
    Call it before the model has storage."""
    decoder, names = cast(Any, model), getattr(model, "whole_modules", ())
    for name in names:
        module: Any = model.get_submodule(name)
        module.weight = nn.Parameter(module.weight.detach().to(decoder.model.norm.weight.dtype))
    if names:
        decoder.tie_weights()


def computed_in(model: Any) -> torch.dtype:
    """The dtype in which a decoder computes."""
    embedding = model.parts.embedding
    whole = isinstance(embedding, WholeEmbedding)
    held = embedding.compute_dtype if whole else embedding.weight.dtype
    return cast(torch.dtype, model.compute_dtype or held)


def tied_copy(names: list[str] | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The output layer that PEFT writes beside a tied embedding: PEFT's key -> tensor.

    Args:
        names: `adapter.modules_to_save`.
        tensors: of the adapter, by PEFT's keys.
    """
    tied = "lm_head" in (names or ()) and HEAD not in tensors
    return {HEAD: tensors[EMBEDDING].clone()} if tied else {}
