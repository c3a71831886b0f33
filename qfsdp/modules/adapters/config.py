"""The config section `adapter`: LoRA, DoRA or IA3, where and how large."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from qfsdp.common.errors import InvalidField, UserError
from qfsdp.modules.adapters.places import check_pattern, check_places, ends_with, is_pattern
from qfsdp.modules.adapters.trained_rows import are_ids, by_module
from qfsdp.modules.adapters.whole import WHOLE
from qfsdp.modules.targets import ALL_LINEAR

N = TypeVar("N", int, float)

NAMES = {"lora": "LoRA", "dora": "DoRA", "ia3": "IA3", "miss": "MiSS", "oft": "OFT"}
BASE_STARTS = ("pissa", "olora")
IA3_TARGETS = ["k_proj", "v_proj", "down_proj"]
# The factor of the hidden size, which experts share with `expert_sharing: outer`.
SHARED_OUTER: dict[str, Literal["lora_A", "lora_B"]] = {
    "gate_up_proj": "lora_A",
    "down_proj": "lora_B",
}


@dataclass
class AdapterConfig:
    """Section `adapter`: what is trained.

    Fields:
        method: "dora", "lora", "ia3", "miss" (qfsdp/modules/adapters/miss.py) or "oft"
            (qfsdp/modules/adapters/oft.py). MiSS uses `rank` and `dropout`, OFT uses `block_size`,
            and IA3 none of them; `alpha` is of LoRA and DoRA.
        rank: inner dimension of the low-rank product.
        alpha: the product is scaled by alpha / rank.
        dropout: probability, on the input of the low-rank product.
        targets: "all-linear" (every linear of every layer), or a list of names, which may contain
            `lm_head`, and linears of few rows, which are frozen otherwise: the router of a mixture
            (`gate`; `router` in gpt-oss), `shared_expert_gate`, `in_proj_a`, `in_proj_b`. A name
            may be longer: `self_attn.q_proj`, `layers.0.mlp.up_proj`; experts of transformers'
            models have such names alone (`experts.down_proj`). Or a pattern, a regular expression
            of whole names: ".*\\.mlp\\.(up|down)_proj". null: "all-linear", or [k_proj, v_proj,
            down_proj] with ia3. IA3 scales the inputs of down_proj and the outputs of the others.
        layers: layers whose linears are adapted, from 0: "0-15" or a list; null: all.
        exclude: linears that are not adapted: names or a pattern, as in `targets`.
        rank_pattern: end of a name -> the rank of these linears, such as `{q_proj: 8}`. It may be a
            regular expression; the first that matches counts, as in PEFT.
        alpha_pattern: the same for alpha.
        rslora: scale by alpha / sqrt(rank) instead (https://arxiv.org/abs/2312.03732): the
            product keeps its size at large ranks.
        init: "default": A random, B zero. "loftq": the product approximates the error of
            quantizing the base (qfsdp/checkpoint/loftq.py). "pissa", "olora": the product begins
            as the largest part of the base, and the rest becomes the frozen base
            (qfsdp/checkpoint/base_starts.py). The adapter is written as LoRA of twice the rank.
        lora_plus_ratio: learning rate of B as a multiple of the learning rate of the rest, e.g. 16
            (LoRA+, https://arxiv.org/abs/2402.12354); null: the same learning rate.
        start_from: a PEFT adapter folder to start from; null: fresh adapters.
        modules_to_save: modules that are trained as a whole too, `embed_tokens`, `lm_head` or both,
            in fp32; null: none. Tied ones are named both, and stay tied.
        trainable_token_indices: ids of tokens. Only the rows of these are trained, in fp32. A list
            means the embedding, and an output layer that is tied to it. If it is not tied, write
            `{embed_tokens: [...], lm_head: [...]}`, as in PEFT. null: none.
        block_size: inputs that a rotation of OFT turns; divides the inputs of every linear.
        expert_rank: rank of every expert of a mixture: a number, or "divided": rank / experts per
            token, at least 1, so that a token meets as many numbers as in a dense model. null:
            `rank`. The product of an expert is scaled by alpha / its own rank.
        expert_sharing: "outer": the experts of a layer share the factors of the hidden size, A of
            gate_up_proj and B of down_proj; the others are of each expert. null: all are.
    """

    method: Literal["lora", "dora", "ia3", "miss", "oft"] = "dora"
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str | list[str] | None = None
    layers: str | list[int] | None = None
    exclude: str | list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    rslora: bool = False
    init: Literal["default", "loftq", "pissa", "olora"] = "default"
    lora_plus_ratio: float | None = None
    start_from: str | None = None
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    block_size: int = 32
    expert_rank: int | Literal["divided"] | None = None
    expert_sharing: Literal["outer"] | None = None

    @property
    def scaling(self) -> float:
        """The factor of the low-rank product."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def is_low_rank(self) -> bool:
        """Whether a product B A is trained."""
        return self.method in ("lora", "dora")

    @property
    def changes_base(self) -> bool:
        """Whether the start moves a part of the base into the adapters."""
        return self.init in BASE_STARTS

    def of_experts(self, top_k: int) -> AdapterConfig:
        """The config of the experts of a mixture in which a token has `top_k` of them."""
        rank = self.expert_rank
        rank = max(1, self.rank // top_k) if rank == "divided" else rank
        return self if rank is None else replace(self, rank=rank)

    def of(self, name: str) -> AdapterConfig:
        """The config of one linear, with its own rank and alpha.

        Args:
            name: of the linear in the model. That of experts takes `of_experts(top_k).of(name)`.
        """
        if not self.ends:
            return self
        rank = _first(self.rank_pattern, name, self.rank)
        alpha = _first(self.alpha_pattern, name, self.alpha)
        return replace(self, rank=rank, alpha=alpha, rank_pattern=None, alpha_pattern=None)

    @property
    def linears(self) -> str | list[str]:
        """`targets`, or the method's default."""
        usual = IA3_TARGETS if self.method == "ia3" else ALL_LINEAR
        return usual if self.targets is None else self.targets

    @property
    def selects(self) -> bool:
        """Whether some linears of a name may have an adapter and others none."""
        some = self.layers is not None or self.exclude is not None or is_pattern(self.linears)
        return some or any("." in name for name in self.linears)

    def rows_of(self, module: str) -> list[int]:
        """The ids of tokens whose rows of `embed_tokens` or `lm_head` are trained alone."""
        return list(by_module(self.trainable_token_indices or []).get(module, []))

    @property
    def trains_more(self) -> bool:
        """Whether modules or rows of tokens are trained beside the adapters."""
        return (self.modules_to_save or self.trainable_token_indices) is not None

    @property
    def ends(self) -> list[str]:
        """The ends of names that have a rank or an alpha of their own."""
        return [*(self.rank_pattern or ()), *(self.alpha_pattern or ())]

    def check(self) -> None:
        if self.rank < 1:
            raise InvalidField("rank", self.rank, "an integer of at least 1")
        if isinstance(self.expert_rank, int) and self.expert_rank < 1:
            expected = "an integer of at least 1, divided, or null"
            raise InvalidField("expert_rank", self.expert_rank, expected)
        if self.block_size < 2:
            raise InvalidField("block_size", self.block_size, "an integer of at least 2")
        if not self.alpha > 0:
            raise InvalidField("alpha", self.alpha, "a number above 0")
        if not 0.0 <= self.dropout < 1.0:
            raise InvalidField("dropout", self.dropout, "a probability of at least 0, below 1")
        ratio = self.lora_plus_ratio
        if ratio is not None and not 0.0 < ratio < float("inf"):
            raise InvalidField("lora_plus_ratio", ratio, "a number above 0, or null")
        if self.init != "default" and self.start_from is not None:
            raise InvalidField("init", self.init, "default, as start_from gives the start")
        if self.changes_base and self.dropout:
            expected = f"0, as init {self.init} has a part of the base in the product"
            raise InvalidField("dropout", self.dropout, expected)
        switches: dict[str, object] = {} if self.method == "miss" else {"dropout": 0.0}
        switches |= {"rslora": False, "init": "default", "lora_plus_ratio": None}
        switches |= {"expert_rank": None, "expert_sharing": None}
        switches |= {"rank_pattern": None, "alpha_pattern": None}
        for key, off in switches.items():
            if not self.is_low_rank and (value := getattr(self, key)) != off:
                words = str("null" if off is None else off).lower()
                expected = f"{words}, as method {self.method} has no low-rank product"
                raise InvalidField(key, value, expected)
        for name, numbers in (("rank", self.rank_pattern), ("alpha", self.alpha_pattern)):
            for pattern, number in (numbers or {}).items():
                check_pattern(f"adapter.{name}_pattern", pattern)
                if not 0 < number < float("inf"):
                    expected = "a number above 0 for each pattern"
                    raise InvalidField(f"{name}_pattern", {pattern: number}, expected)
        whole = self.modules_to_save
        if whole is not None and sorted({*whole} & WHOLE.keys()) != sorted(whole) or whole == []:
            raise InvalidField("modules_to_save", whole, f"some of {', '.join(WHOLE)}, or null")
        self._check_rows()
        check_places(self.linears, self.layers, self.exclude)

    def _check_rows(self) -> None:
        rows = self.trainable_token_indices
        if rows is None:
            return
        of = by_module(rows)
        if not of or not of.keys() <= WHOLE.keys() or not all(map(are_ids, of.values())):
            expected = "different ids of tokens, or some for each of embed_tokens and lm_head"
            raise InvalidField("trainable_token_indices", rows, expected)
        if not self.is_low_rank:
            expected = f"null with method {self.method}, for which PEFT has no such file"
            raise InvalidField("trainable_token_indices", rows, expected)


def _first(numbers: dict[str, N] | None, name: str, usual: N) -> N:
    found = (number for key, number in (numbers or {}).items() if ends_with(key, name))
    return next(found, usual)


def check_sharing(config: AdapterConfig, of_experts: set[str]) -> None:
    """Checks that both linears of experts are adapted if they share factors. Files need both: the
    number of experts is known from the factor that is not shared."""
    if config.expert_sharing is not None and of_experts != SHARED_OUTER.keys():
        expected = " and ".join(SHARED_OUTER)
        raise UserError(
            f"adapter.expert_sharing: {config.expert_sharing!r}, and adapter.targets selects "
            f"{' and '.join(sorted(of_experts)) or 'no linear'} of experts; expected {expected}"
        )


def check_rank(key: str, name: str, rank: int, *sides: int) -> None:
    if rank > max(sides):
        expected = f"at most {max(sides)}, the larger side of {name}"
        raise UserError(f"adapter.{key}: {rank}; expected {expected}")
