"""The order in which offloaded units are fetched, learned from the training step before."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

FORGET_AFTER = 1 << 14  # units; many steps


class FetchOrder:
    """Predicts which units are fetched next, from the order seen in the step before.

    The last one or two units do not determine the next one: after a forward pass the last layer
    is followed by the one before it, and after the norms of DoRA by the first one.
    """

    def __init__(self) -> None:
        self._seen: list[Hashable] = []
        self._at = -1  # index in `_seen`; the units after it are predicted next
        self._now: Hashable = None

    def guess(self, units: Sequence[Hashable]) -> None:
        """Predicts this order until another one is seen."""
        self._seen, self._at = list(units), -1

    def saw(self, unit: Hashable) -> None:
        """Records that a weight of `unit` is fetched."""
        if unit == self._now:
            return
        self._at += 1
        if self._at >= len(self._seen) or self._seen[self._at] != unit:
            self._at = self._find(self._now, unit)
        self._seen.append(unit)
        self._now = unit
        if self._at > FORGET_AFTER:
            del self._seen[: self._at]
            self._at = 0

    def _find(self, before: Hashable, unit: Hashable) -> int:
        """The first index where `unit` followed `before`, else the first index of `unit`."""
        pairs = zip([None, *self._seen], self._seen, strict=False)
        first = next((at for at, pair in enumerate(pairs) if pair == (before, unit)), None)
        if first is None:
            first = self._seen.index(unit) if unit in self._seen else len(self._seen)
        return first

    def next(self, count: int) -> list[Hashable]:
        """The current unit and the ones predicted after it, at most `count` in all."""
        return [self._now, *self._seen[self._at + 1 : self._at + count]]
