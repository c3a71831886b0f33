"""The parts that a decoder is put together from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from qfsdp.modules.mlp import RMSNorm, RoundedOnceRMSNorm
from qfsdp.modules.rope import RopeConfig
from qfsdp.modules.rope_scalings import LongRopeScaling

MOST_LAYERS = 10_000  # the meta device builds them in seconds; models have a hundredth of it


@dataclass(frozen=True)
class NormConfig:
    """What the norms of a decoder compute.

    Fields:
        eps: added to the mean square.
        rounds_once: True: the weight multiplies in fp32, then the product is rounded to the input's
            dtype. False: the normalised value is rounded first, as in Llama.
        offset: is added to the weight. Gemma needs 1, as its checkpoints hold the weight minus 1.
    """

    eps: float = 1e-6
    rounds_once: bool = False
    offset: float = 0.0

    def build(self, size: int) -> nn.Module:
        """A norm over the last `size` numbers."""
        if self.rounds_once:
            return RoundedOnceRMSNorm(size, self.eps, self.offset)
        return RMSNorm(size, self.eps)


@dataclass(frozen=True)
class LayerConfig:
    """What differs among the layers of one decoder.

    Fields:
        window: the number of positions that a token sees, itself included; None: all before it.
        rope: its rotary embedding; None: positions are not embedded.
        mixture: its feed-forward is a mixture of experts, see `ExpertsConfig`.
        recurrent: it has a state along the row in place of attention, see `RecurrentConfig`.
    """

    window: int | None = None
    rope: RopeConfig | None = RopeConfig()
    mixture: bool = False
    recurrent: bool = False


@dataclass(frozen=True)
class AttentionConfig:
    """The projections of attention.

    Fields:
        inner: names of the linears that make queries, keys and values: three, or one for all.
        qk_norm: norms of queries and keys: of every head, or of the whole projection.
        scale: multiplies scores; None: 1 / sqrt(head_dim).
        sinks: every head has a logit that no token stands for, see `qfsdp.modules.attention.sinks`.
        gated: the linear of queries also makes a gate of each number of the result.
    """

    inner: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "projection"] | None = None
    scale: float | None = None
    sinks: bool = False
    gated: bool = False


@dataclass(frozen=True)
class RecurrentConfig:
    """Gated DeltaNet (`qfsdp.modules.delta_net`).

    Fields:
        key_heads, value_heads: as many queries as keys; a divisor of the values.
        key_dim, value_dim: of a head.
        taps: of the convolution.
        fused: one linear makes queries, keys, values and gates, head by head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    fused: bool = False

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers of a token's queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim


@dataclass(frozen=True)
class MLPConfig:
    """The gated feed-forward (arXiv:2002.05202): `outer(activation(gate) * up)`.

    Fields:
        module: its name in a layer.
        inner: names of the linears that make gate and up: two, or one for both, gate first.
        outer: name of the last linear.
        activation: silu, or the tanh approximation of gelu.
    """

    module: str = "mlp"
    inner: tuple[str, ...] = ("gate_proj", "up_proj")
    outer: str = "down_proj"
    bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"


@dataclass(frozen=True)
class RouterConfig:
    """How a token chooses its experts (`qfsdp.modules.experts.router`).

    Fields:
        kind: "softmax" weighs all experts and chooses those with the largest weights; "chosen"
            chooses first, and its softmax is over the chosen ones only; "sigmoid" weighs every
            expert by itself, and adds a stored correction for the choice alone (DeepSeek-V3,
            arXiv:2412.19437).
        normalised: except with "chosen", the weights of the chosen experts are divided by their
            sum.
        bias: added to the scores.
        groups, chosen_groups: with "sigmoid", experts are in groups of one size, and a token
            chooses among those of its best groups.
        factor: multiplies the weights.
        name: of the router in the feed-forward.
        family_aux_loss: the family's factor of the load-balancing loss (`router_aux_loss_coef`).
        aux_loss: the factor in training (`model.router_aux_loss`); 0: without that loss.
    """

    kind: Literal["softmax", "chosen", "sigmoid"] = "softmax"
    normalised: bool = False
    bias: bool = False
    groups: int = 1
    chosen_groups: int = 1
    factor: float = 1.0
    name: str = "gate"
    family_aux_loss: float = 0.0
    aux_loss: float = 0.0


@dataclass(frozen=True)
class SharedExpert:
    """The feed-forward that every token uses beside its experts.

    Fields:
        name: in the feed-forward.
        intermediate_size: of it.
        gate: name of a linear with one row; the sigmoid of its result multiplies. None: no gate.
    """

    name: str
    intermediate_size: int
    gate: str | None = None


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts that replaces the feed-forward of a layer (arXiv:1701.06538).

    Fields:
        count: experts of a layer.
        top_k: experts of a token.
        intermediate_size: of one expert.
        activation: of the gate, as in `MLPConfig`.
        bias: both linears of every expert have one.
        interleaved: rows of gate and up alternate; otherwise all rows of gate come first.
        clamp: limit and gain of the activation that replaces `activation` (`ClampedGate`).
        shared: what all tokens use; None: nothing.
        stored: names of an expert's linears in files with one tensor for each expert: gate, up and
            down. Files with one 3-D tensor for all experts have `gate_up_proj` and `down_proj`.
        transposed: files have 3-D tensors `[experts, in, out]`.
    """

    count: int
    top_k: int
    intermediate_size: int
    router: RouterConfig = RouterConfig()
    activation: Literal["silu", "gelu_tanh"] = "silu"
    bias: bool = False
    interleaved: bool = False
    clamp: tuple[float, float] | None = None
    shared: SharedExpert | None = None
    stored: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    transposed: bool = False


@dataclass(frozen=True)
class LayerNorms:
    """Names of a layer's norms, before and after attention and feed-forward; None: no norm there.

    What comes after is normalised before it is added to the residual.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    def names(self) -> list[str]:
        """The names, in the order in which the norms run."""
        norms = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return [name for name in norms if name is not None]


@dataclass(frozen=True)
class Multipliers:
    """Fixed factors.

    Fields:
        embedding: of the embedded tokens.
        rounds_embedding: `embedding` is rounded to the dtype of the weights first, as in Gemma.
        residual: of what attention and feed-forward add to the residual.
        logits: of the logits.
    """

    embedding: float = 1.0
    rounds_embedding: bool = False
    residual: float = 1.0
    logits: float = 1.0


def positions_of_answer(most: int, longrope_contexts: Iterable[int], prompt: int) -> int:
    """How many positions a prompt of so many tokens and its answer may have together.

    LongRoPE turns all of a text in another way once it is longer than the original context, and
    cached keys do not follow. So an answer does not cross that length.

    Args:
        most: positions of the model.
        longrope_contexts: the original contexts of its LongRoPE embeddings, in tokens.
        prompt: tokens of the prompt.
    """
    return min([most, *(context for context in longrope_contexts if prompt <= context)])


@dataclass(frozen=True)
class DecoderParts:
    """The parts of a decoder; sizes are named as in `config.json`.

    Fields:
        intermediate_size: of dense layers.
        layers: one entry for every layer.
        experts: of the layers that are mixtures; None: no layer is one.
        recurrent: of the layers that are so; None: no layer is.
        norm: what all norms compute.
        predictors: layers after the last one that files may hold and that are neither computed nor
            loaded: they predict further tokens (multi-token prediction, arXiv:2412.19437).
        body: name of the body. In a model that takes more than text it is that of the text model.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig = NormConfig()
    norms: LayerNorms = LayerNorms()
    attention: AttentionConfig = AttentionConfig()
    mlp: MLPConfig = MLPConfig()
    experts: ExpertsConfig | None = None
    recurrent: RecurrentConfig | None = None
    multipliers: Multipliers = Multipliers()
    tie_word_embeddings: bool = False
    predictors: int = 0
    body: str = "model"

    @property
    def takes_more_than_text(self) -> bool:
        """Whether only a part of the model, its text model, is trained."""
        return self.body != "model"

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def pattern(self) -> tuple[int, int]:
        """The number of first layers, such as dense ones, and the length of the pattern that the
        layers after them repeat; (0, 1): all are alike. The two with the smallest sum."""
        kinds = self.layers
        return next(
            (first, both - first)
            for both in range(1, len(kinds) + 1)
            for first in range(both)
            if kinds[both:] == kinds[first : len(kinds) - (both - first)]
        )

    @property
    def experts_per_token(self) -> int | None:
        """None: no layer is a mixture."""
        return None if self.experts is None else self.experts.top_k

    @property
    def by_length(self) -> bool:
        """Whether a rotary embedding depends on the length of a document."""
        return any(kind.rope is not None and kind.rope.scaling.by_length for kind in self.layers)

    def most_positions(self, prompt: int) -> int:
        """As `positions_of_answer` says."""
        scalings = [kind.rope.scaling for kind in self.layers if kind.rope is not None]
        longropes = [scaling for scaling in scalings if isinstance(scaling, LongRopeScaling)]
        contexts = [scaling.original_max_position_embeddings for scaling in longropes]
        return positions_of_answer(self.max_position_embeddings, contexts, prompt)

    @property
    def shortest_window(self) -> int | None:
        """Of all layers; None: no layer has a window."""
        return min((kind.window for kind in self.layers if kind.window is not None), default=None)
