"""What workers share: the processors of a machine, and the two ends of a link."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Delivered(NamedTuple):
    """How many steps have ended, and how many tokens came of them."""

    num_steps: int
    num_tokens: int


class Computing(Protocol):
    """A worker of a machine."""

    def go_on(self, num_busy: int) -> None:
        """From now on the step that is under way takes its course beside `num_busy` others."""
        ...

    def delivered_before(self, now: float) -> Delivered:
        """What has ended before this very moment."""
        ...


class Machine:
    """Workers that compute on the same processors.

    A step gets on at the rate 1 / `step_s(shape, num_busy)`, for as long as so many others compute: what is left of it
    is stretched when another worker begins to compute, and shrinks when one has nothing more to do. Between two steps
    that follow each other without a gap a worker counts as computing.
    """

    __slots__ = ("_busy", "_workers")

    def __init__(self) -> None:
        self._workers: list[Computing] = []
        self._busy: dict[Computing, None] = {}

    def employ(self, worker: Computing) -> None:
        """`worker` has come."""
        self._workers.append(worker)

    def delivered_beside(self, worker: Computing, now: float) -> Delivered:
        """What all but `worker` have delivered before this very moment."""
        num_steps = num_tokens = 0
        for other in self._workers:
            if other is not worker:
                steps, tokens = other.delivered_before(now)
                num_steps += steps
                num_tokens += tokens
        return Delivered(num_steps, num_tokens)

    def begin(self, worker: Computing) -> None:
        """A step of `worker` begins now."""
        if worker in self._busy:
            worker.go_on(len(self._busy) - 1)
        else:
            self._busy[worker] = None
            self._tell_all()

    def rest(self, worker: Computing) -> None:
        """A step of `worker` has ended, and none follows."""
        del self._busy[worker]
        self._tell_all()

    def _tell_all(self) -> None:
        for worker in self._busy:
            worker.go_on(len(self._busy) - 1)


class Nic:
    """One worker's end of all its links.

    It works off what is to go through it in the order in which that is known, at full rate. A transfer goes through two
    of them, the sender's and the receiver's, and is over when both are done with it: so several senders share what
    their receiver can take, and several transfers of one sender what that can send, while neither end stands still for
    the other.
    """

    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at = 0.0

    def take(self, ready_at: float, seconds: float) -> float:
        """When something that is there from `ready_at` on, and alone takes so long, is through."""
        self.free_at = max(self.free_at, ready_at) + seconds
        return self.free_at
