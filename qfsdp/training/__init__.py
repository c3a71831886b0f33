"""What a training recipe calls around its step.

Optimizers and schedules, metrics and their files, validation during a run, throughput, memory in
use, and profiles. The step itself, forward, backward and update, is written out in the recipe.
"""
