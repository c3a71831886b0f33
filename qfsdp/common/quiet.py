"""Silences two warnings that importing torchao prints and that no user of qfsdp can act on."""

from __future__ import annotations

import logging


def quiet_torchao() -> None:
    """Keeps torchao's import from printing; to be called before torchao is imported.

    It warns that its C++ extensions do not load, which qfsdp does not use, and torch warns that
    torchao registers the enum KernelPreference. Both lines would stand above our own errors.
    """
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").addFilter(_not_of_an_enum)


def _not_of_an_enum(record: logging.LogRecord) -> bool:
    return "is an Enum subclass" not in str(record.msg)
