"""The queue: whose turn is next, and what goes before whom.

Resumed requests go first: they have had their turn. Between tenants the least served goes next (`accounts.py`). A
tenant that had nothing waiting starts level with the least served of those that had, so idleness earns no credit. Of
one tenant's requests the one with the lowest `priority` goes first, as in vLLM, and among equals the first that came. A
priority delays others only for a bounded time: a request that has waited for `aged_s` goes before all later ones.
"""

from __future__ import annotations

import heapq
from bisect import bisect, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from twinpool.coordinator.accounts import Account
from twinpool.coordinator.lifecycle import Request

Place = tuple[int, int, float, Request]
"""Where a request stands in its tenant's line: 0 for resumed, 1 for new; priority; number of arrival (never equal)."""


@dataclass(slots=True)
class _Line:
    """One tenant's waiting requests, by place and (new ones) by arrival."""

    places: list[Place] = field(default_factory=list)
    arrivals: dict[str, Request] = field(default_factory=dict)
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ahead:
    """What goes before a request: requests, and the tokens that they have to prefill."""

    num_requests: int = 0
    num_tokens: int = 0


class WaitingQueue:
    """Requests that wait for workers.

    It has no bound of its own: `admission.py` bounds new requests, and resumed ones are at most those in flight.
    """

    def __init__(self, aged_s: float) -> None:
        self._aged_s = aged_s
        self._lines: dict[Account, _Line] = {}
        self._places: dict[str, Place] = {}
        self._num_arrived = 0
        self._level = 0.0
        self._oldest_at = inf
        """Nobody has waited since before."""
        self.num_tokens = 0
        """Prompt tokens (and tokens to be computed again) that wait."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._places

    def __iter__(self) -> Iterator[Request]:
        return (place[-1] for line in self._lines.values() for place in line.places)

    def first(self, now: float) -> Request:
        """The next to go. The queue must not be empty."""
        line = min(self._lines.items(), key=lambda item: _turn(*item))[1]
        rank, _, _, request = line.places[0]
        if rank and (oldest := next(iter(line.arrivals.values()))).queued_at <= now - self._aged_s:
            return oldest
        return request

    def waited_longer(self, now: float, wait_s: float) -> list[Request]:
        """Those that have waited for more than `wait_s`."""
        if now - self._oldest_at <= wait_s:
            return []
        self._oldest_at = min((request.queued_at for request in self), default=inf)
        return [request for request in self if now - request.queued_at > wait_s]

    def append(self, request: Request) -> None:
        """Puts a new request in its place."""
        self._num_arrived += 1
        request.number = self._num_arrived
        self._insert(request, (1, request.submission.priority, request.number, request))
        self._lines[request.account].arrivals[request.request_id] = request

    def push_front(self, request: Request) -> None:
        """Puts a resumed request before all new ones. Among resumed ones its tenant's turn and its arrival decide."""
        self._insert(request, (0, 0, request.number, request))

    def remove(self, request: Request) -> None:
        """Takes the request out, wherever it stands."""
        place = self._places.pop(request.request_id)
        line = self._lines[request.account]
        del line.places[bisect(line.places, place) - 1]
        line.arrivals.pop(request.request_id, None)
        line.num_tokens -= request.num_tokens
        self.num_tokens -= request.num_tokens
        self._level = request.account.service
        if not line.places:
            del self._lines[request.account]

    def held_by(self, account: Account) -> Ahead:
        """What waits of one tenant."""
        line = self._lines.get(account)
        return Ahead() if line is None else Ahead(len(line.places), line.num_tokens)

    def ahead_of(self, account: Account, priority: int) -> Ahead:
        """What would go before a new request of that tenant, as far as is known now."""
        line = self._lines.get(account, _Line())
        return self.ahead_of_place(account, bisect(line.places, (1, priority, inf)))

    def ahead_of_place(self, account: Account, index: int) -> Ahead:
        """What goes before that tenant's request at place `index` of its line (from 0)."""
        own = self._lines.get(account, _Line()).places[:index]
        num_requests, num_tokens = len(own), sum(request.num_tokens for *_, request in own)
        turn_at = self._level_of(account) + sum(_cost(account, place) for place in own)
        for other, line in self._lines.items():
            if other is not account:
                reached = other.service
                for place in line.places:
                    if place[0] and reached > turn_at:
                        break
                    reached += _cost(other, place)
                    num_requests += 1
                    num_tokens += place[-1].num_tokens
        return Ahead(num_requests, num_tokens)

    def until_left(self, num_requests: int, num_tokens: int, account: Account | None = None) -> Ahead:
        """What goes before the request whose departure completes `num_requests` and `num_tokens` that have left.

        With `account` only that tenant's requests and tokens count; it must have something waiting.
        """
        order = iter(self.in_order()) if account is None else (p[-1] for p in self._lines[account].places)
        requests, tokens = 0, 0
        for request in order:
            if requests + 1 >= num_requests and tokens + request.num_tokens >= num_tokens:
                break
            requests += 1
            tokens += request.num_tokens
        return Ahead(requests, tokens) if account is None else self.ahead_of_place(account, requests)

    def in_order(self) -> Iterator[Request]:
        """All that wait, in the order in which they will go as far as is known now."""
        heap = [(*_turn(account, line), 0, account) for account, line in self._lines.items()]
        heapq.heapify(heap)
        while heap:
            _, service, _, index, account = heap[0]
            places = self._lines[account].places
            yield places[index][-1]
            if index + 1 == len(places):
                heapq.heappop(heap)
            else:
                reached = service + _cost(account, places[index])
                rank, _, number, _ = places[index + 1]
                heapq.heapreplace(heap, (rank, reached, number, index + 1, account))

    def _insert(self, request: Request, place: Place) -> None:
        account = request.account
        if account not in self._lines:
            account.service = self._level_of(account)
            self._lines[account] = _Line()
        line = self._lines[account]
        insort(line.places, place)
        line.num_tokens += request.num_tokens
        self.num_tokens += request.num_tokens
        self._places[request.request_id] = place
        self._oldest_at = min(self._oldest_at, request.queued_at)

    def _level_of(self, account: Account) -> float:
        """The account's service, lifted to the least of those that wait if nothing of its own waits."""
        if account in self._lines:
            return account.service
        return max(account.service, min((a.service for a in self._lines), default=self._level))


def _turn(account: Account, line: _Line) -> tuple[int, float, float]:
    """What decides whose turn it is: the least goes next. Numbers of arrival differ, so there is no tie."""
    rank, _, number, _ = line.places[0]
    return rank, account.service, number


def _cost(account: Account, place: Place) -> float:
    """What serving the request will add to its tenant's service, as far as can be told."""
    rank, _, _, request = place
    output = min(account.expected_output, request.submission.sampling.max_tokens - len(request.emitted))
    return ((request.num_tokens if rank else 0) + output) / account.tenant.weight
