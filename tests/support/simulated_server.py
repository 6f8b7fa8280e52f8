"""A coordinator core before a worker that answers each request after a drawn time: virtual time, seeded arrivals."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from support.coordinator_core import CoreDriver, submission
from twinpool.config import Role
from twinpool.coordinator.events import Arrived
from twinpool.coordinator.service import Submission
from twinpool.messages import Cancel, Dropped, Generate, StepTokens, Token
from twinpool.request import FinishReason, RequestKey

TICK_S = 0.1


@dataclass(order=True)
class _Event:
    at: float
    number: int
    act: Callable[[], None] = field(compare=False)


class SimulatedServer:
    """`num_slots` requests at a time, each for `service_s(submission)` seconds; one token per answer."""

    def __init__(self, num_slots: int, service_s: Callable[[Submission], float], **settings: Any) -> None:
        self.driver = CoreDriver(max_in_flight=num_slots, **settings)
        self.driver.now = 0.0
        self.driver.join(
            "K", Role.COLOCATED, num_blocks=1 << 16, max_model_len=1 << 20, max_num_seqs=num_slots
        )
        self.driver.sent.clear()
        self.submissions: dict[str, Submission] = {}
        self.dispatched: list[str] = []
        self.waited_s: dict[str, float] = {}
        self._service_s = service_s
        self._events: list[_Event] = []
        self._num_events = 0
        self._tick()

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Something that happens at `when`."""
        self._num_events += 1
        heapq.heappush(self._events, _Event(when, self._num_events, act))

    def arrive(self, request_id: str, **values: Any) -> None:
        """A request arrives now."""
        request = submission(request_id, at=self.driver.now - 0.003, **values)
        self.submissions[request_id] = request
        self.driver.do(Arrived(request))
        self._serve()

    def run(self, until: float) -> None:
        """Lets everything happen up to then."""
        while self._events and self._events[0].at <= until:
            event = heapq.heappop(self._events)
            self.driver.now = max(self.driver.now, event.at)
            event.act()
        self.driver.now = until

    def _tick(self) -> None:
        self.driver.heartbeat("K")
        self.driver.advance(0.0)
        self._serve()
        self.at(self.driver.now + TICK_S, self._tick)

    def _serve(self) -> None:
        sent, self.driver.sent = self.driver.sent, []
        for message in (send.message for send in sent):
            if isinstance(message, Generate):
                key = message.job.key
                request = self.submissions[key.request_id]
                self.dispatched.append(key.request_id)
                self.waited_s[key.request_id] = self.driver.now - request.tokenized_at
                self.at(self.driver.now + self._service_s(request), lambda key=key: self._finish(key))
            elif isinstance(message, Cancel):
                self.driver.say("K", Dropped(message.key, "cancelled"))

    def _finish(self, key: RequestKey) -> None:
        if self.driver.finish(key.request_id) is None:
            self.driver.say("K", StepTokens((Token(key, 0, 1000, FinishReason.LENGTH),)))
            self._serve()
