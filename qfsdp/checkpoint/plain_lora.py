"""The adapter of a run whose start has changed the base (`base_starts`), as one of the usual base.

The base of such a run is nowhere on disk. So the adapter is written for W, as LoRA of rank 2r:

    B A - B0 A0 = (B - B0) A + B0 (A - A0)      A0, B0: the start

Each product has a factor that is the small change, so rounding to bf16 costs a part of the change.
PEFT's conversion, which subtracts B0 A0 from B A, loses a part of W. Over a quantized base the
adapter fits W in full precision: quantize(W) has other errors than quantize(W_res).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.low_rank.linear import low_rank_linears

# Field of a module's `start` -> end of its key in checkpoints.
START_FIELDS = {"lora_A": "start_A", "lora_B": "start_B"}
A, B = ".lora_A.weight", ".lora_B.weight"


def start_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Key -> A or B of the start, of every linear whose start has changed the base."""
    return {
        f"base_model.model.{name}.{end}": module.start[field]
        for name, module in low_rank_linears(model)
        for field, end in (START_FIELDS.items() if module.changes_base else ())
    }


def as_lora(
    tensors: dict[str, Tensor], config: AdapterConfig
) -> tuple[dict[str, Tensor], AdapterConfig]:
    """Adapter tensors as those of an adapter of the unchanged base, and its config: of twice the
    rank and the same scaling; unchanged if the start has not changed the base."""
    if not config.changes_base:
        return tensors, config
    found = {}
    for key, tensor in tensors.items():
        stem, field = key.removesuffix(A).removesuffix(B), key[-len(A) :]
        if field == A:
            found[key] = torch.cat([tensor, tensor - tensors[f"{stem}.{START_FIELDS['lora_A']}"]])
        elif field == B:
            start = tensors[f"{stem}.{START_FIELDS['lora_B']}"]
            found[key] = torch.cat([tensor - start, start], 1)
        elif not key.endswith(tuple(START_FIELDS.values())):
            found[key] = tensor
    factor = 2**0.5 if config.rslora else 2
    ranks, alphas = config.rank_pattern, config.alpha_pattern
    return found, replace(
        config,
        rank=2 * config.rank,
        alpha=factor * config.alpha,
        rank_pattern=None if ranks is None else {end: 2 * n for end, n in ranks.items()},
        alpha_pattern=None if alphas is None else {end: factor * n for end, n in alphas.items()},
        init="default",
    )
