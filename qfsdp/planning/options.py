"""The ways to run a config on given GPUs, each with its memory and its traffic, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.planning.changes import CHECKPOINTING, changed
from qfsdp.planning.estimate import Estimate
from qfsdp.planning.predict import PROCESS_BYTES
from qfsdp.planning.search import Candidate

GIB = 2**30
OFFLOADED = {"none": "", "base_to_cpu": "base in the host", "all_to_cpu": "all in the host"}
HEAD = (
    *("strategy", "offload", "checkpointing", "GiB per GPU", "GiB of the host"),
    *("GiB sent", "GiB over PCIe", "fits"),
)
WIDTHS = (17, 16, 13, 11, 15, 8, 13, 4)
NOTE = (
    "GiB per GPU: with fragmentation and CUDA. GiB of the host: of a machine, all its processes.\n"
    "GiB sent, GiB over PCIe: of one GPU in a step, to other GPUs and between GPU and host.\n"
    "With all in the host the vocabulary is gathered whole, and may take more than the base saves."
)


def ways(world_size: int, machines: int) -> list[Candidate]:
    """Strategies, then what is offloaded under full_shard, each with every checkpointing.

    Only full_shard takes offload.
    """
    strategies = ["ddp", "shard_grad_op"] if world_size > 1 else []
    strategies += ["hybrid_full_shard"] if machines > 1 else []
    pairs = [(name, "none") for name in [*strategies, "full_shard"]]
    pairs += [("full_shard", offload) for offload in OFFLOADED if offload != "none"]
    return [Candidate(name, each, offload) for name, offload in pairs for each in CHECKPOINTING]


def option_lines(
    cfg: Any,
    estimate: Callable[[Any, str], Estimate],
    world_size: int,
    local_world_size: int,
    limit: int | None,
) -> Iterator[str]:
    """Lines of the table, each as soon as its dry run is done.

    Args:
        cfg: of a training recipe.
        estimate: of a config and of its way in words.
        limit: bytes of a GPU; None: "fits" is left out.

    Raises:
        UserError: what the config refuses whatever the way.
    """
    yield _line(HEAD)
    for way in ways(world_size, world_size // local_world_size):
        names = (way.strategy, OFFLOADED[way.offload], way.checkpointing)
        try:
            found = estimate(changed(cfg, way.changes), ", ".join(filter(None, names)))
        except UserError as error:
            if way.offload == "none":
                raise
            yield _line(names) + f"  refused: {error}"  # nothing is frozen
            continue
        host = local_world_size * (PROCESS_BYTES + sum(found.host.values()))
        sizes = (found.reserved, host, sum(found.wire.values()), sum(found.moved.values()))
        fits = "" if limit is None else "yes" if found.reserved <= limit else "no"
        yield _line((*names, *(f"{size / GIB:.2f}" for size in sizes), fits))
    yield NOTE


def _line(cells: tuple[str, ...]) -> str:
    words = (
        cell.ljust(width) if at < 3 else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, WIDTHS, strict=False))
    )
    return "  ".join(words).rstrip()
