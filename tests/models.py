"""Models as recipes build them, and adapters with values as after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from qfsdp.checkpoint.adapter_files import adapter_parameters
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import load_base
from qfsdp.data.batch import IGNORE_INDEX
from qfsdp.distributed.sharding import shard_model
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World, init_world
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.low_rank.linear import refresh_dora_norms
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.dtensor import gather_rows, local_part, local_rows, whole_tensor
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor


def cpu_world() -> World:
    """The world of this test process, with its process group if it has one."""
    cpu = torch.device("cpu")
    if not dist.is_initialized():
        return World(cpu)
    size = dist.get_world_size()
    return World(cpu, dist.get_rank(), size, init_device_mesh("cpu", (size,)))


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """PyTorch's cross entropy of `[..., vocab]` in fp32, summed over labels `[...]` but -100."""
    flat = (logits.flatten(0, -2).float(), labels.flatten())
    return F.cross_entropy(*flat, ignore_index=IGNORE_INDEX, reduction="sum")


def build_meta_model(
    folder: Path,
    format: str = "nf4",
    adapter: AdapterConfig | None = None,
    dtype: str = "fp32",
    targets: list[str] | None = None,
) -> Decoder:
    """A model as recipes build it, before weights are read; an untied `lm_head` is quantized."""
    config = DecoderConfig.from_dir(folder)
    with torch.device("meta"):
        model = Decoder(config).to(COMPUTE_DTYPES[dtype])
    head = [] if config.tie_word_embeddings else ["lm_head"]
    of_format = QuantizationConfig(format, targets or ["all-linear", *head])
    quantize_linears(model, of_format, ModelWeights(folder).formats)
    if adapter is not None:
        add_adapters(model, adapter)
    return model


def load_model(
    folder: Path, wrap: str = "decoder_layer", sharding: dict[str, Any] | None = None, **build: Any
) -> Decoder:
    """A loaded model, sharded over the ranks of this process's world."""
    model = build_meta_model(folder, **build)
    config = ShardingConfig(wrap=wrap, **sharding or {})
    shard_model(model, config, init_world(config) if config.cpu_offload else cpu_world())
    load_base(model, ModelWeights(folder), torch.device("cpu"), config)
    return model


def loaded(folder: Path, **build: Any) -> dict[str, list[Tensor]]:
    """Every parameter of the loaded model, gathered; bytes and metadata of quantized ones."""
    found = {}
    for name, param in base_parameters(load_model(folder, **build)):
        local = local_part(param)
        if isinstance(local, QuantizedTensor):
            found[name] = [gather_rows(param, local.qdata), *local.metadata]
        else:
            found[name] = [whole_tensor(param)]
    return found


def adapted_model(folder: Path, config: AdapterConfig, **build: Any) -> Decoder:
    model = load_model(folder, adapter=config, **build)
    init_adapters(model, seed=0)
    return model


@torch.no_grad()
def randomize_adapters(model: nn.Module) -> None:
    """Sets values as after training, the same for any number of ranks: no tensor is zero, and no
    magnitude equals its norm."""
    generator = torch.Generator().manual_seed(7)
    for key, param in adapter_parameters(model).items():
        local = local_part(param)
        noise = torch.randn(param.shape, generator=generator)[local_rows(param)].to(local.device)
        if "magnitude" in key:
            local.mul_(1 + 0.02 * noise)
        elif "ia3_l" in key:
            local.mul_(1 + 0.2 * noise)
        else:
            local.add_(0.03 * noise)
    refresh_dora_norms(model)
