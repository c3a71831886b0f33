"""The config section `trainable`: which weights of a decoder are trained, and in which dtype.

Full finetuning trains all of them. Llama-Pro (https://arxiv.org/abs/2401.02415) trains the blocks
that it adds to a model; the rest is frozen, and may be quantized.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from qfsdp.common.errors import InvalidField, UserError
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES, compute_dtype
from qfsdp.modules.decoder_config import EXPANDED
from qfsdp.modules.quantized_linear import LINEARS

CORRECTION = ".e_score_correction_bias"
"""A router's correction balances the choice of experts; no gradient reaches it."""


@dataclass
class TrainableConfig:
    """Section `trainable`: which weights are trained.

    Fields:
        layers: "all" decoder layers; "expanded": the layers that recipes/block_expansion added
            (`config.json` names them); or a list of indices from 0.
        embeddings: whether token embeddings, last norm and output layer are trained too; null:
            only if all layers are.
        dtype: of trained parameters, and so of their gradients and the optimizer's state. "fp32"
            with `model.dtype: bf16` or fp16 computes in that (every rank casts its rows before
            they are gathered). Use "bf16" with optimizers that round stochastically or keep state
            in 8 bits (torchao.optim).
    """

    layers: Literal["all", "expanded"] | list[int] = "all"
    embeddings: bool | None = None
    dtype: Literal["fp32", "bf16"] = "fp32"

    @property
    def trains_embeddings(self) -> bool:
        return self.layers == "all" if self.embeddings is None else self.embeddings

    def casts(self, model_dtype: str) -> bool:
        """Whether trained weights are held in another dtype than the model computes in."""
        return COMPUTE_DTYPES[self.dtype] != compute_dtype(model_dtype)

    def check(self) -> None:
        if isinstance(self.layers, list):
            indices = "all, expanded, or a list of different indices of at least 0"
            if not self.layers or min(self.layers) < 0 or len({*self.layers}) < len(self.layers):
                raise InvalidField("layers", self.layers, indices)


def check_trainable(cfg: Any) -> None:
    """Raises UserError or InvalidField if other sections of a recipe's config contradict
    `trainable`."""
    trainable: TrainableConfig = cfg.trainable
    model, quantization = cfg.model, cfg.quantization
    for name, only in (("gradient_accumulation_steps", 1), ("clip_grad_norm", None)):
        if cfg.optimizer_in_backward and (value := getattr(cfg, name)) != only:
            expected = f"{only or 'null'}, as optimizer_in_backward keeps no gradients"
            raise InvalidField(name, value, expected)
    if cfg.optimizer_in_backward and getattr(cfg, "on_nonfinite", "stop") == "skip":
        expected = "stop, as optimizer_in_backward uses gradients before all of them are known"
        raise InvalidField("on_nonfinite", "skip", expected)
    if trainable.dtype == "bf16" and model.dtype != "bf16":
        coarser = f"'bf16' is coarser than model.dtype, {model.dtype}"
        raise UserError(f"trainable.dtype: {coarser}; expected fp32")
    if cfg.optimizer_in_backward and model.dtype == "fp16":
        expected = "false, as a step of fp16 is left out if any gradient overflows"
        raise InvalidField("optimizer_in_backward", True, expected)
    whole = trainable.layers == "all"
    if whole and cfg.sharding.offload_base != "none":
        raise UserError(
            f"sharding.offload_base: {cfg.sharding.offload_base!r}, but trainable.layers is all: "
            "no layer is frozen; expected none, or set sharding.cpu_offload=true"
        )
    if quantization.format == "none":
        return
    if whole:
        raise UserError(
            f"quantization.format: {quantization.format!r}, but trainable.layers is all, and "
            "trained weights cannot be quantized; expected none, or set trainable.layers to some"
        )
    if model.quantize_cache is not None:
        raise UserError(
            f"model.quantize_cache: '{model.quantize_cache}' would hold all layers quantized, also "
            "the trained ones; expected null"
        )
    if trainable.trains_embeddings and "lm_head" in quantization.targets:
        raise UserError(
            f"quantization.targets: {quantization.targets} has lm_head, which is trained; expected "
            "targets without it, or set trainable.embeddings=false"
        )


def set_trainable(model: Any, config: TrainableConfig, folder: Path) -> set[str]:
    """Freezes all of `model` but the weights that `config` selects.

    Sets `model.compute_dtype` to the model's dtype, and casts the trained weights to
    `config.dtype`. Weights that are never trained, such as routers' corrections, stay as they are.

    Args:
        model: a `Decoder` or `HubDecoder` on the meta device, not quantized yet.
        folder: the model folder, for its `config.json`.

    Returns:
        The names of the trained linears, which must stay plain.

    Raises:
        UserError: the model has no such layers, or is one of transformers that computes with a
            trained weight in fp32 although its own dtype is another.
    """
    parts, held = model.parts, COMPUTE_DTYPES[config.dtype]
    model.compute_dtype = parts.embedding.weight.dtype
    model.requires_grad_(False)
    trained: list[nn.Parameter] = [
        param
        for index in trained_layers(config, folder, len(parts.layers))
        for param in parts.layers[index].parameters()
    ]
    if config.trains_embeddings:
        of_layers = set(parts.layers.parameters())
        trained += [param for param in model.parameters() if param not in of_layers]
    chosen, kept = set(trained), getattr(model, "never_trained", ())
    for name, param in model.named_parameters():
        if param not in chosen or name in kept or name.endswith(CORRECTION):
            continue
        if param.dtype != model.compute_dtype and hasattr(model, "linears"):
            word = next(w for w, dtype in COMPUTE_DTYPES.items() if dtype == model.compute_dtype)
            raise UserError(
                f"model.dtype: {word}; expected fp32: this model keeps {name} in fp32, to which "
                "weights in several dtypes cannot be trained together"
            )
        param.data = param.data.to(held)
        param.requires_grad_(True)
    linears = ((name, m) for name, m in model.named_modules() if isinstance(m, LINEARS))
    return {name for name, linear in linears if linear.weight.requires_grad}


def trained_layers(config: TrainableConfig, folder: Path, depth: int) -> list[int]:
    """Indices of the trained layers of a model with `depth` layers. Raises as `set_trainable`."""
    if config.layers == "all":
        return list(range(depth))
    if isinstance(config.layers, list):
        if max(config.layers) >= depth:
            raise UserError(
                f"trainable.layers: {max(config.layers)} is not a layer of this model; expected "
                f"0 to {depth - 1}"
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
