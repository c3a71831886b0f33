"""Reads a checkpoint and compares its digests meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from qfsdp.checkpoint.choose import check_files
from qfsdp.checkpoint.digests import Verification
from qfsdp.checkpoint.finite import first_not_finite
from qfsdp.checkpoint.state import ReadState, read_state
from qfsdp.checkpoint.write_state import reason
from qfsdp.common.errors import UserError
from qfsdp.common.sealed import Damaged
from qfsdp.distributed.world import World


def read_verified(folder: Path, model: nn.Module, world: World) -> tuple[dict[str, Any], ReadState]:
    """The values of `facts.json`, and this rank's part of a checkpoint.

    Every rank compares the digests of its share of the files, in threads, while it reads the rows
    that it needs. All ranks return, or all raise the same.

    Raises:
        Damaged: a file is not as it was written, or cannot be read.
        UserError: the files are as they were written, and this run cannot use them.
    """
    facts: dict[str, Any] = {}
    read, changed, unreadable, refusal = None, None, None, None
    try:
        facts = check_files(folder)
        verification = Verification(folder, facts.get("files", {}), world.rank, world.size)
        try:
            read = read_state(folder / "state", facts["world_size"], model, world)
            name = first_not_finite(read.stacks, read.local, read.mine["alone"])
            unreadable = f"state: {name} has numbers that are not finite" if name else None
        except UserError as error:
            refusal = str(error)
        except Exception as error:  # a damaged file makes torch raise anything
            unreadable = f"state: unreadable ({reason(error)})"
        changed = verification.damage()
    except Damaged as error:
        changed = str(error)
    outcomes = world.gather((changed, unreadable, refusal))
    # The rank that finds the changed file may be another than those that cannot read it.
    for kind, error_type in enumerate((Damaged, Damaged, UserError)):
        for outcome in outcomes:
            if outcome[kind] is not None:
                raise error_type(outcome[kind])
    assert read is not None
    return facts, read
