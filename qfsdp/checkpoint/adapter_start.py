"""The initial values of adapters: new, from another run, or from weights of the base."""

from __future__ import annotations

from torch import nn

from qfsdp.checkpoint.adapter_base import adapter_texts as adapter_texts
from qfsdp.checkpoint.adapter_files import check_adapter, load_adapter
from qfsdp.checkpoint.base_starts import check_base_start, init_from_base
from qfsdp.checkpoint.loftq import check_loftq, init_loftq
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.common.errors import UserError
from qfsdp.common.long_waits import long_wait
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import init_adapters
from qfsdp.modules.adapters.reference import keeps_start, set_start
from qfsdp.modules.hub_models.decoder import AnyDecoder
from qfsdp.modules.low_rank.linear import refresh_dora_norms


def check_start(config: AdapterConfig, model: AnyDecoder, weights: ModelWeights) -> None:
    """The preflight of `start_adapters`; reads settings and headers, no tensors.

    Args:
        model: adapted as `config` says; may be on the meta device.
        weights: of `model.path`.

    Raises:
        UserError: see `check_adapter`, `check_loftq` and `check_base_start`; or a rank of experts
            without experts.
    """
    if config.expert_rank is not None and model.config.experts_per_token is None:
        raise UserError(
            f"adapter.expert_rank: {config.expert_rank!r}, but this model has no mixture of "
            "experts; expected null"
        )
    if config.start_from is not None:
        check_adapter(config, config.start_from, model)
    if config.init == "loftq":
        check_loftq(model, weights)
    if config.changes_base:
        check_base_start(model, config, weights)


@long_wait("adapters: computing their start")
def start_adapters(
    model: nn.Module, config: AdapterConfig, path: str, seed: int, resumed: bool = False
) -> None:
    """Initializes every adapter of a loaded and sharded model; every rank must call it.

    Args:
        path: `model.path`, whose weights are read again unless `config.init` is "default".
        resumed: a checkpoint will overwrite the adapters; skips what reads weights, unless the
            model keeps its start (`qfsdp.modules.adapters.reference`).
    """
    overwritten = resumed and not keeps_start(model)
    init_adapters(model, seed, magnitudes=not overwritten)
    if overwritten:
        return
    if config.start_from is not None:
        load_adapter(model, config.start_from)
        refresh_dora_norms(model)
    if config.init == "loftq":
        init_loftq(model, ModelWeights(path), seed)
    if config.changes_base:
        init_from_base(model, config, ModelWeights(path), seed)
    set_start(model)
