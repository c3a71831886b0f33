"""`global_batch_size`: a config's promise of how many samples one update sees.

The number of ranks may change during a run, when machines leave or join. With `global_batch_size`
the micro-batches per update follow from it, so the run goes on with the same updates:

    gradient_accumulation_steps = global_batch_size / (batch_size * ranks)

Ranks that share rows (`sharding.context_parallel`) count as one.
A config's own `gradient_accumulation_steps` counts only where `global_batch_size` is null.
"""

from __future__ import annotations

from typing import Any

from qfsdp.common.errors import InvalidField, UserError
from qfsdp.launch.ranks import planned_ranks, possible_numbers_of_ranks

SHOWN = 4  # numbers in an error message


def check_global_batch(cfg: Any) -> None:
    """Checks that the global batch and the ranks divide for every number of ranks that the run may
    have, and sets `gradient_accumulation_steps` for the planned one. Raises UserError: it does not
    divide, or the result contradicts another key."""
    for ranks in possible_numbers_of_ranks():
        split_batch(cfg, ranks)
    split_batch(cfg, planned_ranks()[0])


def split_batch(cfg: Any, ranks: int) -> int:
    """Sets `cfg.gradient_accumulation_steps` where `cfg.global_batch_size` is given; returns it.

    Args:
        cfg: a training recipe's config.
        ranks: number of all ranks.

    Raises:
        UserError: as `check_global_batch`.
    """
    parts = cfg.sharding.context_parallel
    if ranks % parts:
        expected = f"expected a divisor of {ranks}, the number of ranks"
        raise UserError(f"sharding.context_parallel: {parts}; {expected}")
    ranks, who = ranks // parts, "ranks" if parts == 1 else f"groups of {parts} ranks"
    size: int | None = getattr(cfg, "global_batch_size", None)
    if size is None:
        return int(cfg.gradient_accumulation_steps)
    if size < 1:
        raise UserError(
            f"global_batch_size: {size} is not valid; expected an integer of at least 1"
        )
    cfg.gradient_accumulation_steps, rest = divmod(size, cfg.batch_size * ranks)
    if rest:
        raise UserError(
            f"global_batch_size: {size} is no multiple of batch_size {cfg.batch_size} x {ranks} "
            f"{who}; expected {_what_fits(size, cfg.batch_size, ranks, who)}"
        )
    try:
        cfg.check()
    except InvalidField as error:
        raise UserError(f"global_batch_size: {size} on {ranks} {who} gives {error}") from None
    return int(cfg.gradient_accumulation_steps)


def _what_fits(size: int, batch: int, ranks: int, who: str) -> str:
    ways = [f"global_batch_size={max(1, round(size / (batch * ranks))) * batch * ranks}"]
    if size % batch == 0:
        ways.insert(0, f"{_divisors(size // batch, ranks)} {who}")
    if size % ranks == 0:
        ways.insert(0, f"batch_size={_divisors(size // ranks, batch)}")
    return ", or ".join(ways)


def _divisors(number: int, near: int) -> str:
    """ "2, 3 or 6": divisors of `number`, those nearest to `near`."""
    found = [n for n in range(1, min(number, 8 * near) + 1) if number % n == 0]
    nearest = sorted(sorted(found, key=lambda n: abs(n - near))[:SHOWN])
    return " or ".join(filter(None, [", ".join(map(str, nearest[:-1])), str(nearest[-1])]))
