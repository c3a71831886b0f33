"""Context parallelism: neighbouring ranks share rows, each with one part of their tokens.

Where they share is decided in few places: `Batch.cut` gives a rank its part, `attend_cut_rows`
gathers keys and values, and `Decoder.forward` sums what belongs to a whole row. Parameters,
gradients and the optimizer see ranks as without it: FSDP2 shards over all of them.

No gradient needs a factor. The loss of an update is the sum over all ranks, divided by the target
tokens of all ranks, and each target stands on exactly one rank.
"""

from __future__ import annotations

from qfsdp.distributed.world import World, new_mesh
from qfsdp.modules.collectives import GROUPS
from qfsdp.modules.hub_models.decoder import AnyDecoder


def share_rows(model: AnyDecoder, parts: int, world: World) -> None:
    """Has every `parts` neighbouring ranks share the rows that `model` gets. Collective.

    Args:
        parts: a divisor of the number of ranks.
    """
    mesh = new_mesh(world, (world.size // parts, parts), ("rows", "parts"))
    group = mesh["parts"].get_group()
    GROUPS[group.group_name] = group
    model.share_rows(group.group_name)
