"""The ways in: `qfsdp`, what `tune` does with our files, `qfsdp doctor`, and `import qfsdp`.

All that knows torchtune is in `torchtune.py`. Importing this package imports no torch: a .pth file
does so at every start of the interpreter.
"""
