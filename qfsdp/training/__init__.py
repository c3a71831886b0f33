"""What a training loop needs around its step: optimizers, logs, measurements, validation.

Optimizers and schedules from the config, metrics of a run and where they are written, time, FLOPs
and memory of steps, profiler traces, and held-out losses while training goes on. The training step
itself stands in the recipes.
"""
