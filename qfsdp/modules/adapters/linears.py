"""Adapters on the linears of a decoder: LoRA, DoRA, IA3, and those of `miss` and `oft`.

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
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.config import SHARED_OUTER, check_rank, check_sharing
from qfsdp.modules.adapters.config import AdapterConfig as AdapterConfig
from qfsdp.modules.adapters.miss import BlockSharedLinear
from qfsdp.modules.adapters.oft import RotatedLinear
from qfsdp.modules.adapters.places import adapted_places
from qfsdp.modules.adapters.reference import keep_start as keep_start
from qfsdp.modules.adapters.row_norms import adapted_expert_norms
from qfsdp.modules.adapters.trained_rows import start_rows, train_rows
from qfsdp.modules.adapters.whole import train_whole
from qfsdp.modules.decoder_base import base_parameters as base_parameters
from qfsdp.modules.experts.adapted import adapted_experts, of_all
from qfsdp.modules.experts.router import ChoosesExperts, Router
from qfsdp.modules.experts.stacked import ExpertLinear, bias_of_rows
from qfsdp.modules.low_rank.adapted import AdaptedLinear, adapted_linears
from qfsdp.modules.low_rank.copies import prepare
from qfsdp.modules.low_rank.linear import (
    LowRankLinear,
    low_rank_linears,
    low_rank_outputs,
    refresh_dora_norms,
)
from qfsdp.modules.low_rank.linear import dora_linears as dora_linears
from qfsdp.modules.quantized_linear import QuantizedLinear, linear
from qfsdp.modules.score_head import SCORE, START, score_head
from qfsdp.modules.targets import replace_module
from qfsdp.tensor_subclasses.dtensor import (
    local_part,
    local_rows,
    whole_tensor,
)

Adaptable = nn.Linear | QuantizedLinear | ExpertLinear | Router
ADAPTABLE = (nn.Linear, QuantizedLinear, ExpertLinear, Router)
# Linears whose inputs IA3 scales; PEFT's `feedforward_modules`.
SCALED_INPUTS = ("down_proj", "output_linear")


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
        return adapted_expert_norms(weight, a, b, self.scaling, base_squares, ends)


class LowRankRouter(ChoosesExperts, LowRankLinear):  # type: ignore[misc]  # two `forward`s
    """A router with a LoRA or DoRA adapter; see `Router`. It has the `forward` of the first."""

    multiplies_together = False

    def __init__(self, base: Router, config: AdapterConfig) -> None:
        super().__init__(base, config)
        self.top_k, self.config = base.top_k, base.config
        self.e_score_correction_bias = base.e_score_correction_bias

    def scores(self, x: Tensor) -> Tensor:
        return low_rank_outputs(x, [self])[0]


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
    model.requires_grad_(False)
    targets = adapted_places(model, config, ADAPTABLE)
    of_experts = {name.rpartition(".")[2] for name, m in targets if isinstance(m, ExpertLinear)}
    check_sharing(config, of_experts)
    for name, module in targets:
        assert isinstance(module, ADAPTABLE)
        replace_module(model, name, _adapted(model, name, module, config))
    train_whole(model, config.modules_to_save)
    train_rows(model, config.trainable_token_indices)
    keep_start(model, "none", config)
    if any(module.weight.dtype != torch.float32 for _, module in adapted_linears(model)):
        model.register_forward_pre_hook(prepare)


def _adapted(
    model: nn.Module, name: str, module: Adaptable, config: AdapterConfig
) -> AdaptedLinear:
    """`module` with an unset adapter."""
    if isinstance(module, Router):
        _check_low_rank(config, "routers", name)
        return LowRankRouter(module, _of_linear(config, name, module))
    if not isinstance(module, ExpertLinear):
        if config.method == "ia3":
            return ScaledLinear(module, name.rpartition(".")[2] in SCALED_INPUTS)
        if config.method == "miss":
            return BlockSharedLinear(name, module, config)
        if config.method == "oft":
            return RotatedLinear(name, module, config)
        return LowRankLinear(module, _of_linear(config, name, module))
    _check_low_rank(config, "experts", name)
    config = config.of_experts(cast(Any, model).config.experts_per_token)
    key = "rank" if config.expert_rank is None else "expert_rank"
    config = _of_linear(config, name, module, key, module.experts)
    shared = SHARED_OUTER[name.rpartition(".")[2]] if config.expert_sharing == "outer" else None
    return LowRankExpertLinear(module, config, shared)


def _of_linear(
    config: AdapterConfig, name: str, module: Adaptable, key: str = "rank", experts: int = 1
) -> AdapterConfig:
    """`config.of(name)`, whose rank is one that a linear can have."""
    own, (rows, cols) = config.of(name), module.weight.shape
    key = key if own.rank == config.rank else "rank_pattern"
    check_rank(key, name, own.rank, rows // experts, cols)
    return own


def _check_low_rank(config: AdapterConfig, of: str, name: str) -> None:
    if not config.is_low_rank:
        expected = "expected lora or dora, or adapter.targets without it"
        raise UserError(
            f"adapter.method: {config.method!r} has no form of {of} ({name}); {expected}"
        )


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
    B zero, magnitudes the row norms of the loaded base, the factors of IA3 one, MiSS and OFT zero.
    A score head is normal; trained rows are the base's.

    A depends on `seed` and the module's name only, not on ranks or order.

    Args:
        magnitudes: false: leaves what starts as the base is, DoRA's magnitudes and norms and
            trained rows, for a caller that loads them. Norms need a pass over all weights, which
            took 3 minutes for 70 billion on a disk.
    """
    for name, module in adapted_linears(model):
        if isinstance(module, ScaledLinear):
            local_part(module.ia3_l).fill_(1.0)
        elif isinstance(module, BlockSharedLinear | RotatedLinear):
            module.reset()
        elif isinstance(module, LowRankLinear):
            bound, generator = module.lora_A.shape[1] ** -0.5, seeded(seed, name)
            a = torch.empty(module.lora_A.shape).uniform_(-bound, bound, generator=generator)
            local_part(module.lora_A).copy_(a[local_rows(module.lora_A)])
            local_part(module.lora_B).zero_()
    if (head := score_head(model)) is not None:
        start = torch.empty(head.weight.shape).normal_(0.0, START, generator=seeded(seed, SCORE))
        local_part(head.weight).copy_(start[local_rows(head.weight)])
    if magnitudes:
        start_magnitudes(model, b_is_zero=True)
        start_rows(model)


@torch.no_grad()
def start_magnitudes(model: nn.Module, b_is_zero: bool = False) -> None:
    """Sets DoRA's magnitudes to the current norms: they then change nothing. For every rank."""
    refresh_dora_norms(model, b_is_zero)
    for _, module in low_rank_linears(model):
        if module.magnitude is not None and module.weight_norm is not None:
            local_part(module.magnitude).copy_(local_part(module.weight_norm))
