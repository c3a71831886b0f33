"""Processes, sharding and offload: how a model is spread over ranks, host memory and disk.

`world.py` joins the processes, `strategy.py` is the `sharding` section of a config, `sharding.py`
applies FSDP2, and `gradients.py` clips over all ranks. `stores.py`, `disk_ring.py` and
`fetch_order.py` keep the frozen base off the device. This package knows models, but no file
formats: `qfsdp.checkpoint` reads and writes files.
"""
