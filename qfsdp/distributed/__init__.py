"""Ranks and what is split over them.

The process group and its device mesh (world), how a config names a way of sharding (strategy),
FSDP2 around a model (sharding), frozen weights outside of the accelerator (stores, disk_ring), and
gradients of all ranks (gradients).
"""
