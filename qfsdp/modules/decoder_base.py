"""How a decoder and its layers are built, what a run sets in them, and how they generate.
`transformer` has what they compute in a training step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfsdp.data.cut_rows import CutRows
from qfsdp.data.preferences.shared_prompts import SharedDocuments
from qfsdp.modules.activation_offload import Offload
from qfsdp.modules.activations import ActivationConfig, Checkpointing
from qfsdp.modules.attention.document_lengths import Documents
from qfsdp.modules.attention.kv_cache import KVCache, LayerCache
from qfsdp.modules.attention.self_attention import Attention
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.decoder_parts import LayerConfig
from qfsdp.modules.delta_net import DeltaNet
from qfsdp.modules.experts.mixture import MixtureMLP
from qfsdp.modules.experts.routing import Routing
from qfsdp.modules.loss import head_loss
from qfsdp.modules.mlp import MLP


class ModelParts(NamedTuple):
    """The modules of any decoder by what they are: their names differ between implementations.

    Fields:
        body: all up to the last hidden state.
        layers: of the body, in order.
        embedding: of tokens.
        output: the output layer.
    """

    body: nn.Module
    layers: nn.ModuleList
    embedding: Any
    output: Any


class LayerBase(nn.Module):
    """The base of `DecoderLayer`, which documents the arguments."""

    block: Any

    def __init__(self, config: DecoderConfig, kind: LayerConfig) -> None:
        super().__init__()
        self.norms, self.mlp_name = config.norms, config.mlp.module
        self.residual_multiplier = config.multipliers.residual
        self.mixer_name = "linear_attn" if kind.recurrent else "self_attn"
        mixer = DeltaNet(config) if kind.recurrent else Attention(config, kind)
        setattr(self, self.mixer_name, mixer)
        setattr(self, self.mlp_name, MixtureMLP(config) if kind.mixture else MLP(config))
        for name in config.norms.names():
            setattr(self, name, config.norm.build(config.hidden_size))
        self.checkpointing: Checkpointing = "none"
        self.offload: Offload | None = None
        self.tile_tokens: int | None = None  # of `ActivationConfig`
        self.compiled = False

    def compile_block(self) -> None:
        """Compiles `block`; FSDP2's hooks on the layer stay outside of the compiled code."""
        self.block = torch.compile(self.block)  # type: ignore[method-assign]
        self.compiled = True

    def cached_block(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None,
        cache: LayerCache,
    ) -> Tensor:
        """`block` with a cache. A prompt runs uncompiled: one call does not pay for a build."""
        if self.compiled and cache.slots is None:
            return type(self).block(self, x, cos, sin, mask, None, cache)
        if self.compiled:
            for tensor in (x, cos, sin, cache.slots):
                if tensor is not None:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            for tensor, dim in ((mask, 3), (cache.keys, 2), (cache.values, 2)):
                torch._dynamo.maybe_mark_dynamic(tensor, [0, dim])
        return self.block(x, cos, sin, mask, None, cache)


def mark_lengths(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Documents,
    counted: Tensor | None,
) -> None:
    """Tells the compiler which sizes vary. Without it the compiler builds everything for the first
    batch, and again for the first batch of another length (20 s each for SmolLM2 on a CPU)."""
    if cu_seqlens is not None:  # packed rows have one length, but any number of documents
        shared = isinstance(cu_seqlens, SharedDocuments)
        given: list[Any] = [cu_seqlens]
        if isinstance(cu_seqlens, tuple):
            given = [*cu_seqlens[: 1 + shared]]  # tokens written out
        if isinstance(cu_seqlens, CutRows) and cu_seqlens.prompts is not None:
            given += cu_seqlens.prompts[:3]
        for tensor in given:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        if not isinstance(cu_seqlens, CutRows):
            return
    for tensor in (x, cos, sin, counted):
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
    if mask is not None:
        torch._dynamo.maybe_mark_dynamic(mask, [2, 3])


class OutputLayer(nn.Linear):
    """Logits `[..., vocab]` of hidden states or, given labels, their `head_loss`."""

    def forward(self, x: Tensor, labels: Tensor | None = None, *of_loss: Any) -> Tensor:
        if labels is None:
            return F.linear(x, self.weight.to(x.dtype))
        return head_loss(self, x, labels, *of_loss)


class Backbone(nn.Module):
    """Hugging Face's `model`: gives its parts their names. `Decoder.forward` runs them."""

    def __init__(self, config: DecoderConfig, layer: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layer(config, kind) for kind in config.layers)
        self.norm = config.norm.build(config.hidden_size)


class DecoderBase(nn.Module):
    """The base of `Decoder`, which documents the fields."""

    layer: type[LayerBase]

    if TYPE_CHECKING:  # of `Decoder`

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.split: Any = None
        self.group = ""
        self.routing = Routing(config.experts.router.aux_loss if config.experts else 0.0)
        self.model: Any = Backbone(config, self.layer)
        if config.takes_more_than_text:
            self.model = nn.ModuleDict({"language_model": self.model})
        self.lm_head = OutputLayer(config.hidden_size, config.vocab_size, bias=False)
        self.embedding_rows: Any = None
        self.head_rows: Any = None
        self.output_name = "lm_head"  # or of what `add_score_head` puts there
        self.tie_weights()

    @property
    def parts(self) -> ModelParts:
        """Its modules by what they are."""
        body = self.body
        return ModelParts(body, body.layers, body.embed_tokens, getattr(self, self.output_name))

    def tie_weights(self) -> None:
        """Makes the output layer share the embedding's weight if the config ties them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.body.embed_tokens.weight

    def set_activations(self, config: ActivationConfig) -> None:
        """Sets what each layer keeps for backward, and where."""
        offload, tile = Offload() if config.offload else None, config.tile_of(self.config)
        for index, layer in enumerate(self.body.layers):
            layer.checkpointing = "none" if index % config.every_n_layers else config.checkpointing
            layer.offload, layer.tile_tokens = offload, tile
            layer.mixer.keeps_all = layer.checkpointing == "none" and offload is None

    def share_rows(self, group: str) -> None:
        """Has the ranks of `group`, in `GROUPS`, share the rows that it gets."""
        self.group = self.routing.group = group
        for layer in self.body.layers:
            layer.mixer.group = group

    def compile_layers(self) -> None:
        """Compiles the computation of every layer; FSDP2's hooks stay outside of it.

        All layers of a kind share two builds, for batches of any length: one is for the first
        layer, whose input needs no gradient, the other for the rest.
        """
        # Backward computes pointwise results (norms, rotations, silu) again instead of keeping
        # them: 731 MB kept instead of 1059 for 2048 tokens of SmolLM2, in 1 % more time.
        torch._functorch.config.ban_recompute_materialized_backward = False
        # Each kind of layer has its builds; at the limit PyTorch would go on without compiling.
        kinds = len(set(self.config.layers))
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, 8 * kinds)
        for layer in self.body.layers:
            cast(LayerBase, layer).compile_block()

    def next_logits(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """`Decoder.forward` with a cache."""
        x = self.embedded(tokens)
        rows, columns = (torch.arange(size, device=tokens.device) for size in tokens.shape)
        positions, last = columns.unsqueeze(0), cache.lengths - 1
        lengths = cache.lengths.unsqueeze(1)
        masks = {} if cache.filled else self.within_windows(None, tokens)
        if cache.filled:
            positions, last, lengths = lengths, torch.zeros_like(rows), lengths + 1
            masks = {kind.window: cache.mask(kind.window) for kind in self.config.layers}
        tables = self.rotary_tables(positions, x.dtype, lengths=lengths)
        layers = zip(self.body.layers, self.config.layers, cache.layers(x.dtype), strict=True)
        for layer, kind, kept in layers:
            x = layer(x, *tables[kind.rope], masks[kind.window], None, kept)
        cache.advance()
        return self.logits(self.final(x[rows, last]))

    def logits(self, x: Tensor) -> Tensor:
        """The output layer, also where ranks share its rows."""
        split = self.split if self.output_name == "lm_head" else None
        found = split.logits(self.lm_head, x) if split else self.parts.output(x)
        return found if self.head_rows is None else self.head_rows.in_logits(found, x)


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(Hugging Face name, parameter) of the model without its adapters and score head.

    A module with parameters that are not the base's names those that are: `base_fields`."""
    fields: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        if (own := getattr(module, "base_fields", None)) is not None:
            fields |= {name: own, f"{name}.start": ()}  # `AdaptedLinear.start`
    for name, param in model.named_parameters():
        module_name, _, field = name.rpartition(".")
        if field in fields.get(module_name, (field,)):
            yield name, param
