"""Routers: which experts a token goes to, and with what weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfsdp.modules.decoder_parts import ExpertsConfig, RouterConfig
from qfsdp.modules.kept_fp32 import KeepsFp32


class ChoosesExperts(KeepsFp32):
    """What a router does with its scores: the best `top_k` experts of a token are chosen.

    Scores are computed in the dtype of the model, their softmax in fp32, as `transformers` does.
    With "sigmoid", scores are computed in fp32 too.

    Fields:
        top_k: experts of a token; config: the family's router.
        e_score_correction_bias: `[experts]` with "sigmoid", else None. It balances the choice of
            experts and is never trained. Always fp32: its numbers differ by less than bf16 shows.
    """

    top_k: int
    config: RouterConfig
    e_score_correction_bias: nn.Parameter | None

    def scores(self, x: Tensor) -> Tensor:
        """`[n, hidden]` -> `[n, experts]`, computed in x's dtype."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routes tokens.

        Args:
            x: `[n, hidden]`.

        Returns:
            Scores `[n, experts]` before softmax or sigmoid; the chosen experts, int64 `[n, top_k]`;
            and their weights, `[n, top_k]` of x's dtype.
        """
        if self.config.kind == "sigmoid":
            scores = self.scores(x.float())
            chosen, weights = self._by_sigmoid(scores.sigmoid())
        else:
            scores = self.scores(x)
            chosen, weights = self._by_softmax(scores)
        return scores, chosen, weights.to(x.dtype)

    def _by_softmax(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.kind == "chosen":
            best, chosen = scores.topk(self.top_k, dim=-1)
            return chosen, best.softmax(-1, dtype=torch.float32)
        weights, chosen = scores.softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.config.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights

    def _by_sigmoid(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        """The correction counts for the choice, not for the weights (arXiv:2412.19437, 2.1.2)."""
        assert self.e_score_correction_bias is not None
        corrected = (shares + self.e_score_correction_bias).detach()
        chosen = self._in_best_groups(corrected).topk(self.top_k, dim=-1).indices
        weights = shares.gather(1, chosen)
        if self.config.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self.config.factor

    def _in_best_groups(self, shares: Tensor) -> Tensor:
        """-inf for the experts of all groups but the best. A group is as good as its two best
        experts together."""
        groups, count = self.config.groups, self.config.chosen_groups
        if groups == count:
            return shares
        grouped = shares.unflatten(1, (groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(count, dim=-1).indices
        others = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(others.unsqueeze(-1), -torch.inf).flatten(1)


class Router(ChoosesExperts):
    """One score for every token and expert.

    Fields:
        weight: `[experts, hidden]`.
        bias: `[experts]`, added to the scores, or None.
    """

    def __init__(self, hidden: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.top_k, self.config = config.top_k, config.router
        self.weight = nn.Parameter(torch.empty(config.count, hidden))
        self.bias = nn.Parameter(torch.empty(config.count)) if config.router.bias else None
        self.e_score_correction_bias = None
        if config.router.kind == "sigmoid":
            correction = torch.zeros(config.count, dtype=torch.float32)
            self.e_score_correction_bias = nn.Parameter(correction, requires_grad=False)

    def scores(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)
