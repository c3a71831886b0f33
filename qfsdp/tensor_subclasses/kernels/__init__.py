"""How code of this project reaches PyTorch below `nn.Module`: compiled kernels, custom ops, the
call that skips Dynamo (`dispatch`), host memory, and what a dry run is told (`dry_run`).

It knows nothing of 4-bit formats or models: packages above use it for their own kernels.
"""
