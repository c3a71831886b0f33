"""The feed-forward of a layer that is a mixture of experts (arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor, nn

from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.experts.router import Router
from qfsdp.modules.experts.routing import routing_sums
from qfsdp.modules.experts.stacked import Experts
from qfsdp.modules.mlp import MLP


class MixtureMLP(nn.Module):
    """A router, the experts that it chooses among for every token, and what all tokens share.

    Fields:
        exchange: computes experts of other ranks too (`qfsdp.distributed.expert_parallel`); None:
            this rank computes all.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        part, hidden = config.experts, config.hidden_size
        assert part is not None
        self.router_name = part.router.name
        setattr(self, self.router_name, Router(hidden, part))
        self.experts, self.shared = Experts(hidden, part), part.shared
        self.exchange: Callable[[Experts, Tensor, Tensor, Tensor], Tensor] | None = None
        if part.shared is not None:
            setattr(self, part.shared.name, MLP(config, part.shared.intermediate_size))
            if part.shared.gate is not None:
                setattr(self, part.shared.gate, nn.Linear(hidden, 1, bias=False))

    @property
    def router(self) -> Router:
        # By the dictionary: gpt-oss calls it "router", and this property would find itself.
        return cast(Router, self._modules[self.router_name])

    def forward(self, x: Tensor, counted: Tensor | None = None) -> Any:
        """`[..., hidden]` -> `[..., hidden]`. Every token is routed by itself: neither padding nor
        other samples change its result, and none is dropped. With `counted`, also the
        `routing_sums` of these tokens."""
        tokens = x.flatten(0, -2)
        scores, chosen, weights = self.router(tokens)
        given = (tokens, chosen, weights)
        y: Tensor = self.exchange(self.experts, *given) if self.exchange else self.experts(*given)
        if self.shared is not None:
            y = y + self._shared(tokens)
        if counted is None:
            return y.view_as(x)
        if not self.router.config.aux_loss:
            scores = scores.detach()
        return y.view_as(x), routing_sums(scores, chosen, counted)

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared is not None
        y: Tensor = getattr(self, self.shared.name)(x)
        gate = self.shared.gate
        return y if gate is None else torch.sigmoid(getattr(self, gate)(x)) * y

    def stages(self) -> list[tuple[Fraction, list[nn.Module]]]:
        """As of `MLP`: a token multiplies the rows of its experts."""
        share = Fraction(self.router.top_k, self.experts.config.count)
        inner, outer = self.experts.gate_up_proj, self.experts.down_proj
        stages: list[tuple[Fraction, list[nn.Module]]] = [
            (Fraction(1), [self.router]),
            (share, [inner]),
            (share, [outer]),
        ]
        if self.shared is None:
            return stages
        gate = [] if self.shared.gate is None else [getattr(self, self.shared.gate)]
        dense = cast(MLP, getattr(self, self.shared.name)).stages()
        return [*stages, *dense, (Fraction(1), gate)]


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the experts of all layers, adapters included."""
    mixtures = (module for module in model.modules() if isinstance(module, MixtureMLP))
    return [param for mixture in mixtures for param in mixture.experts.parameters()]
