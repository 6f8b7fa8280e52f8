"""The retry budget: how much work may be done twice."""

from __future__ import annotations

EARNED_PER_REQUEST = 0.5


class RetryBudget:
    """Starts of lost requests draw from it, one each; every admitted request adds `EARNED_PER_REQUEST`, up to `size`.

    It is full at first, so that the batch of a worker that dies early goes on elsewhere. When it is empty, something is
    wrong beyond single workers, and starting everything again would only add to the load.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.left = float(size)

    def earn(self) -> None:
        """Adds what an admitted request earns."""
        self.left = min(self.left + EARNED_PER_REQUEST, self.size)

    def try_spend(self) -> bool:
        """Draws one retry; false if there is none left."""
        if self.left < 1:
            return False
        self.left -= 1
        return True
