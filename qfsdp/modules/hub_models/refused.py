"""Settings that models of transformers do not have; each is refused before loading."""

from __future__ import annotations

from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.modules.hub_models.config import AnyConfig, HubConfig
from qfsdp.modules.hub_models.packing import check_packed
from qfsdp.modules.hub_models.shared_rows import ARCHITECTURES

# Key of a training recipe's config -> the value that is expected.
EXPECTED: dict[str, Any] = {
    "cuda_graphs": False,
    "sharding.expert_parallel": 1,
    "model.quantize_cache": None,
    "model.router_aux_loss": None,
    "quantization.compute": "bf16",
    "adapter.init": "default",
}


def check_hub_run(cfg: Any, config: HubConfig) -> None:
    """Raises `UserError`, which names the key, for a setting that `config`'s model cannot have."""
    for key, expected in EXPECTED.items():
        value = cfg
        for part in key.split("."):
            value = getattr(value, part, expected)
        if value != expected:
            raise unsupported(f"{key}: {_word(value)}", _word(expected), config)
    if getattr(cfg, "packed", False):
        check_packed(config)
    parts = getattr(getattr(cfg, "sharding", None), "context_parallel", 1)
    check_shared(parts, config)
    if parts > 1 and getattr(cfg, "compile", False):
        raise unsupported("compile: true with sharding.context_parallel", "false", config)
    for key, value, expected in (
        ("vocabulary", "split", "auto or gather"),
        ("offload_base", "disk", "none or cpu"),
    ):
        if getattr(getattr(cfg, "sharding", None), key, None) == value:
            raise unsupported(f"sharding.{key}: {value}", expected, config)


def check_shared(parts: int, config: HubConfig) -> None:
    """Raises `UserError` unless ranks may share the rows of `config`'s model in `parts`."""
    if parts == 1:
        return
    if config.architecture not in ARCHITECTURES:
        raise unsupported(f"sharding.context_parallel: {parts}", "1", config)
    check_packed(config, f"sharding.context_parallel: {parts}; expected 1")


def may_share(config: HubConfig) -> bool:
    """Whether ranks may share the rows of `config`'s model."""
    try:
        check_shared(2, config)
    except UserError:
        return False
    return True


def check_hub_answers(cfg: Any, config: AnyConfig, strategy: str | None) -> None:
    """`check_hub_run` of a recipe that evaluates or answers with any model.

    Args:
        strategy: of the ranks that generate: every row runs alone, so they would wait for each
            other's layers. None: it does not generate.
    """
    if isinstance(config, HubConfig):
        check_hub_run(cfg, config)
        if getattr(cfg, "compile", False):
            raise unsupported("compile: true", "false", config)
        if strategy not in (None, "ddp"):
            raise unsupported(f"sharding.strategy: {strategy}", "ddp", config)


def unsupported(setting: str, expected: str, config: HubConfig) -> UserError:
    """The error for a setting that models of transformers do not have."""
    return UserError(
        f"{setting}; expected {expected}: transformers' {config.architecture} does not have it"
    )


def _word(value: Any) -> str:
    words = {True: "true", False: "false", None: "null"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
