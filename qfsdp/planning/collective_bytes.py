"""What a collective sends: bytes of one rank, and bytes that leave its machine."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Operation -> name of the collective, and the bytes that a rank of n sends per byte of the tensor.
WIRE = {
    "_allgather_base_": ("all_gather", lambda n: (n - 1) / n),
    "_reduce_scatter_base_": ("reduce_scatter", lambda n: (n - 1) / n),
    "alltoall_base_": ("all_to_all", lambda n: (n - 1) / n),
    "allreduce_": ("all_reduce", lambda n: 2 * (n - 1) / n),
}


class Sent(NamedTuple):
    """Traffic of one collective of the first rank.

    Fields:
        name: of the collective.
        bytes: that the rank sends.
        between: that all ranks of its machine together send to other machines, each in its own
            group.
    """

    name: str
    bytes: int
    between: int


def sent_by(func: Any, args: Any, local_size: int) -> Sent | None:
    """The traffic of an operation of c10d; None if it is not counted.

    Args:
        func, args: as the dispatcher gives them.
        local_size: ranks per machine.
    """
    name, share = WIRE.get(func._opname, (None, None))
    if name is None or share is None:
        return None
    group = next(a for a in args if isinstance(a, torch.ScriptObject))
    ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
    size = max(t.nbytes for t in tree_leaves(args[:2]) if isinstance(t, Tensor))
    sent = share(len(ranks)) * size
    here = sum(rank < local_size for rank in ranks)
    return Sent(name, int(sent), int(_between(name, sent, len(ranks), here, local_size)))


def _between(name: str, sent: float, ranks: int, here: int, local_size: int) -> float:
    """Bytes that leave the machine where each rank of a group sends `sent`.

    A ring over all ranks of a group crosses the border of a machine once. There are as many such
    groups as ranks of the machine in different places. In an all-to-all every rank sends to every
    other.

    Args:
        ranks, here: of the group, and those of them on this machine.
    """
    if here == ranks:
        return 0.0
    if name == "all_to_all":
        return sent * local_size * (ranks - here) / (ranks - 1)
    return sent * local_size / here
