"""Rows of the embedding and the output layer that are trained alone, as PEFT's trainable tokens.

`adapter.trainable_token_indices` names ids of tokens. Their rows are a small fp32 weight
`[ids, hidden]` beside the base, which stays as it is, quantized or plain, gathered or split:

    embedding       a token of these ids takes its trained row
    output layer    the logits of these ids are x times their trained rows

A row begins as the base's. What is trained is the row itself, not a difference, as in PEFT
(https://huggingface.co/docs/peft/package_reference/trainable_tokens). Of a model that ties both
weights it is one row for both. The weight belongs to FSDP2's root: it is gathered once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.whole import KEY, WHOLE, not_by_name
from qfsdp.tensor_subclasses.dtensor import local_part, local_rows, on_mesh, shard_group
from qfsdp.tensor_subclasses.frozen_weight import row_chunks
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

FIELD = "trainable_token_indices"
DELTA = "token_adapter.trainable_tokens_delta"  # PEFT's name of the rows
# Name in the config -> field of a decoder.
FIELDS = {"embed_tokens": "embedding_rows", "lm_head": "head_rows"}


def are_ids(value: Any) -> bool:
    """Whether a value is a list of different ids of tokens."""
    listed = isinstance(value, list) and all(type(index) is int and index >= 0 for index in value)
    return listed and 0 < len({*value}) == len(value)


def by_module(ids: Any) -> dict[str, Any]:
    """`adapter.trainable_token_indices` by the name of the module; a list is the embedding's."""
    return ids if isinstance(ids, dict) else {"embed_tokens": ids}


class TrainedRows(nn.Module):
    """Trained rows of an embedding, an output layer or both.

    Fields:
        ids: of the tokens, in the order of the rows.
        weight: fp32 `[ids, hidden]`.
    """

    base_fields = ()  # see `base_parameters`

    def __init__(self, ids: Sequence[int], width: int, device: torch.device) -> None:
        super().__init__()
        self.ids = list(ids)
        self.weight = nn.Parameter(torch.empty(len(ids), width, device=device))
        self._made: dict[Any, tuple[Tensor, Tensor]] = {}

    @property
    def trained(self) -> list[Tensor]:
        """The weight if it gets a gradient now."""
        return [self.weight] if self.weight.requires_grad and torch.is_grad_enabled() else []

    def _pairs(self, device: torch.device, key: Any, pairs: list[tuple[int, int]]) -> Any:
        """The pairs as two int64 tensors, copied to the device once."""
        if (device, key) not in self._made:
            firsts, seconds = zip(*pairs, strict=True)
            both = (torch.tensor(some, device=device) for some in (firsts, seconds))
            self._made[device, key] = next(both), next(both)
        return self._made[device, key]

    def in_embedded(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Embedded tokens `[..., hidden]` with the trained rows in their places."""
        pairs = sorted((index, at) for at, index in enumerate(self.ids))
        ids, order = self._pairs(tokens.device, "sorted", pairs)
        places = torch.searchsorted(ids, tokens).clamp_(max=len(pairs) - 1)
        own = F.embedding(order[places], self.weight).to(x.dtype)
        return torch.where((ids[places] == tokens).unsqueeze(-1), own, x)

    def in_logits(self, logits: Tensor, x: Tensor) -> Tensor:
        """Logits `[..., vocab]` of `x` with those of the trained rows in their places."""
        columns, _ = self._columns(x.device, range(logits.size(-1)))
        own = F.linear(x, self.weight.to(x.dtype)).to(logits.dtype)
        if not torch.is_grad_enabled():
            return logits.index_copy_(-1, columns, own)
        return logits.index_copy(-1, columns, own)

    def _columns(self, device: torch.device, held: range) -> tuple[Tensor, Tensor]:
        """Of the ids in `held`: their places there, and their rows."""
        pairs = [(i - held.start, at) for at, i in enumerate(self.ids) if i in held]
        return cast(tuple[Tensor, Tensor], self._pairs(device, held, pairs))

    def in_chunks(
        self,
        make: Callable[..., Any],
        loss: Callable[..., Any],
        held: range,
        trained: Sequence[Tensor],
    ) -> Any:
        """`loss.chunk_functions` of an output layer, with the trained rows in it.

        Args:
            make: `chunk_functions` of the output layer without them, for its trained tensors and
                a loss.
            loss: of logits of the tokens `held`.
            trained: tensors that get gradients, if any; the last is this weight, unless it is
                frozen.
        """
        number = len(trained) - (bool(trained) and self.weight.requires_grad)
        if not any(index in held for index in self.ids):
            of_base = make(trained[:number], loss)
            return of_base[0], lambda *given: of_base[1](*given[:-1], given[-1][:number])
        columns, at = self._columns(self.weight.device, held)
        now: dict[str, Tensor] = {}

        def rows(hidden: Tensor) -> Tensor:
            return self.weight.detach()[at].to(hidden.dtype)

        def own_loss(logits: Tensor, labels: Any, weights: Tensor | None) -> tuple[Tensor, Tensor]:
            hidden = now["hidden"]
            logits.index_copy_(1, columns, F.linear(hidden, rows(hidden)).to(logits.dtype))
            losses, grad = loss(logits, labels, weights)
            now["grad"] = grad.index_select(1, columns)
            return losses, grad.index_fill_(1, columns, 0)

        base_logits, base_gradients = make(trained[:number], own_loss)

        def logits(hidden: Tensor) -> Tensor:
            found: Tensor = base_logits(hidden)
            return found.index_copy_(1, columns, F.linear(hidden, rows(hidden)).to(found.dtype))

        def gradients(
            hidden: Tensor, labels: Any, weights: Tensor | None, grads: list[Tensor]
        ) -> tuple[Tensor, Tensor]:
            now["hidden"] = hidden
            losses, of_hidden = base_gradients(hidden, labels, weights, grads[:number])
            grad = now.pop("grad")
            for into in grads[number:]:
                into.index_add_(0, at, (grad.t() @ hidden).float())
            return losses, of_hidden + grad @ rows(hidden)

        return logits, gradients


def train_rows(model: nn.Module, ids: list[int] | dict[str, list[int]] | None) -> None:
    """Adds the trained rows of `adapter.trainable_token_indices`, unset. Call it on the meta
    device, after the adapters and whole modules.

    Raises:
        UserError: an id is no row of the model; a module is adapted or trained as a whole; tied
            ones have different ids; or the model is one of transformers.
    """
    if ids is None:
        return
    if (why := not_by_name(model)) is not None:
        raise UserError(f"adapter.{FIELD}: {ids}; expected null, as {why}")
    decoder, of = cast(Any, model), by_module(ids)
    tied, rows = decoder.config.tie_word_embeddings, decoder.config.vocab_size
    whole = getattr(model, "whole_modules", ())
    if tied and of.get("embed_tokens") != of.get("lm_head", of.get("embed_tokens")):
        expected = "expected the same of embed_tokens, as this model ties both weights"
        raise UserError(f"adapter.{FIELD}: other ids of lm_head; {expected}")
    for name in WHOLE if tied else of:
        if WHOLE[name] in whole or hasattr(model.get_submodule(WHOLE[name]), "is_reference"):
            how = "trained as a whole" if WHOLE[name] in whole else "adapted"
            raise UserError(f"adapter.{FIELD}: {name} is {how}; expected one of both")
    for name, some in of.items():
        if max(some) >= rows:
            expected = f"expected ids of this model, 0 to {rows - 1}"
            raise UserError(f"adapter.{FIELD}: {max(some)}; {expected}")
        if not tied or name == "embed_tokens":
            width, device = decoder.config.hidden_size, decoder.model.norm.weight.device
            setattr(model, FIELDS[name], TrainedRows(some, width, device))
    if tied:
        decoder.head_rows = decoder.embedding_rows


def trained_rows(model: nn.Module) -> Iterator[tuple[str, TrainedRows]]:
    """(name of the module in a decoder, its trained rows); of tied ones the embedding's."""
    found: set[TrainedRows] = set()
    for name, field in FIELDS.items():
        rows = getattr(model, field, None)
        if rows is not None and rows not in found:
            found.add(rows)
            yield WHOLE[name], rows


def ties_rows(model: nn.Module) -> bool:
    """Whether trained rows are those of the embedding and of the output layer."""
    rows = getattr(model, "head_rows", None)
    return rows is not None and rows is getattr(model, "embedding_rows", None)


def with_trained(rows: Tensor, first: int, ids: Sequence[int], trained: Tensor) -> Tensor:
    """Rows `[n, hidden]` of a weight from `first` on, with the trained ones in them, fp32."""
    found = rows.to(torch.float32, copy=True)
    for index, row in zip(ids, trained, strict=True):
        if first <= index < first + len(rows):
            found[index - first] = row
    return found


def row_parameters(model: nn.Module) -> dict[str, Tensor]:
    """PEFT's key -> trained rows."""
    return {f"{KEY}{name}.{DELTA}": rows.weight for name, rows in trained_rows(model)}


@torch.no_grad()
def start_rows(model: nn.Module) -> None:
    """Sets trained rows to the base's, which must be loaded. Every rank must call it."""
    for name, rows in trained_rows(model):
        weight = cast(Tensor, model.get_submodule(name).weight)
        held, local = local_rows(weight), on_mesh(weight)
        local = local.fetch() if isinstance(local, QuantizedTensor) else local
        found = torch.zeros(rows.weight.shape, device=local.device)
        for part, values in row_chunks(local):
            first = held.start + part.start
            for at, index in enumerate(rows.ids):
                if first <= index < first + len(values):
                    found[at] = values[index - first]
        if isinstance(weight, DTensor):
            dist.all_reduce(found, group=shard_group(weight.device_mesh))
        local_part(rows.weight).copy_(found[local_rows(rows.weight)])
