"""How evenly the routers of a model use its experts: the load-balancing loss, and metrics of it.

The loss is that of the Switch Transformer (arXiv:2101.03961, equations 4 to 6) as `transformers`
computes it for the models that have it: over the tokens of all layers together,

    loss = experts * sum over experts e of  f[e] * P[e]

f[e] is how often a token chooses e (top_k in all), P[e] its mean probability. It is top_k if the
experts are used evenly. It is no mean over tokens: it depends on which tokens are taken together.
Here these are the tokens of one row of a batch: a sample, or a pack. The loss of a step is the mean
of its rows, weighted by their targets, so it does not depend on how rows are split over
micro-batches and ranks. For one row in a micro-batch it is the value of `transformers`.

Tokens count up to the last one that is a target: padding, and what no target sees, does not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qfsdp.common.errors import UserError
from qfsdp.data.batch import IGNORE_INDEX
from qfsdp.data.cut_rows import CutRows
from qfsdp.modules.collectives import over_parts


def routing_sums(scores: Tensor, chosen: Tensor, counted: Tensor) -> Tensor:
    """What one layer's router did.

    Args:
        scores: `[batch * seq, experts]`, before the softmax.
        chosen: int64 `[batch * seq, top_k]`.
        counted: bool `[batch, seq]`.

    Returns:
        fp32 `[batch, 3, experts]`, sums over the counted tokens of a row: how often an expert was
        chosen; its probability p; and -p log p. Only p has a gradient.
    """
    batch, (experts, top_k) = len(counted), (scores.size(1), chosen.size(1))
    p = scores.softmax(-1, dtype=torch.float32).view(batch, -1, experts) * counted.unsqueeze(-1)
    times = counted.repeat_interleave(top_k, dim=1).to(torch.float32)
    choices = torch.zeros(batch, experts, device=scores.device)
    choices = choices.scatter_add(1, chosen.view(batch, -1), times)
    return torch.stack([choices, p.sum(1), torch.special.entr(p.detach()).sum(1)], 1)


def balance_loss(sums: Tensor, tokens: Tensor) -> Tensor:
    """The load-balancing loss.

    Args:
        sums: `[..., 3, experts]`, `routing_sums` added up over layers.
        tokens: `[...]`, how many tokens of all layers they count; 0 gives a loss of 0.
    """
    choices, probabilities, _ = (sums / tokens.clamp(min=1)[..., None, None]).unbind(-2)
    return sums.size(-1) * (choices * probabilities).sum(-1)


class Routing:
    """Adds up what the routers of a model do in training, and gives the balancing loss its place.

    Fields:
        factor: of the balancing loss in the loss of training; 0: it is not trained.
        group: name of the ranks that share rows, as of `Decoder`.
    """

    def __init__(self, factor: float) -> None:
        self.factor, self.group = factor, ""
        self._totals: Tensor | None = None  # [mixture layers, 3, experts]

    def follow(
        self,
        loss: Tensor,
        of_layers: list[Tensor],
        counted: Tensor,
        labels: Tensor,
        cut: CutRows | None = None,
    ) -> Tensor:
        """Adds the `routing_sums` of all mixtures in one micro-batch.

        Args:
            cut: `counted` and `labels` are parts of these rows.

        Returns:
            `loss`, the summed cross entropy, plus `factor` times the balancing loss of each row
            times its number of targets.

        Raises:
            UserError: `loss` is of samples, whose log-probabilities it is.
        """
        sums = torch.stack(of_layers)
        totals = sums.detach().sum(1)
        self._totals = totals if self._totals is None else self._totals + totals
        if not self.factor:
            return loss
        if loss.dim():
            why = "expected null, as log-probabilities of samples have no such loss in them"
            raise UserError(f"model.router_aux_loss: {self.factor}; {why}")
        sums, tokens = sums.sum(0), counted.sum(1)
        if cut is not None:  # a row's loss is no sum over its parts; its targets here weigh it
            sums, tokens = over_parts(sums, self.group), cut.lengths
        of_rows = balance_loss(sums, tokens * len(of_layers))
        targets = (labels != IGNORE_INDEX).sum(1)
        return loss + self.factor * (of_rows * targets).sum()

    def take(self) -> Tensor | None:
        """fp32 `[layers, 3, experts]`, the sums since the last call; None: there are none."""
        totals, self._totals = self._totals, None
        return totals


def routing_metrics(totals: Tensor, top_k: int) -> dict[str, float]:
    """Metrics of `Routing.take`, added up over all ranks.

    routing/busiest_expert  largest share of a layer's choices that one expert got; 1 / experts if
                            all are used evenly
    routing/unused_experts  share of the experts of all layers that no token chose
    routing/entropy         of a token's probabilities, over log(experts); the mean of all tokens
    routing/balance_loss    the balancing loss of all these tokens together; top_k at best
    """
    layers, _, experts = totals.shape
    choices = totals[:, 0]
    tokens = (choices.sum(1, keepdim=True) / top_k).clamp(min=1)
    entropy = totals[:, 2].sum(1) / tokens[:, 0] / math.log(max(experts, 2))
    balance = balance_loss(totals.sum(0), tokens.sum())
    return {
        "routing/busiest_expert": (choices / (tokens * top_k)).max().item(),
        "routing/unused_experts": (choices == 0).float().mean().item(),
        "routing/entropy": entropy.mean().item(),
        "routing/balance_loss": balance.item(),
    }
