"""qfsdp: finetuning recipes for quantized (4-bit) models, sharded by FSDP2.

Packages, from top to bottom: cli, sweep, planning, training, evaluation, checkpoint, distributed,
modules, then data and tensor_subclasses, then launch, hub, config, common. Each imports only those
below it. A .pth file imports `qfsdp.cli.torchtune` at every start of the interpreter, so this file
imports nothing that takes time.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # that of `typing`, which takes time to import
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from qfsdp.cli.api import Model, Run, estimate, evaluate, generate, load, train
    from qfsdp.common.errors import UserError

# docs/guide/python.md; imported when they are first used.
__all__ = ["Model", "Run", "UserError", "estimate", "evaluate", "generate", "load", "train"]

__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # the top, which what lies below does not import

    return getattr(import_module("qfsdp.cli.api"), name)


class _OldPaths:
    """Asked for modules that nobody else finds: those of version 0.1 have moved, and the examples
    of a checkout lie beside the package."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("qfsdp."):
            return None
        from qfsdp.common.moved import spec_of

        return spec_of(name)


sys.meta_path.append(_OldPaths)  # type: ignore[arg-type]
