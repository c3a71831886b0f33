"""LoRA, DoRA and IA3 adapters on the linears of a decoder.

LoRA (https://arxiv.org/abs/2106.09685) adds a low-rank product to a frozen weight W:

    y = W x + (alpha / rank) * B A x        A [rank, in]   B [out, rank], B = 0 at the start

DoRA (https://arxiv.org/abs/2402.09353) splits the adapted weight into a direction and a
trained length per row, `magnitude`:

    y = magnitude / norm * (W x + (alpha / rank) * B A x)
    norm[i] = || row i of (W + (alpha / rank) * B A) ||

The paper (section 4.3) treats `norm` as a constant in backward. So it depends on W, A and B
only, which change once per optimizer step. `refresh_dora_norms` computes it then, and not in
every forward, micro-batch and recomputation. A rank needs all of A for it, and the rows of W and
B that it holds. The result is a frozen parameter, sharded and gathered with the others of its
layer. At the start magnitude equals norm: the adapted model is the base model.

IA3 (https://arxiv.org/abs/2205.05638) has no product, but factors l, ones at the start:

    y = l * (W x + bias)           of the outputs: keys and values
    y = W (l * x) + bias           of the inputs: the feed-forward's last linear

Adapters are fp32. They are cast to the activations' dtype to multiply them. The ratio
magnitude / norm multiplies weights in fp32, before they are rounded: rounded to bf16 itself, it
would hide changes of a magnitude below 0.4 %.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qfsdp.modules.adapted_linear import adapted_linear
from qfsdp.modules.adapter_config import AdapterConfig
from qfsdp.modules.quantized_linear import QuantizedLinear, linear
from qfsdp.modules.targets import replace_module, target_modules
from qfsdp.tensor_subclasses.dtensor import local_part, local_rows, on_mesh, whole_tensors
from qfsdp.tensor_subclasses.kernels.compiled import compiled
from qfsdp.tensor_subclasses.kernels.dry_run import on_cpu
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor, frozen_weight

# Weights at a time in `refresh_dora_norms`: 8 MB in bf16 stay in a CPU's cache. On a GPU 128 MB:
# with smaller pieces it would wait for kernel launches.
NORM_CHUNK_WEIGHTS, NORM_CHUNK_ON_GPU = 1 << 22, 1 << 26
SCALED_INPUTS = ("down_proj",)  # linears whose inputs IA3 scales; PEFT's `feedforward_modules`


class AdaptedLinear(nn.Module):
    """A frozen linear with an adapter, which subclasses add.

    Fields:
        weight: `[out, in]`, frozen, quantized or plain.
        bias: `[out]` or None, frozen.
    """

    def __init__(self, base: nn.Linear | QuantizedLinear) -> None:
        super().__init__()
        self.weight = base.weight.requires_grad_(False)
        self.bias = base.bias if base.bias is None else base.bias.requires_grad_(False)

    def _fp32(self, *shape: int) -> nn.Parameter:
        """An unset fp32 parameter on the weight's device."""
        return nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=self.weight.device))


class LowRankLinear(AdaptedLinear):
    """A linear with a LoRA or DoRA adapter.

    Fields:
        lora_A: fp32 `[rank, in]`; lora_B: fp32 `[out, rank]`.
        magnitude: fp32 `[out]`, DoRA's trained row length; None with LoRA.
        weight_norm: fp32 `[out]`, frozen, the row norms of W + scaling * B A; None with LoRA.
        base_squares: fp32, the squared norms of this rank's rows of W; None until they are needed.
    """

    def __init__(self, base: nn.Linear | QuantizedLinear, config: AdapterConfig) -> None:
        super().__init__(base)
        out_features, in_features = base.weight.shape
        self.scaling = config.scaling
        self.dropout = config.dropout
        self.lora_A = self._fp32(config.rank, in_features)
        self.lora_B = self._fp32(out_features, config.rank)
        dora = config.method == "dora"
        self.magnitude = self._fp32(out_features) if dora else None
        self.weight_norm = self._fp32(out_features).requires_grad_(False) if dora else None
        self.base_squares: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(x, self.dropout) if self.dropout and self.training else None
        ratio = None
        if self.magnitude is not None and self.weight_norm is not None:
            ratio = self.magnitude / self.weight_norm
        y = adapted_linear(x, self.weight, self.lora_A, self.lora_B, self.scaling, ratio, dropped)
        return y if self.bias is None else y + self.bias  # DoRA must not scale the bias


class ScaledLinear(AdaptedLinear):
    """A linear with an IA3 adapter.

    Fields:
        ia3_l: fp32 factors of the outputs, `[out, 1]`, or of the inputs, `[1, in]` (PEFT's shapes).
    """

    def __init__(self, base: nn.Linear | QuantizedLinear, scales_input: bool) -> None:
        super().__init__(base)
        out_features, in_features = base.weight.shape
        self.scales_input = scales_input
        self.ia3_l = self._fp32(*((1, in_features) if scales_input else (out_features, 1)))

    def forward(self, x: Tensor) -> Tensor:
        factors = self.ia3_l.flatten()
        if self.scales_input:
            return linear((x * factors).to(x.dtype), self.weight, self.bias)
        return (linear(x, self.weight, self.bias) * factors).to(x.dtype)


def add_adapters(model: nn.Module, config: AdapterConfig) -> None:
    """Freezes `model` and replaces every targeted linear by an `AdaptedLinear`.

    The new parameters are unset: call `init_adapters` once the base weights are loaded.
    """
    model.requires_grad_(False)
    for name, module in target_modules(model, config.linears, (nn.Linear, QuantizedLinear)):
        assert isinstance(module, nn.Linear | QuantizedLinear)
        adapted: AdaptedLinear
        if config.method == "ia3":
            adapted = ScaledLinear(module, name.rpartition(".")[2] in SCALED_INPUTS)
        else:
            adapted = LowRankLinear(module, config)
        replace_module(model, name, adapted)


def adapted_linears(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """(name, module) of every adapted linear, in model order."""
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            yield name, module


def low_rank_linears(model: nn.Module) -> Iterator[tuple[str, LowRankLinear]]:
    """(name, module) of every linear with LoRA or DoRA, in model order."""
    for name, module in adapted_linears(model):
        if isinstance(module, LowRankLinear):
            yield name, module


def parameter_groups(model: nn.Module, config: AdapterConfig) -> list[Any]:
    """The trained parameters in model order, as `build_optimizer` takes them. LoRA+ makes two
    groups; the second has every B."""
    trained = [param for param in model.parameters() if param.requires_grad]
    if config.lora_plus_ratio is None:
        return trained
    fast = {module.lora_B for _, module in low_rank_linears(model)}
    groups: tuple[list[nn.Parameter], ...] = ([], [])
    for param in trained:
        groups[param in fast].append(param)
    return [{"params": groups[0]}, {"params": groups[1], "lr_ratio": config.lora_plus_ratio}]


def seeded(seed: int, name: str) -> torch.Generator:
    """A generator for the module `name`, the same on any rank and in any order of modules."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """Sets every adapter to its start: A uniform within 1 / sqrt(in) (as LoRA's authors and PEFT),
    B zero, magnitudes the row norms of the loaded base, the factors of IA3 one.

    A depends on `seed` and the module's name only, not on ranks or order.
    """
    for name, module in adapted_linears(model):
        if isinstance(module, ScaledLinear):
            local_part(module.ia3_l).fill_(1.0)
        elif isinstance(module, LowRankLinear):
            bound, generator = module.lora_A.shape[1] ** -0.5, seeded(seed, name)
            a = torch.empty(module.lora_A.shape).uniform_(-bound, bound, generator=generator)
            local_part(module.lora_A).copy_(a[local_rows(module.lora_A)])
            local_part(module.lora_B).zero_()
    start_magnitudes(model)


@torch.no_grad()
def start_magnitudes(model: nn.Module) -> None:
    """Sets DoRA's magnitudes to the row norms of W + scaling * B A, with the current A and B: the
    magnitudes then change nothing. Every rank must call it."""
    refresh_dora_norms(model)
    for _, module in low_rank_linears(model):
        if module.magnitude is not None and module.weight_norm is not None:
            local_part(module.magnitude).copy_(local_part(module.weight_norm))


@torch.no_grad()
def refresh_dora_norms(model: nn.Module) -> None:
    """Recomputes `weight_norm` of every DoRA linear; call it after each optimizer step.

    Each rank computes its own rows. Every rank must call it, as A is gathered.
    """
    modules = [module for _, module in low_rank_linears(model) if module.weight_norm is not None]
    for module, a in zip(modules, whole_tensors([m.lora_A for m in modules]), strict=True):
        assert module.weight_norm is not None
        b = on_mesh(module.lora_B)
        weight = held_rows(module.weight, module.lora_B, b.device)
        if module.base_squares is None:
            module.base_squares = _squared_norms(weight)
        norms = _adapted_norms(weight, a, b, module.scaling, module.base_squares)
        local_part(module.weight_norm).copy_(norms)


def held_rows(weight: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """The rows of a frozen weight that match this rank's rows of `like`, on `device`. Fewer than
    the rank holds if the base is replicated and the adapters are sharded."""
    if not isinstance(weight, DTensor):
        whole = weight.detach()
        return whole[local_rows(like)] if isinstance(like, DTensor) else whole
    held = weight.to_local()
    if isinstance(held, QuantizedTensor):
        held = held.fetch()
    return held.to(device)


def row_chunks(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields a frozen weight in pieces, as the plain rows that forward multiplies by."""
    chunk = NORM_CHUNK_WEIGHTS if on_cpu(weight) else NORM_CHUNK_ON_GPU
    step = max(1, chunk // weight.size(1))
    for start in range(0, weight.size(0), step):
        part = slice(start, min(start + step, weight.size(0)))
        rows = weight[part] if step < weight.size(0) else weight
        if isinstance(rows, QuantizedTensor):
            which = (rows.format, rows.cols, rows.row_offset, rows.dtype)
            rows = frozen_weight(rows.qdata, rows.metadata, *which)
        yield part, rows


def _squared_norms(weight: Tensor) -> Tensor:
    """fp32 `[rows]`, the squared norm of each row."""
    squares = torch.empty(weight.size(0), dtype=torch.float32, device=weight.device)
    for part, rows in row_chunks(weight):
        torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32, out=squares[part])
    return squares.square_()


def _adapted_norms(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, base_squares: Tensor
) -> Tensor:
    """fp32 `[rows]`, the row norms of W + scaling * B A."""
    mixed = torch.empty_like(b, dtype=weight.dtype)  # W A^T, `[rows, rank]`
    a = a.to(mixed.dtype)
    for part, rows in row_chunks(weight):
        torch.mm(rows, a.t(), out=mixed[part])
    return _norms(mixed, a, b * scaling, base_squares)


@compiled
def _norms(mixed: Tensor, a: Tensor, b: Tensor, base_squares: Tensor) -> Tensor:
    """Row norms, without the product B A. `mixed` is w A^T of rows w, `base_squares` their squared
    norms; b is scaled.

    |w + b A|^2 = |w|^2 + (2 w A^T + b A A^T) . b
    """
    gram = a.float() @ a.t().float()
    squares = base_squares + ((2 * mixed.float() + b @ gram) * b).sum(1)
    # In a row of zeros (an unused vocabulary entry) magnitude and norm are equal: their ratio is 1.
    return squares.clamp(min=0.0).sqrt().clamp(min=torch.finfo(torch.float32).tiny)


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(Hugging Face name, parameter) of the model without its adapters."""
    adapted = {name for name, m in model.named_modules() if isinstance(m, AdaptedLinear)}
    for name, param in model.named_parameters():
        module, _, field = name.rpartition(".")
        if module not in adapted or field in ("weight", "bias"):
            yield name, param
