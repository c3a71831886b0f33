"""The commands: `qfsdp`, what `tune` does with our files, and `qfsdp doctor`.

All that knows torchtune is in `torchtune.py`. Importing this package imports no torch: a .pth file
does so at every start of the interpreter.
"""
