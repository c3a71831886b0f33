"""A head that gives a row one score or one per class, in the place of the output layer.

It is a linear without bias over the last hidden state of a row's last token. The name, shape and
place are those of transformers' `AutoModelForSequenceClassification`. The weight is trained as a
whole, in fp32, and so are the scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfsdp.common.errors import InvalidField, UserError

SCORE = "score"
START = 0.02  # deviation of the new weight, as transformers starts it


@dataclass
class HeadConfig:
    """Section `head`: the scores that a model gives to a row.

    Fields:
        classes: number of scores of a row. With 1 the score is a reward, trained on pairs. With
            more, each is the logit of a class, trained on labels.
        center: adds center * (sum of the two rewards)^2 to the loss of a pair, which keeps the mean
            reward near 0 (arXiv:2312.09244; TRL's `center_rewards_coefficient`). 0.01 is usual.
    """

    classes: int = 1
    center: float = 0.0

    def check(self) -> None:
        if not 1 <= self.classes <= 2**20:
            raise InvalidField("classes", self.classes, "an integer of at least 1")
        if not 0 <= self.center < float("inf"):
            raise InvalidField("center", self.center, "a number of at least 0")
        if self.center and self.classes > 1:
            raise InvalidField("center", self.center, "0 with classes above 1")


class ScoreHead(nn.Linear):
    """Scores `[..., classes]`, fp32, of hidden states of any dtype; the weight is fp32."""

    base_fields = ()  # see `base_parameters`

    def __init__(self, hidden_size: int, classes: int) -> None:
        super().__init__(hidden_size, classes, bias=False, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight)


def add_score_head(model: Any, config: HeadConfig) -> None:
    """Replaces the output layer of a `Decoder` on the meta device by an unset `ScoreHead`.

    `init_adapters` starts it. Call it after `add_adapters`, which freezes the model. Raises
    UserError: the model is one of transformers', or other modules or rows are trained too."""
    if not hasattr(model, "output_name"):
        raise UserError(
            f"head: {model.config.architecture} is computed by transformers; expected a model that "
            "qfsdp builds itself (docs/guide/models.md)"
        )
    if (whole := getattr(model, "whole_modules", None)) is not None:
        expected = "expected null with a score head"
        raise UserError(f"adapter.modules_to_save: {sorted(whole)}; {expected}")
    if model.embedding_rows is not None or model.head_rows is not None:
        raise UserError(
            "adapter.trainable_token_indices: not null; expected null with a score head"
        )
    if model.config.takes_more_than_text:
        raise UserError("head: not null; expected null, as this model takes more than text")
    factors = replace(model.config.multipliers, logits=1.0)
    model.config = replace(model.config, tie_word_embeddings=False, multipliers=factors)
    delattr(model, model.output_name)
    with torch.device("meta"):
        setattr(model, SCORE, ScoreHead(model.config.hidden_size, config.classes))
    model.output_name = SCORE


def score_head(model: nn.Module) -> ScoreHead | None:
    """The head of a model; None: it has an output layer."""
    found = getattr(model, SCORE, None)
    return found if isinstance(found, ScoreHead) else None
