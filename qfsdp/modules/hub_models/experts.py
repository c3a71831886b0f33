"""The experts of transformers' mixtures as stacked linears of ours: rows of one weight for all.

transformers holds the experts of a layer as parameters `[experts, out, in]`, and asks its
`ExpertsInterface` for the function that computes them. Each parameter becomes an `ExpertLinear` of
the same name, so what quantizes, adapts, shards and loads our own mixtures does it to these, and
the function is that of our mixtures (`weighted_experts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from qfsdp.modules.experts.stacked import ExpertLinear, weighted_experts

FUNCTION = "qfsdp"  # in transformers' table of functions of experts
# Fields that transformers gives its classes of experts -> the value that is expected.
FORM = {"has_bias": False, "is_transposed": False, "has_post_expert_norm": False}


def stacked_experts(hf: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of all experts that become linears. Those with biases, with norms of their
    outputs, or of classes that do not ask for a function, stay as they are."""
    for name, module in hf.named_modules():
        if all(getattr(module, key, None) is value for key, value in FORM.items()):
            own = dict(module.named_parameters(recurse=False))
            if own.keys() == {_inner(module), "down_proj"}:
                yield from ((f"{name}.{field}", param) for field, param in own.items())


def take_experts(hf: nn.Module) -> list[str]:
    """Replaces the stacked parameters of experts in `hf`, on the meta device, by `ExpertLinear`s;
    their names."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(FUNCTION, _forward)
    taken = []
    for name, param in list(stacked_experts(hf)):
        owner, _, field = name.rpartition(".")
        module: Any = hf.get_submodule(owner)
        linear = ExpertLinear(param.size(0), param.size(2), param.size(1), bias=False)
        rows = param.detach().flatten(0, 1)
        linear.weight = nn.Parameter(rows, requires_grad=param.requires_grad)
        delattr(module, field)
        setattr(module, field, linear)
        module.config._experts_implementation = FUNCTION
        taken.append(name)
    return taken


def _inner(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _forward(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """transformers' function of experts: `[n, hidden]`, and of each token its experts and their
    weights `[n, top_k]` -> `[n, hidden]`."""
    activated = module._apply_gate if module.has_gate else module.act_fn
    linears = getattr(module, _inner(module)), activated, module.down_proj
    return weighted_experts(hidden, chosen, weights, module.down_proj.experts, *linears)
