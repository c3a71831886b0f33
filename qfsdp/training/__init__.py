"""What a training loop needs around its step: optimizers, logs, measurements, validation.

Optimizers and schedules from the config, metrics of a run and where they are written, time, FLOPs
and memory of steps, profiler traces, and held-out losses while training goes on. The training step
itself stands in the recipes. `cosine_with_warmup` is exported for configs.
"""

from __future__ import annotations

from qfsdp.training.schedule import cosine_with_warmup

__all__ = ["cosine_with_warmup"]
