"""Joins LoRA adapters of one base to one adapter, as PEFT's `add_weighted_adapter`.

With s = alpha / rank of each adapter and its weight w, a linear of the result has

    linear       A = sum of sqrt(|w s|) sign(w s) A_i,  B = sum of sqrt(|w s|) B_i
    ties         A and B of the largest numbers, where their signs agree
                 (https://arxiv.org/abs/2306.01708)
    dare_linear  linear of numbers that are dropped at random, the rest scaled up
                 (https://arxiv.org/abs/2311.03099)
    dare_ties    both
    svd          the best product of `rank` for the sum of w s B_i A_i

The first four work on factors of equal ranks. Their product is not the sum of the products: it has
cross terms B_i A_j. "svd" has none, and loses only what is beyond its rank. It comes from the
factors, without a matrix `[out, in]`: after QR of all B and of all A side by side, what is
decomposed has the sum of the ranks on each side.

The scale of the result is 1: its alpha is its rank. A linear that only some adapters have is joined
from those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from qfsdp.checkpoint.adapter_base import BASE_FILE, TOKENIZER_FILES, base_of
from qfsdp.checkpoint.adapter_files import (
    WEIGHTS_FILE,
    read_adapter_config,
    write_adapter,
)
from qfsdp.checkpoint.expert_adapter_files import is_of_experts
from qfsdp.checkpoint.saved_template import TEMPLATE_FILE
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.quantize import adapted_model, stored_quantization
from qfsdp.common.errors import UserError
from qfsdp.data.tokenizer_folder import texts_in
from qfsdp.hub.download import local_folder
from qfsdp.modules.adapters.config import NAMES, AdapterConfig
from qfsdp.modules.low_rank.adapted import adapted_linears

JoinMethod = Literal["linear", "svd", "ties", "dare_linear", "dare_ties"]


@dataclass
class Part:
    """An adapter to join.

    Fields:
        path: a folder in PEFT's format, or a name on the hub.
        weight: factor of its product; may be negative.
    """

    path: str
    weight: float = 1.0


@dataclass(frozen=True)
class Join:
    """Adapters of one base, and how they are joined.

    Fields:
        weights: the base.
        rank: of the result of "svd"; None: the largest of the adapters.
        density: the share of numbers that ties and dare keep.
        seed: of dare.
    """

    weights: ModelWeights
    parts: Sequence[Part]
    method: JoinMethod
    rank: int | None
    density: float
    seed: int

    def plan(self) -> dict[str, dict[int, AdapterConfig]]:
        """Linear -> index of each adapter that has it -> its config there, in the model's order.
        Reads the adapters, and headers of the base. Raises UserError: an adapter is broken, of
        another base, or not LoRA on linears; or ranks differ."""
        self._check_bases()
        found: dict[str, dict[int, AdapterConfig]] = {}
        order: list[str] = []
        for at, part in enumerate(self.parts):
            config = read_adapter_config(part.path)
            if config.method != "lora":
                kind = NAMES[config.method]
                raise UserError(f"adapters[{at}]: '{part.path}' is {kind}; expected LoRA")
            if config.trains_more:
                raise UserError(
                    f"adapters[{at}]: '{part.path}' has whole modules or rows of tokens; expected "
                    "adapters alone"
                )
            model = adapted_model(self.weights, stored_quantization(self.weights), part.path)
            order = order or [name for name, _ in model.named_modules()]
            for name, _ in adapted_linears(model):
                if is_of_experts(f"{_stem(name)}.lora_A.weight"):
                    expected = "expected adapters of other linears"
                    raise UserError(f"adapters[{at}]: '{part.path}' adapts experts; {expected}")
                found.setdefault(name, {})[at] = config.of(name)
        if self.method != "svd":
            self._check_ranks(found)
        return {name: found[name] for name in order if name in found}

    def _check_bases(self) -> None:
        bases = [_base(part.path) for part in self.parts]
        for at, base in enumerate(bases):
            if base != bases[0]:
                raise UserError(
                    f"adapters[{at}]: '{self.parts[at].path}' was trained over '{base}', and "
                    f"'{self.parts[0].path}' over '{bases[0]}'; expected adapters of one base"
                )

    def _check_ranks(self, found: Mapping[str, Mapping[int, AdapterConfig]]) -> None:
        for name, configs in found.items():
            first = min(configs)
            for at, config in configs.items():
                if config.rank != configs[first].rank:
                    raise UserError(
                        f"adapters[{at}]: rank {config.rank}, and adapters[{first}] has rank "
                        f"{configs[first].rank} ({name}); expected equal ranks, or method=svd"
                    )

    @torch.no_grad()
    def write(self, folder: Path, base: str) -> None:
        """Writes the joined adapter in PEFT's format, with the first one's tokenizer and template.

        Args:
            base: recorded in `adapter_config.json`.

        Raises:
            UserError: see `plan` and `write_adapter`.
        """
        tensors: dict[str, Tensor] = {}
        plan, generator = self.plan(), torch.Generator().manual_seed(self.seed)
        rank = self.rank or max(c.rank for of in plan.values() for c in of.values())
        files = [safe_open(local_folder(p.path) / WEIGHTS_FILE, "pt") for p in self.parts]
        for name, configs in plan.items():
            scales = [self.parts[at].weight * config.scaling for at, config in configs.items()]
            all_a, all_b = (
                [files[at].get_tensor(f"{_stem(name)}.{key}.weight").float() for at in configs]
                for key in ("lora_A", "lora_B")
            )
            if self.method == "svd":
                a, b = best_factors(all_a, all_b, scales, rank)
            else:
                roots = torch.tensor(scales, dtype=torch.float64).abs().sqrt().float()
                a = self._joined(all_a, roots * torch.tensor(scales).sign(), generator)
                b = self._joined(all_b, roots, generator)
            tensors[f"{_stem(name)}.lora_A.weight"], tensors[f"{_stem(name)}.lora_B.weight"] = a, b
        first = local_folder(self.parts[0].path)
        texts = texts_in(first, (BASE_FILE, TEMPLATE_FILE, *TOKENIZER_FILES))
        write_adapter(tensors, self._config(tensors), base, folder, texts)

    def _joined(self, tensors: list[Tensor], weights: Tensor, generator: torch.Generator) -> Tensor:
        """One tensor of several of a shape, by a method other than svd."""
        if self.method.startswith("dare"):
            tensors = [random_part(tensor, self.density, generator) for tensor in tensors]
        elif self.method == "ties":
            tensors = [largest_part(tensor, self.density) for tensor in tensors]
        stacked = torch.stack(tensors)
        weighted = stacked * weights.view(-1, *[1] * tensors[0].dim())
        if not self.method.endswith("ties"):
            return weighted.sum(0)
        agree = stacked.sign() == torch.where(stacked.sum(0) >= 0, 1, -1)
        return (weighted * agree).sum(0) / agree.sum(0).clamp(min=1)

    def _config(self, tensors: Mapping[str, Tensor]) -> AdapterConfig:
        """The section `adapter` of the result: every linear has the scale 1."""
        configs = [read_adapter_config(part.path) for part in self.parts]
        some = any(config.selects for config in configs)
        targets = {name for config in configs for name in config.linears}
        ranks = {
            key.removeprefix(_stem("")).removesuffix(".lora_A.weight"): len(a)
            for key, a in tensors.items()
            if key.endswith(".lora_A.weight")
        }
        rank = max(ranks.values())
        lower = {name: own for name, own in ranks.items() if own != rank}
        alphas = {name: float(own) for name, own in lower.items()}
        chosen = list(ranks) if some else sorted(targets)
        return AdapterConfig(
            "lora", rank, float(rank), targets=chosen, rank_pattern=lower, alpha_pattern=alphas
        )


def _stem(name: str) -> str:
    return f"base_model.model.{name}"


def _base(adapter: str) -> str | None:
    """The base that an adapter names: a name on the hub, or a folder without links."""
    name = (base_of(adapter) or {}).get("model", {}).get("path")
    if name is None:
        return None
    folder = local_folder(name)
    return str(folder.resolve()) if folder.exists() else str(name)


def largest_part(tensor: Tensor, density: float) -> Tensor:
    """The largest numbers of a tensor, by size; the others are 0."""
    if density >= 1:
        return tensor
    flat = tensor.flatten()
    kept = flat.abs().topk(int(density * flat.numel())).indices
    return torch.zeros_like(flat).index_copy_(0, kept, flat[kept]).view_as(tensor)


def random_part(tensor: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """A random part of a tensor's numbers, divided by `density`; the others are 0."""
    if density >= 1:
        return tensor
    kept = torch.bernoulli(torch.full_like(tensor, density), generator=generator)
    return tensor * kept / density


def best_factors(
    all_a: list[Tensor], all_b: list[Tensor], scales: list[float], rank: int
) -> tuple[Tensor, Tensor]:
    """A `[rank, in]` and B `[out, rank]`, whose product is the best for the sum of scale B A.

    A has rows of length 1. Beyond the rank of the sum they are 0.
    """
    b = torch.cat([b.double() * scale for b, scale in zip(all_b, scales, strict=True)], 1)
    q_b, r_b = torch.linalg.qr(b)
    q_a, r_a = torch.linalg.qr(torch.cat(all_a).double().t())
    u, s, v = torch.linalg.svd(r_b @ r_a.t(), full_matrices=False)
    missing = max(0, rank - len(s))
    a = F.pad(v[:rank] @ q_a.t(), (0, 0, 0, missing))
    return a.float(), F.pad(q_b @ (u * s)[:, :rank], (0, missing)).float()
