"""Virtual time: what is to happen, when, and to whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]


class Actor:
    """Whoever things happen to. What happens to a frozen one waits until it goes on; a dead one never hears of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_frozen = False
        self.was_frozen = False
        self.held: deque[Action] = deque()


class Schedule:
    """All that is to happen, in order of time; at one moment, in the order in which it was scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._count = 0
        self._heap: list[tuple[float, int, Actor, Action]] = []

    def after(self, delay_s: float, actor: Actor, action: Action) -> None:
        """`action` happens to `actor` in `delay_s` seconds."""
        self.at(self.now + delay_s, actor, action)

    def at(self, moment: float, actor: Actor, action: Action) -> None:
        """`action` happens to `actor` at `moment`."""
        self._count += 1
        heappush(self._heap, (moment, self._count, actor, action))

    def step(self) -> None:
        """The next thing happens. There is always one: clocks tick."""
        self.now, _, actor, action = heappop(self._heap)
        if not actor.is_alive:
            return
        if actor.is_frozen:
            actor.held.append(action)
        else:
            action()

    def thaw(self, actor: Actor) -> None:
        """`actor` goes on, with all that has waited for it."""
        actor.is_frozen = False
        while actor.held:
            self.after(0.0, actor, actor.held.popleft())
