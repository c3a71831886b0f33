"""qfsdp: finetuning recipes for packed (4-bit) models, sharded by FSDP2.

This file stays free of imports: `qfsdp.cli.torchtune` is imported at every start of
the interpreter, and importing torch here would cost each of them seconds.
"""

__version__ = "0.1.0"
