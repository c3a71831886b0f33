"""Which weights of a decoder are trained themselves, and what they are held in.

All of them is full finetuning. Some layers, over a frozen and packed rest, is what Llama-Pro
(https://arxiv.org/abs/2401.02415) does with the blocks that it adds to a model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from qfsdp.cli.errors import InvalidField, UserError
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES, compute_dtype
from qfsdp.modules.decoder_config import EXPANDED
from qfsdp.modules.transformer import Decoder


@dataclass
class TrainableConfig:
    """Section `trainable`: which weights are trained.

    Fields:
        layers: "all" decoder layers; "expanded": those that recipes/block_expansion added, as
            `config.json` names them; or a list of indices, the first being 0.
        embeddings: whether token embeddings, last norm and output layer are trained too; null:
            where all layers are.
        dtype: what trained parameters, and so their gradients and the state of optimizers, are
            held in. "fp32" with `model.dtype: bf16` computes in bf16 (every rank casts its rows
            before they are gathered); "bf16" goes with optimizers that round stochastically or
            keep state in 8 bits (torchao.optim).
    """

    layers: Literal["all", "expanded"] | list[int] = "all"
    embeddings: bool | None = None
    dtype: Literal["fp32", "bf16"] = "fp32"

    @property
    def trains_embeddings(self) -> bool:
        return self.layers == "all" if self.embeddings is None else self.embeddings

    def casts(self, model_dtype: str) -> bool:
        """Whether trained weights are held in another dtype than `model.dtype` computes in."""
        return COMPUTE_DTYPES[self.dtype] != compute_dtype(model_dtype)

    def check(self) -> None:
        if isinstance(self.layers, list):
            indices = "all, expanded, or a list of different indices of at least 0"
            if not self.layers or min(self.layers) < 0 or len({*self.layers}) < len(self.layers):
                raise InvalidField("layers", self.layers, indices)


def check_trainable(cfg: Any) -> None:
    """Raises UserError or InvalidField where sections of a recipe's config do not go together with
    what it trains."""
    trainable: TrainableConfig = cfg.trainable
    model, quantization = cfg.model, cfg.quantization
    for name, only in (("gradient_accumulation_steps", 1), ("clip_grad_norm", None)):
        if cfg.optimizer_in_backward and (value := getattr(cfg, name)) != only:
            expected = f"{only or 'null'}, as optimizer_in_backward keeps no gradients"
            raise InvalidField(name, value, expected)
    if trainable.dtype == "bf16" and model.dtype == "fp32":
        raise UserError("trainable.dtype: 'bf16' is coarser than model.dtype, fp32; set it to fp32")
    whole = trainable.layers == "all"
    if whole and cfg.sharding.offload_base != "none":
        raise UserError(
            f"sharding.offload_base: {cfg.sharding.offload_base!r}, but trainable.layers is all: "
            "there is no frozen layer to offload; set none, or sharding.cpu_offload=true"
        )
    if quantization.format == "none":
        return
    if whole:
        raise UserError(
            f"quantization.format: {quantization.format!r}, but trainable.layers is all, and what "
            "is trained is not packed; set quantization.format=none, or trainable.layers to some"
        )
    if model.quantize_cache is not None:
        raise UserError(
            f"model.quantize_cache: '{model.quantize_cache}' would hold all layers packed, also "
            "those that are trained; set it to null"
        )
    if trainable.trains_embeddings and "lm_head" in quantization.targets:
        raise UserError(
            f"quantization.targets: {quantization.targets} has lm_head, which is trained; leave it "
            "out, or set trainable.embeddings=false"
        )


def set_trainable(model: Decoder, config: TrainableConfig, folder: Path) -> set[str]:
    """Freezes `model`, on the meta device and not packed yet, but for what `config` means.

    What is trained is held in `config.dtype` from here on, and `model.compute_dtype` is what the
    model had until now. Returns the names of the linears that are trained, and so not packed.

    Args:
        folder: of the model, for its `config.json`.

    Raises:
        UserError: there are no such layers.
    """
    body, held = model.model, COMPUTE_DTYPES[config.dtype]
    model.compute_dtype = body.norm.weight.dtype
    model.requires_grad_(False)
    trained: list[nn.Module] = [
        body.layers[index] for index in trained_layers(config, folder, len(body.layers))
    ]
    if config.trains_embeddings:
        trained += [body.embed_tokens, body.norm, model.lm_head]
    for module in trained:
        module.to(held).requires_grad_(True)
    linears = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear))
    return {name for name, linear in linears if linear.weight.requires_grad}


def trained_layers(config: TrainableConfig, folder: Path, depth: int) -> list[int]:
    """Indices of the decoder layers that are trained, of `depth`. Raises as `set_trainable`."""
    if config.layers == "all":
        return list(range(depth))
    if isinstance(config.layers, list):
        if max(config.layers) >= depth:
            raise UserError(
                f"trainable.layers: {max(config.layers)} is not among this model's layers, which "
                f"are 0 to {depth - 1}"
            )
        return sorted(config.layers)
    file = folder / "config.json"
    layers = json.loads(file.read_text(encoding="utf-8")).get(EXPANDED)
    indices = isinstance(layers, list) and all(type(index) is int for index in layers)
    if not indices or not layers or not all(0 <= index < depth for index in layers):
        raise UserError(
            f"trainable.layers: 'expanded', but {EXPANDED} in {file} is {layers!r}; expected a "
            "model that recipes/block_expansion wrote, or set trainable.layers to indices"
        )
    return sorted(layers)
