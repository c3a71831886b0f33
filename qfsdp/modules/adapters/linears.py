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
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfsdp.common.errors import UserError
from qfsdp.modules.adapters import row_norms
from qfsdp.modules.adapters.config import SHARED_OUTER, AdapterConfig, check_rank, check_sharing
from qfsdp.modules.experts.adapted import adapted_experts, of_all
from qfsdp.modules.experts.router import ChoosesExperts, Router
from qfsdp.modules.experts.stacked import ExpertLinear, bias_of_rows
from qfsdp.modules.low_rank.autograd import adapted_linear
from qfsdp.modules.low_rank.grouped import Copies, low_rank_outputs, prepare
from qfsdp.modules.quantized_linear import QuantizedLinear, linear
from qfsdp.modules.targets import (
    LINEAR_NAMES,
    ROUTER_NAMES,
    adapted_modules,
    check_present,
    replace_module,
)
from qfsdp.tensor_subclasses.dtensor import (
    local_part,
    local_rows,
    on_mesh,
    whole_tensor,
    whole_tensors,
)

Adaptable = nn.Linear | QuantizedLinear | ExpertLinear | Router
ADAPTABLE = (nn.Linear, QuantizedLinear, ExpertLinear, Router)
# Of a module that is adapted: what is no part of its adapter.
BASE_FIELDS = ("weight", "bias", "e_score_correction_bias")
# Linears whose inputs IA3 scales; PEFT's `feedforward_modules`.
SCALED_INPUTS = ("down_proj", "output_linear")


class AdaptedLinear(nn.Module):
    """A frozen linear with an adapter, which subclasses add.

    Fields:
        weight: `[out, in]`, frozen, quantized or plain.
        bias: `[out]` or None, frozen.
        fp8: multiply by the weight in FP8.
        is_reference: compute what it computed at the start (`qfsdp.modules.adapters.reference`).
        start: frozen copies of the adapter's parameters at the start, by their names; empty: at
            the start the adapter changed nothing.
    """

    def __init__(self, base: Adaptable) -> None:
        super().__init__()
        self.weight = base.weight.requires_grad_(False)
        self.bias = base.bias if base.bias is None else base.bias.requires_grad_(False)
        self.fp8 = isinstance(base, QuantizedLinear) and base.fp8
        self.is_reference = False
        self.start = nn.ParameterDict()

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
        copies, copied, stacked_a: see `qfsdp.modules.low_rank.grouped`.
    """

    multiplies_together = True  # with others of the same input

    def __init__(self, base: Adaptable, config: AdapterConfig, count: int = 1) -> None:
        super().__init__(base)
        out_features, in_features = base.weight.shape
        self.scaling = config.scaling
        self.dropout = config.dropout
        self.lora_A = self._fp32(count * config.rank, in_features)
        self.lora_B = self._fp32(out_features, config.rank)
        dora = config.method == "dora"
        self.magnitude = self._fp32(out_features) if dora else None
        self.weight_norm = self._fp32(out_features).requires_grad_(False) if dora else None
        self.base_squares: Tensor | None = None
        self.copies: Copies | None = None
        self.copied: list[tuple[int, int]] = []
        self.stacked_a: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return low_rank_outputs(x, [self])[0]

    def _adapter(self) -> tuple[Tensor, Tensor, float, Tensor | None]:
        """A, B, the factor of their product, and the factors of rows.

        A reference without adapters multiplies by the same tensors, whose product counts nothing:
        other operations would round differently, and the first loss would not be ln 2.
        """
        norm = self.weight_norm
        ratio = None if self.magnitude is None or norm is None else self.magnitude / norm
        if not self.is_reference:
            return self.lora_A, self.lora_B, self.scaling, ratio
        if not self.start:
            ones = None if ratio is None else torch.ones_like(ratio)
            return self.lora_A, self.lora_B, 0.0, ones
        if ratio is not None:
            ratio = self.start["magnitude"] / self.start["weight_norm"]
        return self.start["lora_A"], self.start["lora_B"], self.scaling, ratio

    def _dropped(self, x: Tensor) -> Tensor | None:
        """The input of the product B A after dropout; None: x itself."""
        return F.dropout(x, self.dropout) if self.dropout and self.training else None

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """A and B, with every number as often as it is multiplied."""
        return self.lora_A, self.lora_B

    def held_b(self) -> Tensor:
        """The rows of B that belong to this rank's rows of W. Every rank must call it."""
        return on_mesh(self.lora_B)

    def norms(self, weight: Tensor, a: Tensor, b: Tensor, base_squares: Tensor) -> Tensor:
        """Row norms of W + scaling * B A, of the rows that this rank holds in `weight` and `b`."""
        return row_norms.adapted_norms(weight, a, b, self.scaling, base_squares)


class LowRankExpertLinear(LowRankLinear):
    """The stacked linears of experts, each with its own LoRA or DoRA adapter.

    Fields:
        experts: their number; chunk_bytes: as of `ExpertLinear`.
        weight: `[experts * out, in]`; bias: `[experts * out]` or None.
        lora_A: fp32 `[experts * rank, in]`; lora_B: fp32 `[experts * out, rank]`.
        magnitude, weight_norm: fp32 `[experts * out]`, or None.
        shared: the factor that all experts share, `[rank, in]` or `[out, rank]`; None: none.
    """

    multiplies_together = False

    def __init__(
        self,
        base: ExpertLinear,
        config: AdapterConfig,
        shared: Literal["lora_A", "lora_B"] | None = None,
    ) -> None:
        super().__init__(base, config, 1 if shared == "lora_A" else base.experts)
        self.experts, self.chunk_bytes, self.shared = base.experts, base.chunk_bytes, shared
        if shared == "lora_B":
            self.lora_B = self._fp32(base.weight.size(0) // base.experts, config.rank)

    @property
    def of_each(self) -> Tensor:
        """The factor that every expert has for itself, B if it has both."""
        return self.lora_A if self.shared == "lora_B" else self.lora_B

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        repeated = (
            factor.expand(self.experts, -1, -1) if name == self.shared else factor
            for name, factor in (("lora_A", self.lora_A), ("lora_B", self.lora_B))
        )
        return next(repeated), next(repeated)

    def held_b(self) -> Tensor:
        if self.shared != "lora_B":
            return super().held_b()
        b, held = whole_tensor(self.lora_B), local_rows(cast(Tensor, self.weight_norm))
        return b[torch.arange(held.start, held.stop, device=b.device) % len(b)]

    # A linear of a decoder has one input; that of experts also has their places.
    def forward(  # type: ignore[override]
        self, x: Tensor, ends: Tensor, factors: Tensor | None = None
    ) -> Tensor:
        """As `ExpertLinear.forward`."""
        chunk, dropped = self.chunk_bytes, self._dropped(x)
        y = adapted_experts(x, ends, self.weight, *self._adapter(), dropped, chunk)
        return y if self.bias is None else y + bias_of_rows(self.bias, x, ends, factors)

    def norms(self, weight: Tensor, a: Tensor, b: Tensor, base_squares: Tensor) -> Tensor:
        rows = cast(Tensor, self.weight_norm)
        size, first = rows.size(0) // self.experts, local_rows(rows).start
        ends = torch.arange(1, self.experts + 1, dtype=torch.int32, device=weight.device)
        ends = ends * size - first
        a = of_all(a, self.experts * b.size(1))
        return row_norms.adapted_expert_norms(weight, a, b, self.scaling, base_squares, ends)


class LowRankRouter(ChoosesExperts, LowRankLinear):  # type: ignore[misc]  # two `forward`s
    """A router with a LoRA or DoRA adapter; see `Router`. It has the `forward` of the first."""

    multiplies_together = False

    def __init__(self, base: Router, config: AdapterConfig) -> None:
        super().__init__(base, config)
        self.top_k, self.config = base.top_k, base.config
        self.e_score_correction_bias = base.e_score_correction_bias

    def scores(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        y = adapted_linear(x, weight, *self._adapter(), self._dropped(x))
        return y if self.bias is None else y + self.bias


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
        if self.is_reference:
            factors = self.start["ia3_l"].flatten() if self.start else torch.ones_like(factors)
        if self.scales_input:
            return linear((x * factors).to(x.dtype), self.weight, self.bias, self.fp8)
        return (linear(x, self.weight, self.bias, self.fp8) * factors).to(x.dtype)


def add_adapters(model: nn.Module, config: AdapterConfig) -> None:
    """Freezes `model` and replaces every targeted linear by an `AdaptedLinear`.

    The new parameters are unset: call `init_adapters` once the base weights are loaded.
    """
    names = (*LINEAR_NAMES, *ROUTER_NAMES)
    check_present("adapter.targets", config.linears, model, names)
    model.requires_grad_(False)
    targets = adapted_modules(model, config.linears, ADAPTABLE)
    of_experts = {name.rpartition(".")[2] for name, m in targets if isinstance(m, ExpertLinear)}
    check_sharing(config, of_experts)
    for name, module in targets:
        assert isinstance(module, ADAPTABLE)
        replace_module(model, name, _adapted(model, name, module, config))
    model.register_forward_pre_hook(prepare)


def _adapted(
    model: nn.Module, name: str, module: Adaptable, config: AdapterConfig
) -> AdaptedLinear:
    """`module` with an unset adapter."""
    if isinstance(module, Router):
        if config.method == "ia3":
            expected = "lora or dora, or adapter.targets without it"
            raise UserError(f"adapter.method: 'ia3' has no factors of routers ({name}); {expected}")
        check_rank("rank", name, config.rank, *module.weight.shape)
        return LowRankRouter(module, config)
    if not isinstance(module, ExpertLinear):
        if config.method == "ia3":
            return ScaledLinear(module, name.rpartition(".")[2] in SCALED_INPUTS)
        check_rank("rank", name, config.rank, *module.weight.shape)
        return LowRankLinear(module, config)
    if config.method == "ia3":
        expected = "lora or dora, or adapter.targets without it"
        raise UserError(f"adapter.method: 'ia3' has no factors of experts ({name}); {expected}")
    config = config.of_experts(cast(Any, model).config.experts.top_k)
    rows, cols = module.weight.shape
    key = "rank" if config.expert_rank is None else "expert_rank"
    check_rank(key, name, config.rank, rows // module.experts, cols)
    shared = SHARED_OUTER[name.rpartition(".")[2]] if config.expert_sharing == "outer" else None
    return LowRankExpertLinear(module, config, shared)


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


def dora_linears(model: nn.Module) -> list[LowRankLinear]:
    """Every linear with DoRA's norms, in model order."""
    return [module for _, module in low_rank_linears(model) if module.weight_norm is not None]


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
def init_adapters(model: nn.Module, seed: int, magnitudes: bool = True) -> None:
    """Sets every adapter to its start: A uniform within 1 / sqrt(in) (as LoRA's authors and PEFT),
    B zero, magnitudes the row norms of the loaded base, the factors of IA3 one.

    A depends on `seed` and the module's name only, not on ranks or order.

    Args:
        magnitudes: false: leaves DoRA's magnitudes and norms as they are, for a caller that loads
            them. They need a pass over all weights, which took 3 minutes for 70 billion on a disk.
    """
    for name, module in adapted_linears(model):
        if isinstance(module, ScaledLinear):
            local_part(module.ia3_l).fill_(1.0)
        elif isinstance(module, LowRankLinear):
            bound, generator = module.lora_A.shape[1] ** -0.5, seeded(seed, name)
            a = torch.empty(module.lora_A.shape).uniform_(-bound, bound, generator=generator)
            local_part(module.lora_A).copy_(a[local_rows(module.lora_A)])
            local_part(module.lora_B).zero_()
    if magnitudes:
        start_magnitudes(model, b_is_zero=True)


@torch.no_grad()
def start_magnitudes(model: nn.Module, b_is_zero: bool = False) -> None:
    """Sets DoRA's magnitudes to the current norms: they then change nothing. For every rank."""
    refresh_dora_norms(model, b_is_zero)
    for _, module in low_rank_linears(model):
        if module.magnitude is not None and module.weight_norm is not None:
            local_part(module.magnitude).copy_(local_part(module.weight_norm))


@torch.no_grad()
def refresh_dora_norms(model: nn.Module, b_is_zero: bool = False) -> None:
    """Recomputes `weight_norm` of every DoRA linear; call it after each optimizer step.

    Each rank computes its own rows. Every rank must call it, as A is gathered. With `b_is_zero`
    (everywhere) the norms are those of W, which is then dequantized once instead of twice.
    """
    modules = dora_linears(model)
    for module, a in zip(modules, whole_tensors([m.lora_A for m in modules]), strict=True):
        assert module.weight_norm is not None
        b = module.held_b()
        weight = row_norms.held_rows(module.weight, module.weight_norm, b.device)
        if (squares := module.base_squares) is None:
            squares = module.base_squares = row_norms.squared_norms(weight)
        norms = row_norms.roots(squares) if b_is_zero else module.norms(weight, a, b, squares)
        local_part(module.weight_norm).copy_(norms)


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(Hugging Face name, parameter) of the model without its adapters."""
    adapted = {name for name, m in model.named_modules() if isinstance(m, AdaptedLinear)}
    adapted |= {f"{name}.start" for name in adapted}
    for name, param in model.named_parameters():
        module, _, field = name.rpartition(".")
        if module not in adapted or field in BASE_FIELDS:
            yield name, param
