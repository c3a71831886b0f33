"""Predicts the time of a training step from its arithmetic and its transfers.

Arithmetic (matrix products and dequantization) overlaps with the transfers of the next units, such
as layers. Each link has its own rate, and the links (disk, host memory, PCIe, the wire, the network
between machines) work in parallel on different units. So a step takes as long as its slowest part,
plus the transfer of one unit that overlaps with nothing. Without prefetching, arithmetic and
transfers add up. After S. Williams et al., "Roofline" (CACM 52:4, 2009).

Left out: launch latency, kernels limited by memory bandwidth (norms, softmax, the small products of
adapters), fragmentation of links. So the times rank ways to run one model well; for large models
they are right within some tens of per cent.
"""

from __future__ import annotations

from dataclasses import dataclass

from qfsdp.planning.hardware import Hardware

# Share of the rate of large products that a whole step reaches. 0.75 of 0.8 (`hardware.REACHED`) is
# 0.6 of the vendor's figure; published trainings of dense decoders reach 0.4 to 0.65 of it.
EFFICIENCY = 0.75
OPTIMIZER_BYTES = 28  # per parameter, AdamW in fp32: reads p, g, m, v and writes p, m, v


@dataclass(frozen=True)
class Load:
    """The work of one rank in one step, over all micro-batches.

    Fields:
        flops: of matrix products, including recomputation.
        dequantized_bytes: read and written to dequantize weights.
        wire_bytes: sent to other ranks.
        network_bytes: sent to other machines by all ranks of this one.
        to_device_bytes, to_host_bytes: copied between host memory and the device.
        disk_bytes: read from disk.
        trained: number of parameters that this rank's optimizer updates.
        units: number of units, such as layers, that are transferred one after another.
        prefetched: whether transfers overlap with the computation.
        host_optimizer: whether the optimizer runs in host memory.
    """

    flops: float
    dequantized_bytes: float = 0
    wire_bytes: float = 0
    network_bytes: float = 0
    to_device_bytes: float = 0
    to_host_bytes: float = 0
    disk_bytes: float = 0
    trained: float = 0
    units: int = 1
    prefetched: bool = True
    host_optimizer: bool = False


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, the part that limits it, and the seconds of each part alone."""

    seconds: float
    bound: str
    parts: dict[str, float]


def step_time(load: Load, hardware: Hardware, ranks: int) -> StepTime:
    """The time of a step in which each of `ranks` ranks of a machine does `load`.

    The directions of PCIe add up: activations go to the host in forward and come back in backward,
    never at the same time.
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
    if hardware.network is not None:
        transfers["network"] = load.network_bytes / hardware.network
    busy, moving = sum(arithmetic.values()), max(transfers.values())
    overlapped = max(busy, moving) + moving / load.units
    seconds = overlapped if load.prefetched else busy + moving
    bandwidth = hardware.memory_bandwidth
    if load.host_optimizer:
        bandwidth = hardware.host_bandwidth / ranks
    optimizer = load.trained * OPTIMIZER_BYTES / bandwidth
    slower = arithmetic if busy >= moving else transfers
    bound = max(slower, key=lambda part: slower[part])
    return StepTime(seconds + optimizer, bound, arithmetic | transfers | {"optimizer": optimizer})
