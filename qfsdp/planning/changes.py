"""Changes of a config: values for some of its keys, as text, as YAML, or applied to a copy."""

from __future__ import annotations

import copy
from typing import Any

from omegaconf import OmegaConf

from qfsdp.common.errors import InvalidField, UserError
from qfsdp.config.component import Component
from qfsdp.config.load import get_key
from qfsdp.config.reference import shown

Changes = dict[str, Any]  # key of the config -> value, e.g. {"sharding.strategy": "ddp"}

# Activation checkpointing and offload of parameters, from the fastest to what takes the least
# device memory.
CHECKPOINTING = ("none", "selective", "full")
OFFLOAD: dict[str, Changes] = {
    "none": {"sharding.offload_base": "none", "sharding.cpu_offload": False},
    "base_to_cpu": {"sharding.offload_base": "cpu", "sharding.cpu_offload": False},
    "all_to_cpu": {"sharding.offload_base": "none", "sharding.cpu_offload": True},
    "base_to_disk": {"sharding.offload_base": "disk", "sharding.cpu_offload": False},
}


def strategy_over_all_ranks(strategy: str) -> Changes:
    """A sharding strategy without the group sizes of hybrid ones, and with experts undivided."""
    whole = {"sharding.replicate": None, "sharding.shard": None, "sharding.expert_parallel": 1}
    return {"sharding.strategy": strategy} | whole


def micro_batches(size: int, samples: int) -> Changes:
    """Micro-batches of `size` samples, as many as the `samples` of one step need."""
    return {"batch_size": size, "gradient_accumulation_steps": samples // size}


def changed(cfg: Any, changes: Changes) -> Any:
    """A copy of a config with other values, checked as `load_config` checks them.

    Raises:
        AttributeError: the config has no such key.
        UserError: the values do not go together.
    """
    cfg = copy.deepcopy(cfg)
    for key, value in changes.items():
        *sections, name = key.split(".")
        node = cfg
        for section in sections:
            node = getattr(node, section)
        getattr(node, name)
        setattr(node, name, value)
    try:
        for section in (cfg, *vars(cfg).values()):
            if hasattr(section, "check") and not isinstance(section, Component):
                section.check()
    except InvalidField as error:
        raise UserError(f"with {as_words(changes)}, {error}") from None
    return cfg


def differing(cfg: Any, changes: Changes) -> Changes:
    """The changes whose value differs from the config's."""
    return {key: value for key, value in changes.items() if get_key(cfg, key) != value}


def as_words(changes: Changes) -> str:
    """Overrides for a command line: "sharding.strategy=ddp batch_size=4"."""
    return " ".join(f"{key}={shown(value)}" for key, value in changes.items())


def as_yaml(changes: Changes) -> str:
    """The changes as a fragment of a YAML file."""
    tree = OmegaConf.create({})
    for key, value in changes.items():
        OmegaConf.update(tree, key, value)
    return OmegaConf.to_yaml(tree)
