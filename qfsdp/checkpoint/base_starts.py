"""PiSSA and OLoRA: adapters that start as the largest part of the base.

    W = W_res + s B A       A and B are trained, W_res = W - s B A is frozen in place of W

PiSSA (https://arxiv.org/abs/2404.02948): s B A is the best rank-r approximation of W, with the root
of each singular value in A and in B. Over a quantized base, W_res is what is quantized: without the
largest singular values its numbers are smaller, and so are their errors.

OLoRA (https://arxiv.org/abs/2406.01775): W = Q R; B is the first r columns of Q, which are
orthonormal, and A the first r rows of R. The base loses s B A.

Cost: the start reads W once more. PiSSA multiplies it 17 times by thin matrices (`best_product`, W
is never gathered); OLoRA decomposes `[out, rank]`. A and B of the start stay beside the trained
ones, frozen and sharded like them.

All of it is computed in fp64. In fp32 its rounding, which depends on the number of ranks, put some
numbers of W_res into another code of NF4: losses of 1 and 2 ranks differed by 7e-5.

`plain_lora` writes the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from qfsdp.checkpoint.loftq import best_product, original_rows, set_product, sum_over_ranks
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import seeded, start_magnitudes
from qfsdp.modules.low_rank.linear import LowRankLinear, low_rank_linears
from qfsdp.tensor_subclasses.dtensor import gather_rows, local_part, local_rows, whole_tensor
from qfsdp.tensor_subclasses.frozen_weight import row_chunks
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor


def check_base_start(model: nn.Module, config: AdapterConfig, weights: ModelWeights) -> None:
    """The preflight of `init_from_base`; `model` may be on the meta device. Raises UserError:
    experts, routers or `lm_head` are adapted, the rank is too large, or the original weights are
    not available."""
    if weights.quantized:
        raise UserError(
            f"adapter.init: {config.init!r} needs the original weights, and model.path "
            f"'{weights.folder}' holds quantized ones; expected the folder that they come from"
        )
    for name, module in low_rank_linears(model):
        if type(module) is not LowRankLinear or name == "lm_head":
            raise UserError(
                f"adapter.init: {config.init!r} has no start for {name}; expected "
                "adapter.init=default, or adapter.targets without it"
            )
        if module.lora_A.size(0) > (most := min(module.weight.shape)):
            side = f"at most {most}, the smaller side of {name}, with init {config.init}"
            raise UserError(f"adapter.rank: {module.lora_A.size(0)}; expected {side}")


@torch.no_grad()
def init_from_base(
    model: nn.Module, config: AdapterConfig, weights: ModelWeights, seed: int
) -> None:
    """Moves a part of every adapted linear's weight into A and B. Every rank must call it.

    The result depends on the seed and the names only, up to rounding on other numbers of ranks.

    Args:
        model: loaded and sharded, with initialized adapters (`init_adapters`).
        weights: the original weights.
        seed: of the thin matrices that PiSSA's iteration starts with.
    """
    for name, module, weight in original_rows(list(low_rank_linears(model)), weights, "weight"):
        # All rows, where the base is replicated and adapters are sharded.
        first, own = local_rows(module.weight).start, local_rows(module.lora_B)
        mine = weight[own.start - first : own.stop - first]
        if config.init == "pissa":
            rank = module.lora_A.size(0)
            generator, total = seeded(seed, f"{name} pissa"), sum_over_ranks(module.lora_B)
            set_product(module, *best_product(mine, rank, generator, total, torch.float64))
        else:
            _set_orthonormal(module, mine)
        _take_away(module, weight, name)
        module.base_squares = None
    start_magnitudes(model)


def _set_orthonormal(module: LowRankLinear, weight: Tensor) -> None:
    """Sets B to the first columns of Q, and A to the first rows of R, of W = Q R.

    Args:
        weight: `[rows, in]`, those of this rank's B.
    """
    rank, b, held = module.lora_B.size(1), local_part(module.lora_B), local_rows(module.lora_A)
    b.copy_(weight[:, :rank])
    q = torch.linalg.qr(whole_tensor(module.lora_B).double())[0]
    mine = q[local_rows(module.lora_B)]
    r = q.new_zeros(rank, weight.size(1))
    for part, rows in row_chunks(weight):
        r.addmm_(mine[part].t(), rows.double())
    r = sum_over_ranks(module.lora_B)(r).triu_()
    b.copy_(mine)
    local_part(module.lora_A).copy_(r[held])


def _take_away(module: LowRankLinear, weight: Tensor, name: str) -> None:
    """Writes W - s B A over the frozen weight, quantized if that is.

    Args:
        weight: `[rows, in]`, this rank's rows of W.
    """
    held = local_rows(module.weight)
    a, b = whole_tensor(module.lora_A).double(), whole_tensor(module.lora_B)[held].double()
    local = local_part(module.weight)

    def rest() -> Iterator[tuple[slice, Tensor]]:
        for part, rows in row_chunks(weight):
            left = torch.addmm(rows.double(), b[part], a, alpha=-module.scaling)
            yield part, left.float()

    if isinstance(local, QuantizedTensor):
        pieces = (rows for _, rows in rest())
        local.quantize_(pieces, name, partial(gather_rows, module.weight))
        return
    for part, rows in rest():
        local[part].copy_(rows)
