"""How long a training step takes at least, from what it computes and what it moves.

Arithmetic (products, and dequantizing, which the same device does in between) runs beside the
transfers of the units ahead; every link carries its bytes at its own rate, and a stage of a
transfer (disk, host memory, PCIe, the wire) works on one unit while the next one works on the unit
before. So a step takes as long as its slowest part, and the transfers of one unit more, which
nothing runs beside. What is not prefetched is added instead. After S. Williams et al., "Roofline"
(CACM 52:4, 2009).

Left out: launch latency, kernels that wait for memory (norms, softmax, adapters' small products),
fragmentation of links. So times are good for ranking ways to run the same model, and for large
models within some tens of per cent.
"""

from __future__ import annotations

from dataclasses import dataclass

from qfsdp.memory.hardware import Hardware

# What a whole step reaches of the rate of large products: 0.75 of 0.8 (`hardware.REACHED`) is 0.6
# of the vendor's figure. Training of dense decoders is published at 0.4 to 0.65 of it.
EFFICIENCY = 0.75
OPTIMIZER_BYTES = 28  # AdamW in fp32, per number: reads p, g, m, v and writes p, m, v


@dataclass(frozen=True)
class Load:
    """What one rank does in one step, over all micro-batches.

    Fields:
        flops: of matrix products, those that are computed again included.
        dequantized_bytes: read and written to unpack weights.
        wire_bytes: sent to other ranks.
        to_device_bytes, to_host_bytes: between host memory and the device.
        disk_bytes: read from disk.
        trained: numbers that this rank's optimizer updates.
        units: that are transferred one after another in a pass, such as layers.
        prefetched: whether transfers run beside the computation.
        host_optimizer: whether the optimizer runs in host memory.
    """

    flops: float
    dequantized_bytes: float = 0
    wire_bytes: float = 0
    to_device_bytes: float = 0
    to_host_bytes: float = 0
    disk_bytes: float = 0
    trained: float = 0
    units: int = 1
    prefetched: bool = True
    host_optimizer: bool = False


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, the part that decides, and the seconds of each part alone."""

    seconds: float
    bound: str
    parts: dict[str, float]


def step_time(load: Load, hardware: Hardware, ranks: int) -> StepTime:
    """The time of a step of `load` on each of `ranks` ranks of a machine.

    Both directions of PCIe are added up: activations go to the host in forward and come back in
    backward, so they are never under way at the same time.
    """
    on_pcie = load.to_device_bytes + load.to_host_bytes
    arithmetic = {
        "compute": load.flops / (EFFICIENCY * hardware.matmul_rate),
        "dequantize": load.dequantized_bytes / hardware.memory_bandwidth,
    }
    transfers = {
        "PCIe": on_pcie / hardware.pcie,
        "host memory": ranks * on_pcie / hardware.host_bandwidth,
        "disk": ranks * load.disk_bytes / hardware.disk,
    }
    if hardware.interconnect is None:
        transfers["PCIe"] += load.wire_bytes / hardware.pcie
    else:
        transfers["wire"] = load.wire_bytes / hardware.interconnect
    busy, moving = sum(arithmetic.values()), max(transfers.values())
    beside = max(busy, moving) + moving / load.units
    seconds = beside if load.prefetched else busy + moving
    bandwidth = hardware.memory_bandwidth
    if load.host_optimizer:
        bandwidth = hardware.host_bandwidth / ranks
    optimizer = load.trained * OPTIMIZER_BYTES / bandwidth
    deciding = arithmetic if busy >= moving else transfers
    bound = max(deciding, key=lambda part: deciding[part])
    return StepTime(seconds + optimizer, bound, arithmetic | transfers | {"optimizer": optimizer})
