"""The embedding and the output layer, split over ranks by rows of the vocabulary, never gathered.

`[vocab, hidden]` is the largest weight of a model: 2.1 GB in bf16 at 70B. Instead of its rows,
tokens travel. Every rank looks up its own rows of the embedding for the tokens of all ranks, and
computes the logits of its own rows of the output layer for the hidden states of all ranks, some
hundred tokens at a time:

    forward     hidden states of a chunk are gathered; each rank multiplies them by its rows
    softmax     the largest logit, the sum of exponentials and the target's logit are reduced
    backward    each rank's part of the hidden states' gradient is reduced and scattered

The loss is exact, not sampled. A trained weight gets the gradient of its own rows at once, summed
over the tokens of all ranks: nothing of its size is gathered or reduced. So the loss of every rank
must be multiplied by the same number, as in a mean over the tokens of all ranks.

Ranks may have different numbers of tokens. They agree on the largest, on the host, and fill up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from qfsdp.common.errors import UserError
from qfsdp.data.batch import IGNORE_INDEX
from qfsdp.distributed.own_rows import all_rows, own_parameter, own_rows
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World
from qfsdp.modules.adapters.whole import computed_in
from qfsdp.modules.collectives import reduce_scatter
from qfsdp.modules.distillation import Columns
from qfsdp.modules.hub_models.decoder import HubDecoder
from qfsdp.modules.loss import chunk_functions, chunk_tokens, summed_by_sample
from qfsdp.modules.low_rank.adapted import AdaptedLinear
from qfsdp.modules.quantized_linear import QuantizedLinear
from qfsdp.modules.score_head import score_head
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.dtensor import all_gather, local_rows, shard_group
from qfsdp.tensor_subclasses.kernels import dry_run
from qfsdp.tensor_subclasses.kernels.compiled import compiled
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

# Embedded tokens of all ranks that exist at once: 64 MB, 2,048 tokens of a 70B model on 2 ranks.
CHUNK_EMBEDDED_BYTES = 1 << 26


def splits_vocabulary(
    model: Decoder | HubDecoder, config: ShardingConfig, ranks: int, tokens: int | None
) -> bool:
    """Whether `model` is to be split; `config.vocabulary` says so, or "auto" and the sizes.

    Args:
        ranks: that share the rows.
        tokens: of a rank's micro-batch, at most; None: not known, and "auto" gathers.

    Raises:
        UserError: "split" cannot be had.
    """
    embedding, why = model.parts.embedding.weight, None
    rows = embedding.size(0)
    if config.vocabulary == "gather" or ranks == 1 or isinstance(model, HubDecoder):
        return False  # one rank has all rows; transformers' modules multiply by whole weights
    if config.strategy == "ddp" and not embedding.requires_grad:
        why = "but with sharding.strategy: ddp every rank holds the frozen base"
    elif score_head(model) is not None:
        why = "but the model has a score head instead of an output layer"
    elif config.cpu_offload:
        why = "but sharding.cpu_offload is true"
    elif (ranks - 1) * -(-rows // ranks) >= rows:
        why = f"but some of {ranks} ranks would have no row of a vocabulary of {rows}"
    if why is None:
        return config.vocabulary == "split" or (tokens or rows) * ranks < rows
    if config.vocabulary == "split":
        raise UserError(f"sharding.vocabulary: split, {why}; expected auto or gather")
    return False


class SplitVocabulary:
    """Computes what the embedding and the output layer of a decoder do; see `Decoder.split`.

    Makes their parameters, on the meta device, those of this rank's rows: DTensors as FSDP2 makes
    them, so that all else (loading, clipping, checkpoints) sees no difference.

    Args:
        mesh: of the decoder's units; rows are shared over its last dimension.

    Fields:
        parameters: of the embedding and the output layer, for FSDP2 to ignore.
    """

    def __init__(self, model: Decoder, mesh: DeviceMesh, world: World) -> None:
        self.group = shard_group(mesh)
        self.ranks, self.rank = self.group.size(), self.group.rank()
        self._on_host = _host_group(mesh, world)
        self._dtype = computed_in(model)
        self._vocabulary = model.config.vocab_size
        made: dict[nn.Parameter, nn.Parameter] = {}  # one of a tied weight
        for module in (*model.parts.embedding.modules(), *model.lm_head.modules()):
            for name, param in list(module.named_parameters(recurse=False)):
                if param not in made:
                    made[param] = own_parameter(param, mesh)
                setattr(module, name, made[param])
        self.parameters = set(made.values())
        own = local_rows(model.parts.embedding.weight)
        self.first, self.rows = own.start, own.stop - own.start

    # ---- embedding ---------------------------------------------------------------------------

    def embedded(self, embedding: nn.Embedding, tokens: Tensor) -> Tensor:
        """`embedding(tokens)`: `[..., hidden]` in the compute dtype. Collective."""
        flat = _LookUp.apply(own_rows(embedding.weight), tokens.flatten(), self)
        return cast(Tensor, flat).view(*tokens.shape, -1)

    def _places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where `ids` are among this rank's rows, and whether they are; else place 0."""
        places = ids - self.first
        mine = (places >= 0) & (places < self.rows)
        return places.masked_fill(~mine, 0), mine

    # ---- output layer ------------------------------------------------------------------------

    def logits(self, head: nn.Module, hidden: Tensor) -> Tensor:
        """`head(hidden)`, without gradients: `[..., vocab]`. Collective.

        Raises:
            RuntimeError: gradients are recorded.
        """
        if torch.is_grad_enabled() and hidden.requires_grad:
            what = "logits with gradients, and sharding.vocabulary is split"
            raise RuntimeError(f"{what}; expected labels too, or sharding.vocabulary: gather")
        flat = hidden.flatten(0, -2)
        most = self.largest(len(flat))
        own, trained = self.own_part(head)
        logits, _ = chunk_functions(own, trained, self._losses_and_gradient_)
        mine = logits(self.gathered(filled(flat, most)).flatten(0, 1))
        width = -(-self._vocabulary // self.ranks)
        mine = F.pad(mine, (0, width - mine.size(1))).view(self.ranks, most, width)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        whole = theirs[:, : len(flat)].transpose(0, 1).flatten(1)
        return whole[:, : self._vocabulary].view(*hidden.shape[:-1], -1)

    def loss(self, head: nn.Module, *given: Any, taught: Any = None, rows: Any = None) -> Tensor:
        """`head_loss` of the same arguments. Collective, and so is its backward."""
        own, trained = self.own_part(head)
        trained += [] if rows is None else rows.trained
        in_chunks = partial(self._in_chunks, own, taught, rows)
        return summed_by_sample(in_chunks, trained, *given)

    def own_part(self, head: nn.Module) -> tuple[nn.Module, list[Tensor]]:
        """The output layer with this rank's rows, to compute with, and its trained tensors."""
        given = {
            name: own_rows(param) if param.size(0) == self._vocabulary else all_rows(param)
            for name, param in head.named_parameters()
        }
        trained = [t for t in given.values() if t.requires_grad and torch.is_grad_enabled()]
        if isinstance(head, AdaptedLinear):
            return _WithTensors(head, given), trained
        weight = given["weight"]
        if isinstance(weight, QuantizedTensor):
            return QuantizedLinear(weight.fetch(), None), trained
        weight = weight.detach()
        own = nn.Linear(1, 1, bias=False, device="meta")
        own.weight = nn.Parameter(weight.to(self._dtype), requires_grad=False)
        return own, trained

    def _in_chunks(
        self,
        own: nn.Module,
        taught: Any,
        rows: Any,
        trained: Sequence[Tensor],
        hidden: Tensor,
        labels: Tensor,
        wanted: bool,
        weights: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
        """As `loss._in_chunks`, over the tokens of all ranks; `own` has this rank's rows."""
        most, loss = self.largest(len(hidden)), cast(Any, self._losses_and_gradient_)
        step, said = chunk_tokens(self._vocabulary), cast(tuple[Tensor, ...], ())
        if taught is not None:
            loss, targets, step = taught.of_chunks(loss, labels, step, _OwnColumns(self))
            said = targets.said
        grad_hidden = torch.zeros_like(hidden) if wanted else None
        grads = [torch.zeros_like(param, dtype=torch.float32) for param in trained]
        logits, gradients = chunk_functions(own, trained, loss, None, rows, self.first)
        all_labels = self.gathered(filled(labels, most, IGNORE_INDEX))
        all_weights = None if weights is None else self.gathered(filled(weights, most))
        losses = []
        for start in range(0, most, step):
            part, width = slice(start, min(start + step, most)), min(step, most - start)
            count = max(0, min(part.stop, len(hidden)) - start)  # tokens of this rank
            everyone = self.gathered(filled(hidden[part], width)).flatten(0, 1)
            of_labels: Any = all_labels[:, part].flatten()
            if taught is not None:
                of_all = (self.gathered(filled(one[part], width)).flatten(0, 1) for one in said)
                of_labels = replace(targets, labels=of_labels, said=tuple(of_all))
            if grad_hidden is None:
                of_chunk = loss(logits(everyone), of_labels, None)[0]
            else:
                of_rows = None if all_weights is None else all_weights[:, part].flatten()
                of_chunk, of_hidden = gradients(everyone, of_labels, of_rows, grads)
                grad_hidden[part] = self.scattered(of_hidden)[:count]
            losses.append(of_chunk.view(self.ranks, width)[self.rank, :count])
        return losses, grad_hidden, grads

    def _losses_and_gradient_(
        self, logits: Tensor, labels: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `loss._losses_and_gradient_`, of this rank's columns. Rows without a label come from
        hidden states of zeros: whatever their gradient is, it counts nothing."""
        places, mine = (t.unsqueeze(1) for t in self._places(labels))
        largest = logits.amax(1, keepdim=True).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        targets = logits.gather(1, places).float().masked_fill_(~mine, 0)
        sums = torch.stack([_sum_of_exponentials(logits, largest), targets])
        dist.all_reduce(sums, group=self.group)
        total, targets = sums[0].log_().add_(largest), sums[1]
        _softmax_(logits, total)
        rows = torch.arange(len(logits), device=logits.device).unsqueeze(1)
        of_targets = torch.expm1(targets - total).to(logits.dtype)
        of_targets = torch.where(mine, of_targets, logits.gather(1, places))
        logits.index_put_((rows, places), of_targets)
        if weights is not None:
            logits *= weights.unsqueeze(1)
        return (total - targets).squeeze(1), logits

    # ---- collectives -------------------------------------------------------------------------

    def largest(self, number: int) -> int:
        """The largest `number` of any rank. The host waits for the other hosts, not for a device.
        In a dry run all ranks have the same."""
        if dry_run.current is not None:
            return number
        largest = torch.tensor([number])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._on_host)
        return int(largest.tolist()[0])

    def gathered(self, mine: Tensor) -> Tensor:
        """`mine` of every rank, `[ranks, ...]`."""
        everyone = mine.new_empty(self.ranks, *mine.shape)
        all_gather(everyone.flatten(0, 1), mine.contiguous(), group=self.group)
        return everyone

    def scattered(self, parts: Tensor) -> Tensor:
        """The sum over ranks of this rank's share of `parts` `[ranks * n, ...]`: `[n, ...]`."""
        mine = parts.new_empty(len(parts) // self.ranks, *parts.shape[1:])
        reduce_scatter(mine, parts.contiguous(), group=self.group)
        return mine


class _OwnColumns(Columns):
    """The columns of this rank, of the logits of all ranks' tokens."""

    def __init__(self, split: SplitVocabulary) -> None:
        self._split = split

    def largest(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self._split.group)
        return x

    def summed(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._split.group)
        return x

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._split._places(ids)

    def own_sum(self, losses: Tensor, labels: Tensor) -> Tensor:
        # Every rank has the losses of all tokens, and counts as many of them as the others.
        return (losses * (labels != IGNORE_INDEX)).sum() / self._split.ranks


def filled(x: Tensor, length: int, value: int = 0) -> Tensor:
    """`x` with rows of `value` up to `length`."""
    if len(x) == length:
        return x
    return torch.cat([x, x.new_full((length - len(x), *x.shape[1:]), value)])


@compiled
def _sum_of_exponentials(logits: Tensor, largest: Tensor) -> Tensor:
    """fp32 `[n, 1]`, the sum of exp(logits - largest) over each row."""
    return (logits.float() - largest).exp().sum(1, keepdim=True)


@compiled
def _softmax_(logits: Tensor, total: Tensor) -> None:
    """exp(logits - total) in place, computed in fp32."""
    logits.copy_((logits.float() - total).exp())


class _LookUp(torch.autograd.Function):
    """This rank's rows of the embedding, and its tokens -> its tokens' embeddings."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, tokens: Tensor, split: SplitVocabulary) -> Tensor:
        ctx.split, ctx.count = split, len(tokens)
        most, dtype = split.largest(len(tokens)), split._dtype
        places, mine = split._places(split.gathered(filled(tokens, most)))
        ctx.save_for_backward(places, mine)
        found = rows.new_empty(most, rows.size(1), dtype=dtype)
        step = max(1, CHUNK_EMBEDDED_BYTES // (split.ranks * found[:1].nbytes))
        for start in range(0, most, step):
            part = slice(start, start + step)
            x = F.embedding(places[:, part].flatten(), rows).to(dtype)
            x.masked_fill_(~mine[:, part].flatten().unsqueeze(1), 0)
            found[part] = split.scattered(x)  # one rank has a number, the others zero: exact
        return found[: len(tokens)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        split, (places, mine) = ctx.split, ctx.saved_tensors
        everyone = split.gathered(filled(grad, places.size(1))).flatten(0, 1)
        # One row more, for the tokens of other ranks.
        rows = places.masked_fill(~mine, split.rows).flatten()
        dense = torch.ops.aten.embedding_dense_backward(
            everyone.float(), rows, split.rows + 1, -1, False
        )
        return dense[: split.rows], None, None


class _WithTensors(nn.Module):
    """`module`, computed with other tensors than its own parameters."""

    def __init__(self, module: nn.Module, given: dict[str, Tensor]) -> None:
        super().__init__()
        fetched = {n: t.fetch() if isinstance(t, QuantizedTensor) else t for n, t in given.items()}
        self._call = partial(functional_call, module, fetched)
        self.weight = fetched["weight"]

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._call(x))


def _host_group(mesh: DeviceMesh, world: World) -> dist.ProcessGroup:
    """The ranks that share rows, connected by their hosts."""
    if mesh.ndim == 1 and world.hosts is not None:
        return world.hosts
    if world.device.type == "cpu":
        return shard_group(mesh)
    groups = mesh.mesh.view(-1, mesh.size(mesh.ndim - 1)).tolist()
    mine = next(group for group in groups if world.rank in group)
    # A subgroup that all ranks make together hangs on NCCL: with a `device_id`, ranks outside of it
    # call ncclCommSplit and wait for its members (pytorch#145376).
    return dist.new_group(
        mine, timeout=world.timeout, backend="gloo", use_local_synchronization=True
    )
