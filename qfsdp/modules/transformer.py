"""The decoder that every recipe trains, put together from the parts of a `DecoderConfig`.

Modules have the names that Hugging Face gives them, and rotary embeddings use its layout. So
checkpoint keys are parameter names, and no weight is renamed or permuted. One class serves all
families; `families` says which parts each has.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from qfsdp.data.batch import cut_rows
from qfsdp.data.cut_rows import CutRows, counted_tokens
from qfsdp.modules.activations import ActivationConfig as ActivationConfig
from qfsdp.modules.activations import Checkpointing, checkpointed
from qfsdp.modules.attention.document_lengths import Documents, document_lengths
from qfsdp.modules.attention.kv_cache import KVCache, LayerCache
from qfsdp.modules.attention.self_attention import within_window
from qfsdp.modules.collectives import over_parts
from qfsdp.modules.decoder_base import DecoderBase, LayerBase, OutputLayer, mark_lengths
from qfsdp.modules.loss import head_loss
from qfsdp.modules.low_rank.copies import copies_in
from qfsdp.modules.rope import RopeConfig
from qfsdp.modules.tiles import in_tiles

RotaryTables = dict[RopeConfig | None, tuple[Tensor | None, Tensor | None]]


class DecoderLayer(LayerBase):
    """Attention and feed-forward, each behind a norm, before a norm, or both, and added to the
    residual.

    `block` is the computation. `forward` adds what a run chooses around it: checkpointing and
    offloading of activations, and the cache of generation.

    Args:
        config: of the decoder.
        kind: what this layer has of its own.
    """

    @property
    def recomputed(self) -> Checkpointing:
        """How `block` is checkpointed: the compiler does "selective" by itself."""
        by_compiler = self.compiled and self.checkpointing == "selective"
        return "none" if by_compiler else self.checkpointing

    def block(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None,
        cu_seqlens: Documents = None,
        cache: LayerCache | None = None,
        counted: Tensor | None = None,
    ) -> Any:
        norms, mlp = self.norms, self.feed_forward
        y = self.mixer(self._norm(norms.before_attention, x), cos, sin, mask, cu_seqlens, cache)
        y = self._added(self._norm(norms.after_attention, y))
        if self.tile_tokens is not None:
            trained = [mlp, *(getattr(self, n) for n in (norms.before_mlp, norms.after_mlp) if n)]
            return in_tiles(self._with_feed_forward, x + y, self.tile_tokens, trained)
        z, routing = self._norm(norms.before_mlp, x + y), None
        if counted is None:
            z = mlp(z)
        else:
            z, routing = mlp(z, counted)
        z = self._added(self._norm(norms.after_mlp, z))
        # A second x + y. With a single one, backward adds the gradients of norm and residual in
        # another order, and fp32 runs differ from earlier ones in the last bits.
        return x + y + z if routing is None else (x + y + z, routing)

    def _with_feed_forward(self, x: Tensor) -> Tensor:
        z = self.feed_forward(self._norm(self.norms.before_mlp, x))
        return x + self._added(self._norm(self.norms.after_mlp, z))

    @property
    def mixer(self) -> Any:
        """What tokens see each other through: `Attention` or `DeltaNet`."""
        return getattr(self, self.mixer_name)

    @property
    def feed_forward(self) -> Any:
        """`MLP` or `MixtureMLP`."""
        return getattr(self, self.mlp_name)

    def _norm(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else getattr(self, name)(x)

    def _added(self, y: Tensor) -> Tensor:
        """What attention or feed-forward adds to the residual."""
        return y if self.residual_multiplier == 1.0 else y * self.residual_multiplier

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None,
        cu_seqlens: Documents = None,
        cache: LayerCache | None = None,
        counted: Tensor | None = None,
    ) -> Any:
        """`[batch, seq, hidden]`; with `counted`, of a mixture, also its `routing_sums`."""
        if cache is not None:
            return self.cached_block(x, cos, sin, mask, cache)
        if self.compiled:  # marked here: FSDP2's hooks pass other tensors than the caller's
            mark_lengths(x, cos, sin, mask, cu_seqlens, counted)
        args = (x, cos, sin, mask, cu_seqlens, None, counted)
        trains = torch.is_grad_enabled()
        mode = self.recomputed if trains else "none"
        if self.offload is None or not trains:
            return self.block(*args) if mode == "none" else checkpointed(self.block, mode, *args)
        tables = (table for table in (cos, sin) if table is not None)
        with self.offload.layer((*self.parameters(), *copies_in(self), *tables)):
            return checkpointed(self.block, mode, *args)


class Decoder(DecoderBase):
    """A causal language model whose parameters carry their Hugging Face names.

    It has no buffers: every forward computes the rotary tables. With `tie_word_embeddings`,
    `lm_head.weight` *is* `model.embed_tokens.weight`. Replacing parameters (`to_empty`,
    `load_state_dict(assign=True)`) breaks that; `tie_weights` restores it.

    Fields:
        compute_dtype: FSDP2 casts trained weights to it as it gathers them; None: no cast.
        routing: what the routers of a mixture of experts do in training.
        split: computes embedding and output layer where ranks share their rows
            (`qfsdp.distributed.split_vocabulary`); None: this rank has all rows.
        embedding_rows, head_rows: rows that are trained alone, `TrainedRows`; None: none.
        group: name of the ranks that share rows, in `GROUPS`; "": none do. With labels it takes
            `CutRows` only.
    """

    layer = DecoderLayer

    @property
    def body(self) -> Any:
        """Embedding, layers and last norm; of a model that takes more than text, the text's."""
        return getattr(self.model, "language_model", self.model)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Documents = None,
        cache: KVCache | None = None,
        sample_ids: Tensor | None = None,
        num_samples: int = 0,
        num_targets: int | None = None,
        ends: Tensor | None = None,
        taught: Any = None,
    ) -> Tensor:
        """Logits, or with labels the loss.

        Args:
            tokens: int64 `[batch, seq]`. With a `cache`: prompts in the first call, padded on the
                right, then `[batch, 1]` in each later call.
            positions: int64 `[batch, seq]`; None: 0, 1, 2, ...
            mask: bool `[batch, 1, seq, seq]`, True where a query (row) attends to a key; it must
                be causal. None: causal attention, also for rows padded on the right.
            labels: int64 `[batch, seq]`, -100 for none.
            cu_seqlens: int32 bounds of the samples packed into rows, see `attend_documents`, or
                `SharedDocuments`. `positions` must then start at 0 in each sample. `CutRows`: all
                other arguments are this rank's part of each row.
            cache: for generation, without gradients; only `tokens` may be given with it.
            sample_ids: with `labels`: int64 `[batch, seq]`, samples of positions; < `num_samples`.
            num_targets: number of labels that count; with it the host does not wait for the device.
            ends: without labels: int64 `[n]`, the positions among `batch * seq` that have logits.
            taught: with `labels`: what a teacher says, a `Taught`; its loss is returned.

        Returns:
            `[batch, seq, vocab]` in the weights' dtype; of `ends` `[n, vocab]`. With `labels` their
            summed cross entropy, an fp32 scalar, or of each sample (over whole rows), fp32
            `[num_samples]`; logits never exist whole. With a `cache`: `[batch, vocab]`, the logits
            after each row's last token.

        Raises:
            ValueError: `cu_seqlens` is given with a mask or without positions, a mask to a model
                with sinks or a state, or whole rows with labels to ranks that share rows.
        """
        if cache is not None:
            return self.next_logits(tokens, cache)
        cut = self._cut(positions, mask, labels, cu_seqlens)
        x = self.embedded(tokens)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        tables = self.rotary_tables(positions, x.dtype, labels, cu_seqlens)
        masks = self.within_windows(mask, tokens, cu_seqlens)
        followed = self.config.experts and self.training and torch.is_grad_enabled()  # routing
        counted = counted_tokens(labels, cut) if followed and labels is not None else None
        x, routed = self._layers(x, tables, masks, cu_seqlens, counted)
        x = self.final(x)
        if labels is None:
            return self.logits(x if ends is None else x.flatten(0, 1)[ends])
        loss = self._loss(x, labels, sample_ids, num_samples, num_targets, taught=taught)
        if cut is not None and sample_ids is not None:
            loss = over_parts(loss, self.group)
        return loss if counted is None else self.routing.follow(loss, routed, counted, labels, cut)

    def _cut(
        self,
        positions: Tensor | None,
        mask: Tensor | None,
        labels: Tensor | None,
        cu_seqlens: Documents,
    ) -> CutRows | None:
        """Checks the arguments of `forward`; the documents of cut rows, None for others."""
        cut = cut_rows(cu_seqlens, self.group, labels)
        if cu_seqlens is not None and (mask is not None or positions is None):
            raise ValueError("cu_seqlens takes positions with it, and no mask")
        if mask is not None and (self.config.attention.sinks or self.config.recurrent):
            raise ValueError("attention with sinks and recurrent layers take no mask")
        return cut

    def _layers(
        self,
        x: Tensor,
        tables: RotaryTables,
        masks: dict[int | None, Tensor | None],
        cu_seqlens: Documents,
        counted: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The last layer's output and, with `counted`, the routing of every mixture."""
        routed: list[Tensor] = []
        for layer, kind in zip(self.body.layers, self.config.layers, strict=True):
            args = (x, *tables[kind.rope], masks[kind.window], cu_seqlens)
            if counted is None or not kind.mixture:
                x = layer(*args)
            else:
                x, sums = layer(*args, None, counted)
                routed.append(sums)
        return x, routed

    def within_windows(
        self, mask: Tensor | None, tokens: Tensor, documents: Documents = None
    ) -> dict[int | None, Tensor | None]:
        """The mask of every window; attention with sinks or within documents needs none."""
        windows = {kind.window for kind in self.config.layers}
        if self.config.attention.sinks or documents is not None:
            return dict.fromkeys(windows)
        return {window: within_window(mask, window, tokens) for window in windows}

    def embedded(self, tokens: Tensor) -> Tensor:
        embedding, factors = self.body.embed_tokens, self.config.multipliers
        x = self.split.embedded(embedding, tokens) if self.split else embedding(tokens)
        if self.embedding_rows is not None:
            x = self.embedding_rows.in_embedded(x, tokens)
        if factors.rounds_embedding:
            # `full` fills on the device; `tensor` would copy from the host and wait.
            return x * torch.full((), factors.embedding, dtype=x.dtype, device=x.device)
        return x if factors.embedding == 1.0 else x * factors.embedding

    def final(self, x: Tensor) -> Tensor:
        """Input of the output layer. It is linear, so its input takes the logits' multiplier."""
        x, factor = self.body.norm(x), self.config.multipliers.logits
        return x if factor == 1.0 else x * factor

    def _loss(self, hidden: Tensor, labels: Tensor, *samples: Any, taught: Any) -> Tensor:
        head, given = self.lm_head, (hidden, labels, *samples)
        more = {"taught": taught, "rows": self.head_rows}
        if self.split is not None:
            return cast(Tensor, self.split.loss(head, *given, **more))
        if not isinstance(head, FSDPModule):
            return head_loss(head, *given, **more)
        if isinstance(head, OutputLayer) and head.weight.requires_grad:
            # One call for FSDP2, which reduces and frees the gradient as backward begins.
            return head(*given, taught)
        # Gathered by hand, as the loss calls it chunk by chunk. A frozen one is freed after that;
        # FSDP2 would keep it until backward.
        head.unshard()
        loss = head_loss(head, *given, **more)
        if not any(param.requires_grad for param in head.parameters()):
            head.reshard()
        return loss

    def rotary_tables(
        self,
        positions: Tensor,
        dtype: torch.dtype,
        labels: Tensor | None = None,
        cu_seqlens: Documents = None,
        lengths: Tensor | None = None,
    ) -> RotaryTables:
        """The tables of every rotary embedding of the model; (None, None) for none."""
        ropes = {kind.rope for kind in self.config.layers if kind.rope}
        if lengths is None and any(rope.scaling.by_length for rope in ropes):
            lengths = document_lengths(positions, labels, cu_seqlens)
        of_all = (self.config.head_dim, positions, positions if lengths is None else lengths, dtype)
        return {None: (None, None)} | {rope: rope.tables(*of_all) for rope in ropes}
