"""qfsdp: finetuning recipes for quantized (4-bit) models, sharded by FSDP2.

Packages, from top to bottom: memory, training, evaluation, checkpoint, distributed, modules, then
data and tensor_subclasses, then cli. Each imports only those below it. This file imports nothing:
a .pth file imports `qfsdp.cli.torchtune` at every start of the interpreter, and importing torch
here would cost each start seconds.
"""

__version__ = "0.1.0"
