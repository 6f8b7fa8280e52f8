"""When pools may be changed again: a cool-down that grows with every way back."""

from __future__ import annotations

from twinpool.planner.autotune.words import Split

MOST_DOUBLINGS = 5
FORGIVES_AFTER = 8
"""Cool-downs, as long as they have become, without a change: then what was before counts no more."""


class Caution:
    """Keeps pools from going to and fro. Going back to pools that were left doubles the cool-down, so even traffic that
    turns all the time is followed a few times only, and then ever more slowly; a quiet time undoes that."""

    def __init__(self, cool_down_s: float) -> None:
        self._cool_down_s = cool_down_s
        self._left: set[Split] = set()
        self._num_returns = 0
        self._changed_at: float | None = None

    @property
    def cool_down_s(self) -> float:
        """As long as it has become."""
        return float(self._cool_down_s * 2 ** min(self._num_returns, MOST_DOUBLINGS))

    def left_s(self, now: float) -> float:
        """Until pools may be changed, 0 from then on."""
        return 0.0 if self._changed_at is None else max(0.0, self._changed_at + self.cool_down_s - now)

    def changed(self, before: Split, after: Split, now: float) -> None:
        """Pools are changed now."""
        if self._changed_at is not None and now - self._changed_at > FORGIVES_AFTER * self.cool_down_s:
            self._left.clear()
            self._num_returns = 0
        if after in self._left:
            self._num_returns += 1
        self._left.add(before)
        self._changed_at = now
