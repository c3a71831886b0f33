"""LoftQ: adapters that start with a low-rank approximation of the quantization error.

LoftQ (https://arxiv.org/abs/2310.08659) initializes LoRA so that the quantized weight plus the
product is as close as possible to the original weight. Here the quantized base is fixed (LoftQ with
one iteration), and the product is the best of its rank for the error:

    scaling * B A = the best rank-r approximation of W - dequantize(quantize(W))

On SmolLM2 in NF4, rank 16 reduces the divergence from the unquantized model's predictions by 10 to
14 % (1,100 tokens of GSM8K and others), rank 64 by a third.

Further iterations of LoftQ quantize W - B A instead of W, as PiSSA does (`base_starts`): another
base for every rank, seed and method, which no quantized folder holds.

Each rank reads its rows of W again and holds their error, for one linear at a time. The best
approximation is computed by randomized subspace iteration (Halko, Martinsson and Tropp,
https://arxiv.org/abs/0909.4061, section 4.5): products of the rows with a thin matrix, summed over
the ranks. Nothing of the size of W is sent or gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.read import STORED_DTYPES, Read, streamed
from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.linears import LowRankExpertLinear, seeded, start_magnitudes
from qfsdp.modules.low_rank.linear import LowRankLinear, low_rank_linears
from qfsdp.tensor_subclasses.dtensor import local_part, local_rows, on_mesh, shard_group
from qfsdp.tensor_subclasses.frozen_weight import held_rows, row_chunks
from qfsdp.tensor_subclasses.plain import PlainRows
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

# The singular values of the error, which is noise, fall slowly. Of the best approximation's
# reduction (in squares), 4 iterations without extra columns reached 91 to 98 % on SmolLM2, and
# these settings 99.8 % and more.
EXTRA_COLUMNS = 32  # at least; otherwise as many as the product's rank
ITERATIONS = 8


def check_loftq(model: nn.Module, weights: ModelWeights) -> None:
    """The preflight of `init_loftq`; `model` may be on the meta device. Raises UserError: an expert
    is adapted, no adapted linear is quantized, or the original weights are not available."""
    if weights.quantized:
        raise UserError(
            f"adapter.init: 'loftq' needs the original weights, and model.path "
            f"'{weights.folder}' holds quantized ones; expected the folder that they come from "
            "(model.quantize_cache quantizes it only once), or adapter.init=default"
        )
    experts = [n for n, m in low_rank_linears(model) if isinstance(m, LowRankExpertLinear)]
    if experts:
        raise UserError(
            f"adapter.init: 'loftq' has no start for experts ({experts[0]}); expected "
            "adapter.init=default, or adapter.targets without gate_up_proj and down_proj"
        )
    if not list(_quantized_linears(model)):
        raise UserError(
            "adapter.init: 'loftq' compensates the quantization error, and no adapted linear is "
            "quantized; expected quantization.format=nf4, or adapter.init=default"
        )


@torch.no_grad()
def init_loftq(model: nn.Module, weights: ModelWeights, seed: int) -> None:
    """Sets A and B of every quantized linear to the best product for its error, and DoRA's
    magnitudes to the resulting row norms. Every rank must call it.

    The result depends on the seed and the names only, up to rounding on other numbers of ranks.
    Directions beyond the rank of an error, and linears that are not quantized, keep their values.

    Args:
        model: loaded and sharded, with initialized adapters (`init_adapters`).
        weights: the original weights.
        seed: of the thin matrix that the iteration starts with.
    """
    linears = list(_quantized_linears(model))
    for name, module, error in original_rows(linears, weights, "lora_B"):
        _subtract_quantized(module, error)
        generator = seeded(seed, f"{name} loftq")
        total = sum_over_ranks(module.lora_B)
        set_product(module, *best_product(error, module.lora_A.size(0), generator, total))
    start_magnitudes(model)


def _quantized_linears(model: nn.Module) -> Iterator[tuple[str, LowRankLinear]]:
    for name, module in low_rank_linears(model):
        weight = local_part(module.weight)
        if isinstance(weight, QuantizedTensor) and not isinstance(weight, PlainRows):
            yield name, module


def _subtract_quantized(module: LowRankLinear, weight: Tensor) -> None:
    """Makes of this rank's rows of W those of W - dequantize(quantized), in place."""
    for part, quantized in row_chunks(held_rows(module.weight, module.lora_B, weight.device)):
        weight[part] = weight[part].float() - quantized.float()


def original_rows(
    linears: Sequence[tuple[str, LowRankLinear]],
    weights: ModelWeights,
    like: Literal["weight", "lora_B"],
) -> Iterator[tuple[str, LowRankLinear, Tensor]]:
    """Of every linear its name, the module, and rows of W as they are stored, `[rows, in]`.

    Args:
        weights: the original weights.
        like: the parameter of which this rank holds the same rows.
    """
    reads = []
    for name, module in linears:
        held, device = local_rows(getattr(module, like)), on_mesh(module.lora_B).device
        reads.append(Read(weights.plain[f"{name}.weight"], range(held.start, held.stop), device))
    with streamed(reads, progress=False) as several:
        for (name, module), read in zip(linears, reads, strict=True):
            rows, cols = len(read.rows), read.tensor.shape[1]
            dtype = STORED_DTYPES[read.tensor.dtype]
            found, at = torch.empty(rows, cols, dtype=dtype, device=read.device), 0
            for piece in next(several):
                found[at : at + len(piece)] = piece
                at += len(piece)
            yield name, module, found


def best_product(
    error: Tensor,
    rank: int,
    generator: torch.Generator,
    total: Callable[[Tensor], Tensor] = lambda summand: summand,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """The best approximation U diag(S) V of `rank` for a matrix that is sharded by rows.

    Args:
        error: `[rows, in]`, this rank's rows.
        generator: on the CPU, in the same state on every rank.
        total: sums a tensor over the ranks.
        dtype: of the products.

    Returns:
        U `[rows, rank]` for these rows, S `[rank]` (largest first), and V `[rank, in]`; fp32. They
        are zero beyond the rank of the matrix.
    """
    cols = error.size(1)
    width = min(rank + max(rank, EXTRA_COLUMNS), cols)
    basis = torch.randn(cols, width, generator=generator).to(error.device, dtype)
    for _ in range(ITERATIONS):
        product = torch.zeros_like(basis)
        for _, rows in row_chunks(error):
            rows = rows.to(dtype)
            product.addmm_(rows.t(), rows @ basis)
        basis = torch.linalg.qr(total(product))[0]
    sketch = torch.cat([rows.to(dtype) @ basis for _, rows in row_chunks(error)])
    squares, vectors = torch.linalg.eigh(total(sketch.t() @ sketch).double())
    s = squares.flip(0)[:rank].clamp(min=0).sqrt().to(dtype)
    vectors = vectors.flip(1)[:, :rank].to(dtype)
    v = vectors.t() @ basis.t()
    # An eigenvector's sign is arbitrary, and depends on the order of summation.
    sign = v.sum(1).sign()
    found = s > 1e-3 * s[0]  # in fp32, smaller squares are indistinguishable from rounding
    u = sketch @ (vectors * torch.where(found, sign / s, 0.0))
    s, v = torch.where(found, s, 0.0), v * torch.where(found, sign, 0.0).unsqueeze(1)
    u, s, v = u.float(), s.float(), v.float()
    missing = max(0, rank - cols)
    return F.pad(u, (0, missing)), F.pad(s, (0, missing)), F.pad(v, (0, 0, 0, missing))


def sum_over_ranks(param: Tensor) -> Callable[[Tensor], Tensor]:
    """Sums a tensor over the ranks that `param` is sharded over."""

    def total(summand: Tensor) -> Tensor:
        if isinstance(param, DTensor):
            dist.all_reduce(summand, group=shard_group(param.device_mesh))
        return summand

    return total


def set_product(module: LowRankLinear, u: Tensor, s: Tensor, v: Tensor) -> None:
    """Sets A and B so that scaling * B A = U diag(S) V, with the root of S in each."""
    half = (s / module.scaling).sqrt()
    a, held = local_part(module.lora_A), local_rows(module.lora_A)
    found = (s > 0).unsqueeze(1)[held].to(a.device)
    a.copy_(torch.where(found, (half.unsqueeze(1) * v)[held].to(a.device), a))
    local_part(module.lora_B).copy_(u * half)
