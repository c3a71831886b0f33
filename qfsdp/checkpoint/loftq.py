"""Adapters that start by making up for what packing the base has lost.

LoftQ (https://arxiv.org/abs/2310.08659) starts LoRA where the packed weight and the product are
closest to the weight before it was packed. Here the packed base is as it is (LoftQ with one
iteration), and the product is the best of its rank for the error that is left:

    scaling * B A = the best rank-r approximation of W - dequantize(pack(W))

On SmolLM2 in NF4 rank 16 takes 10 to 14 % off the divergence from what the model predicted before
it was packed (1,100 tokens of GSM8K and others), rank 64 a third.

PiSSA (https://arxiv.org/abs/2404.02948) and LoftQ's further iterations pack W - B A instead of W: a
base of its own for every rank, seed and method. A packed folder, which all runs share and which is
never written, could not be that base, nor could an inference engine load the adapter onto it.

Each rank reads its rows of W again and holds the error of them, for one linear at a time. The best
approximation comes from randomized subspace iteration (Halko, Martinsson and Tropp,
https://arxiv.org/abs/0909.4061, section 4.5): products of its rows with a thin matrix, summed over
the ranks; nothing of the size of W is sent or gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.progress import streamed
from qfsdp.checkpoint.weights.read import STORED_DTYPES, Read
from qfsdp.cli.errors import UserError
from qfsdp.modules.adapters import (
    LowRankLinear,
    held_rows,
    low_rank_linears,
    row_chunks,
    seeded,
    start_magnitudes,
)
from qfsdp.tensor_subclasses.dtensor import local_part, local_rows, on_mesh, shard_group
from qfsdp.tensor_subclasses.plain import PlainRows
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

# The error is noise, its singular values fall slowly: of what the best approximation takes off (in
# squares) 4 iterations with no further columns got 91 to 98 % on SmolLM2, these 99.8 and more.
FURTHER_COLUMNS, ITERATIONS = 32, 8  # beside one per rank of the product; or as many as ranks


def check_loftq(model: nn.Module, weights: ModelWeights) -> None:
    """The preflight of `init_loftq`; `model` may be on the meta device.

    Raises:
        UserError: nothing that is adapted is packed, or the weights before that are not there.
    """
    if weights.quantized:
        raise UserError(
            f"adapter.init: 'loftq' needs the weights before they were packed, and model.path "
            f"'{weights.folder}' holds packed ones; name the folder that they were made from (with "
            "model.quantize_cache they are packed only once), or set adapter.init=default"
        )
    if not list(_packed_linears(model)):
        raise UserError(
            "adapter.init: 'loftq' makes up for what packing loses, and no adapted linear is "
            "packed; set quantization.format=nf4, or adapter.init=default"
        )


@torch.no_grad()
def init_loftq(model: nn.Module, weights: ModelWeights, seed: int) -> None:
    """Sets A and B of every packed linear to the best product for its error, and DoRA's magnitudes
    to the row norms that follow. Every rank must call it.

    The result depends on seed and names alone; on ranks, to rounding. Directions beyond the rank of
    an error, and linears that are not packed, keep the start that they have.

    Args:
        model: loaded and sharded, its adapters at their usual start (`init_adapters`).
        weights: what was packed, as it was before.
        seed: of the thin matrix that the iteration begins with.
    """
    linears = list(_packed_linears(model))
    reads = []
    for name, module in linears:
        held = local_rows(module.lora_B)
        device = on_mesh(module.lora_B).device
        reads.append(Read(weights.plain[f"{name}.weight"], range(held.start, held.stop), device))
    with streamed(reads, progress=False) as pieces:
        for (name, module), read in zip(linears, reads, strict=True):
            error = _error_of_packing(module, read, next(pieces))
            generator = seeded(seed, f"{name} loftq")
            total = _sum_over_ranks(module.lora_B)
            _start_from(module, *best_product(error, module.lora_A.size(0), generator, total))
    start_magnitudes(model)


def _packed_linears(model: nn.Module) -> Iterator[tuple[str, LowRankLinear]]:
    for name, module in low_rank_linears(model):
        weight = local_part(module.weight)
        if isinstance(weight, QuantizedTensor) and weight.format != PlainRows.format:
            yield name, module


def _error_of_packing(module: LowRankLinear, read: Read, pieces: Iterator[Tensor]) -> Tensor:
    """`[rows, in]`, W - dequantize(packed) of this rank's rows, in the dtype of the stored W."""
    rows, cols = len(read.rows), read.tensor.shape[1]
    error = torch.empty(rows, cols, dtype=STORED_DTYPES[read.tensor.dtype], device=read.device)
    at = 0
    for piece in pieces:
        error[at : at + len(piece)] = piece
        at += len(piece)
    for part, packed in row_chunks(held_rows(module.weight, module.lora_B, read.device)):
        error[part] = error[part].float() - packed.float()
    return error


def best_product(
    error: Tensor,
    rank: int,
    generator: torch.Generator,
    total: Callable[[Tensor], Tensor] = lambda summand: summand,
) -> tuple[Tensor, Tensor, Tensor]:
    """The best approximation U diag(S) V of `rank` for a matrix of which ranks hold rows.

    Args:
        error: `[rows, in]`, this rank's.
        generator: on the CPU, in the same state on every rank.
        total: sums a tensor over the ranks.

    Returns:
        U `[rows, rank]` of these rows, S `[rank]`, largest first, and V `[rank, in]`; fp32. Where
        the matrix has a lower rank, zeros.
    """
    cols = error.size(1)
    width = min(rank + max(rank, FURTHER_COLUMNS), cols)
    basis = torch.randn(cols, width, generator=generator).to(error.device)
    for _ in range(ITERATIONS):
        product = torch.zeros_like(basis)
        for _, rows in row_chunks(error):
            rows = rows.float()
            product.addmm_(rows.t(), rows @ basis)
        basis = torch.linalg.qr(total(product))[0]
    sketch = torch.cat([rows.float() @ basis for _, rows in row_chunks(error)])
    squares, vectors = torch.linalg.eigh(total(sketch.t() @ sketch).double())
    s = squares.flip(0)[:rank].clamp(min=0).sqrt().float()
    vectors = vectors.flip(1)[:, :rank].float()
    v = vectors.t() @ basis.t()
    # An eigenvector's sign is arbitrary, and another one where numbers were added in another order.
    sign = v.sum(1).sign()
    found = s > 1e-3 * s[0]  # squares in fp32 tell no smaller ones from rounding
    u = sketch @ (vectors * torch.where(found, sign / s, 0.0))
    s, v = torch.where(found, s, 0.0), v * torch.where(found, sign, 0.0).unsqueeze(1)
    lacking = max(0, rank - cols)
    return F.pad(u, (0, lacking)), F.pad(s, (0, lacking)), F.pad(v, (0, 0, 0, lacking))


def _sum_over_ranks(param: Tensor) -> Callable[[Tensor], Tensor]:
    """Over those that hold the rows of `param` among them."""

    def total(summand: Tensor) -> Tensor:
        if isinstance(param, DTensor):
            dist.all_reduce(summand, group=shard_group(param.device_mesh))
        return summand

    return total


def _start_from(module: LowRankLinear, u: Tensor, s: Tensor, v: Tensor) -> None:
    """A and B with scaling * B A = U diag(S) V, half of S in each of them."""
    half = (s / module.scaling).sqrt()
    a, held = local_part(module.lora_A), local_rows(module.lora_A)
    found = (s > 0).unsqueeze(1)[held].to(a.device)
    a.copy_(torch.where(found, (half.unsqueeze(1) * v)[held].to(a.device), a))
    local_part(module.lora_B).copy_(u * half)
