"""`optimizer.lr: auto`: a learning rate from published sweeps, where they hold.

    lr = 5e-5 * (10 for LoRA and DoRA, 1 for full finetuning) * (2000 / hidden_size) ^ exponent

Thinking Machines fitted it on supervised finetuning of Llama and Qwen models with LoRA on all
linears, alpha 32, s = alpha / rank, at ranks from 1 to 512 ("LoRA Without Regret", 2025, and
`tinker_cookbook.hyperparam_utils` of that year). docs/internals/adapters.md says where it fails.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

from qfsdp.common.errors import UserError, speaks_for_all
from qfsdp.config.component import Component

AUTO = "auto"
EXPONENTS = {"Llama": 0.781, "Mistral": 0.781, "Qwen": 0.0775}  # Mistral: Llama's shape; not fitted
_SAID = "QFSDP_LR_SAID"  # in the environment, where the ranks of a run inherit it


def choose_lr(cfg: Any) -> None:
    """Replaces `optimizer.lr: auto` in the config of a training recipe, and prints the number.

    `config.yaml` of the run and its checkpoints have the number. Raises UserError: the rate is not
    known for this model, optimizer or kind of adapter."""
    if cfg.optimizer.kwargs.get("lr") != AUTO:
        return
    size, exponent = _size_and_exponent(cfg)
    factor, method = _factor(cfg)
    lr = float(f"{5e-5 * factor * (2000 / size) ** exponent:.3g}")
    cfg.optimizer.kwargs["lr"] = lr
    if speaks_for_all() and os.environ.get(_SAID) != str(lr):
        os.environ[_SAID] = str(lr)
        formula = f"5e-5 x {factor} ({method}) x (2000 / {size})^{exponent}"
        print(f"optimizer.lr: auto is {lr:g} = {formula}", flush=True)


def any_lr(optimizer: Component) -> Component:
    """The same with a number as its rate: for a dry run, which does not depend on it."""
    if optimizer.kwargs.get("lr") != AUTO:
        return optimizer
    return replace(optimizer, kwargs=optimizer.kwargs | {"lr": 1e-4})


def _size_and_exponent(cfg: Any) -> tuple[int, float]:
    size = cfg.model.any_config().hidden_size
    config = json.loads((cfg.model.folder / "config.json").read_text(encoding="utf-8"))
    architecture = str((config.get("architectures") or [""])[0])
    for family, exponent in EXPONENTS.items():
        if architecture.startswith(family):
            return size, exponent
    raise _unknown(f"{architecture} models; expected one of {', '.join(EXPONENTS)}")


def _factor(cfg: Any) -> tuple[int, str]:
    """10 or 1, and the method in words."""
    optimizer = cfg.optimizer.path.rpartition(".")[2]
    if not optimizer.startswith("AdamW"):
        raise _unknown(f"{cfg.optimizer.path}; expected an AdamW")
    if not hasattr(cfg, "adapter"):
        if cfg.trainable.layers != "all":
            raise _unknown(f"trainable.layers={cfg.trainable.layers}; expected all")
        return 1, "full"
    adapter = cfg.adapter
    known: dict[str, tuple[Any, ...]] = {
        "method": ("lora", "dora"),
        "alpha": (32.0,),
        "rslora": (False,),
    }
    known |= {"lora_plus_ratio": (None,), "alpha_pattern": (None,), "init": ("default", "loftq")}
    for key, values in known.items():
        if (value := getattr(adapter, key)) not in values:
            expected = " or ".join(_as_yaml(v) for v in values)
            raise _unknown(f"adapter.{key}={_as_yaml(value)}; expected {expected}")
    return 10, adapter.method


def _as_yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower().removesuffix(".0")


def _unknown(what: str) -> UserError:
    return UserError(f"optimizer.lr: 'auto' is not known for {what}, or a number")
