"""The config section `model`: which model, in which numbers, built by whom."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.safetensors_folder import SafetensorsFolder
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.hub.download import local_folder
from qfsdp.modules.compute_dtype import compute_dtype
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.hub_models.config import (
    AnyConfig,
    HubConfig,
    Implementation,
    as_stored,
    model_config,
)
from qfsdp.modules.hub_models.decoder import AnyDecoder, build_decoder


@dataclass
class ModelConfig:
    """Section `model`: the base model.

    Fields:
        path: a Hugging Face model folder (`config.json` and safetensors), or the name of one on the
            hub, `org/model` or `org/model@revision`. A folder wins. Its weights have 16 or 32 bits,
            FP8 or bitsandbytes' 4 bits, or `recipes/quantize` wrote them.
        dtype: the compute dtype, and the dtype of weights that are not quantized. Adapters and
            the optimizer are always fp32. The files may have any dtype. "fp16" is for GPUs without
            bf16 (V100, T4); gradients are computed times a loss scale
            (`qfsdp.training.loss_scale`). A CPU without bf16 products computes "bf16" in fp32.
        quantize_cache: a folder that all ranks see; the first run writes its quantized weights
            there and later runs load them. null: quantize in every run.
        implementation: "native": qfsdp's own decoder, of the architectures in
            `qfsdp/modules/families`. "transformers": the module of the installed transformers, of
            any causal language model. "auto": native where qfsdp has it, else transformers' if
            docs/reference/models.md lists it as equal.
        router_aux_loss: factor of the load-balancing loss of a mixture of experts in training, or
            "family": `router_aux_loss_coef` of its `config.json`. It is computed for each row of a
            batch (`qfsdp.modules.experts.routing`). null: without it.
        max_positions: the longest row of a run, where that is beyond `max_position_embeddings` of
            `config.json`. Rotary positions stay as `rope_scaling` there has them. null: not beyond.
        mean_rows: `[first, rows]`: the embedding and the output layer have that many rows, and
            those from the first on begin as the mean of those before. `tokenizer.new_tokens` sets
            it. null: the folder's rows.
    """

    path: str
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    quantize_cache: str | None = None
    implementation: Implementation = "auto"
    router_aux_loss: float | Literal["family"] | None = None
    max_positions: int | None = None
    mean_rows: list[int] | None = None

    def check_length(self, tokens: int, own: int) -> None:
        """Raises UserError if rows of `max_seq_len: tokens` are longer than the model's `own`
        positions and `max_positions`."""
        if tokens > (most := max(own, self.max_positions or 0)):
            raise UserError(
                f"max_seq_len: {tokens}; expected at most {most}, "
                + (
                    f"the model's positions; model.max_positions={tokens} goes beyond them, with "
                    "rope_scaling as config.json has it, such as yarn or linear"
                    if most == own
                    else "model.max_positions"
                )
            )

    @property
    def folder(self) -> Path:
        """Where the model is on this machine."""
        return local_folder(self.path)

    def any_config(self) -> AnyConfig:
        """What the folder says of the model that is built; raises UserError."""

        def stored() -> Collection[str]:
            has_files = any(self.folder.glob("*.safetensors"))
            return SafetensorsFolder(self.folder).tensors if has_files else ()

        found = as_stored(model_config(self.folder, self.implementation), stored)
        more = isinstance(found, DecoderConfig) and found.takes_more_than_text
        for key in ("quantize_cache", "mean_rows") if more else ():
            if (value := getattr(self, key)) is not None:
                expected = "expected null, as this model takes more than text"
                raise UserError(f"model.{key}: {value}; {expected}")
        if self.mean_rows is None:
            return found
        first, rows = self.mean_rows
        if isinstance(found, HubConfig) or not first <= found.vocab_size <= rows:
            built = "null: transformers computes this model"
            most = f"a first row of at most {found.vocab_size} and no fewer rows, as the model has"
            expected = built if isinstance(found, HubConfig) else most
            raise UserError(f"model.mean_rows: {self.mean_rows}; expected {expected}")
        return replace(found, vocab_size=rows)

    def weights(self) -> ModelWeights:
        """The weights of the folder, by the names of the model that is built."""
        return ModelWeights(self.path, self.implementation, self.mean_rows)

    def build(self) -> AnyDecoder:
        """The model on the meta device. Raises UserError, see `any_config` and `decoder`."""
        config = self.any_config()
        native = isinstance(config, DecoderConfig)
        return build_decoder(self._decoder() if native else config, compute_dtype(self.dtype))

    def decoder(self, text_alone: bool = True) -> DecoderConfig:
        """Our own decoder. Raises UserError, also for a model that transformers builds, for a
        `router_aux_loss` without experts, and with `text_alone` for a model that takes more."""
        found = self._decoder()
        more = text_alone and found.takes_more_than_text
        return DecoderConfig.of_text(self.folder) if more else found

    def _decoder(self) -> DecoderConfig:
        config, factor = self.any_config(), self.router_aux_loss
        if isinstance(config, HubConfig):
            raise UserError(
                f"model.implementation: '{self.implementation}' takes transformers' "
                f"{config.architecture} for {self.path}; expected a model that qfsdp builds "
                "itself, which this command needs"
            )
        if factor is None:
            return config
        if config.experts is None:
            why = "but this model has no mixture of experts"
            raise UserError(f"model.router_aux_loss: {factor!r}, {why}; expected null")
        router = config.experts.router
        router = replace(router, aux_loss=router.family_aux_loss if factor == "family" else factor)
        return replace(config, experts=replace(config.experts, router=router))

    def check(self) -> None:
        factor = self.router_aux_loss
        if isinstance(factor, float) and not 0 <= factor < math.inf:
            raise InvalidField("router_aux_loss", factor, 'a number of at least 0, or "family"')
        if self.mean_rows is None:
            return
        if len(self.mean_rows) != 2 or not 0 < self.mean_rows[0] <= self.mean_rows[1]:
            expected = "[first, rows], the first above 0 and no more than the rows, or null"
            raise InvalidField("mean_rows", self.mean_rows, expected)
        if self.quantize_cache is not None:
            raise InvalidField("quantize_cache", self.quantize_cache, "null with new tokens")
