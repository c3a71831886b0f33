"""Predicts the memory and time of a training step before it runs, and explains when memory is out.

`estimate` executes a recipe's own functions on fake tensors (a dry run) and follows their memory.
`preflight` refuses runs that cannot fit, `search` finds the fastest way to run a config on given
GPUs, `oom` explains an out-of-memory error. No module here imports a recipe: recipes hand over
their `build_model` and `train_step`.
"""
