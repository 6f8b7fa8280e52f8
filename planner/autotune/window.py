"""What came and how it was served, in the last minutes: bounded in time and number."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twinpool.bench.serving.distributions import percentile
from twinpool.bench.serving.slo import Slo
from twinpool.coordinator.routing import CHUNK_TOKENS
from twinpool.planner.autotune.words import Arrived, Ended, Figures, PastRequest, PastTraffic, Withdrawn

MOST_REQUESTS = 4096
MOST_PREDICTED = 1024
"""Requests of which a prediction is made, the latest: more say little more of the traffic."""
LEAST_REQUESTS, ENOUGH_REQUESTS = 20, 60
"""Of fewer than the one nothing is said; for as many as the other a window looks further back."""
LOOK_BACK_WINDOWS = 5
LIKE_WITHIN = 1.5
"""Traffic whose rate or mean lengths differ by a larger factor is other traffic."""


class OfferedLoad(NamedTuple):
    """Requests of some time, by their rate and their mean lengths in tokens."""

    rate_per_s: float
    mean_input: float
    mean_output: float

    def is_like(self, other: OfferedLoad) -> bool:
        """Whether what is predicted for the one says something of the other."""
        return all(
            max(mine, theirs) <= LIKE_WITHIN * min(mine, theirs)
            for mine, theirs in zip(self, other, strict=True)
        )


NOTHING_CAME = OfferedLoad(0.0, 0.0, 0.0)


@dataclass(slots=True, eq=False)
class _Arrival:
    """`ended` is None while it runs, and of one that tells nothing of how well requests are served."""

    at: float
    num_prompt_tokens: int
    prefix: tuple[int, ...]
    num_output_tokens: int | None = None
    ended: Ended | None = None


class Window:
    """Requests by their arrival, over `LOOK_BACK_WINDOWS` times `window_s`, at most `MOST_REQUESTS`."""

    def __init__(self, window_s: float, started_at: float) -> None:
        self._window_s = window_s
        self._started_at = started_at
        self._arrivals: deque[_Arrival] = deque()
        self._running: dict[str, _Arrival] = {}

    def arrived(self, event: Arrived, now: float) -> None:
        """A request came."""
        arrival = _Arrival(now, event.num_prompt_tokens, event.prefix)
        self._arrivals.append(arrival)
        self._running[event.request_id] = arrival
        self._forget(now)

    def ended(self, event: Ended, now: float) -> None:
        """It is over. One whose prompt nobody has read is taken to be like the one before it."""
        arrival = self._running.pop(event.request_id, None)
        if arrival is None:
            if not self._arrivals:
                return
            before = self._arrivals[-1]
            arrival = _Arrival(now, before.num_prompt_tokens, before.prefix)
            self._arrivals.append(arrival)
            self._forget(now)
        # Of one that was refused or failed nobody knows how long its answer would have been.
        if event.is_completed:
            arrival.num_output_tokens = event.num_output_tokens
        arrival.ended = event

    def withdrawn(self, event: Withdrawn) -> None:
        """It is over, and tells nothing of how it was served."""
        if (arrival := self._running.pop(event.request_id, None)) is None:
            return
        if event.num_output_tokens is None:
            self._arrivals.remove(arrival)
        else:
            arrival.num_output_tokens = max(1, event.num_output_tokens)

    def traffic(self, now: float) -> PastTraffic | None:
        """What came in the last window, or further back where that is little; None where nothing came then, too little
        before, or no answer is known. Answers that are not complete get the lengths of others that are, in turn."""
        if not self._arrivals or now - self._arrivals[-1].at >= self._window_s:
            return None
        found = self._lately(now)
        lengths = [each.num_output_tokens for each in self._arrivals if each.num_output_tokens is not None]
        if len(found) < LEAST_REQUESTS or not lengths:
            return None
        reach_s = min(self._window_s, now - self._started_at)
        since = min(found[0].at, now - reach_s)
        rate = len(found) / max(1e-3, now - since)
        counts = Counter(chunk for each in found for chunk in each.prefix)
        requests = []
        for number, each in enumerate(found):
            output = each.num_output_tokens
            shared = tuple(chunk for chunk in each.prefix if counts[chunk] > 1)
            requests.append(
                PastRequest(
                    each.at - found[0].at,
                    shared,
                    max(1, each.num_prompt_tokens - CHUNK_TOKENS * len(shared)),
                    lengths[number % len(lengths)] if output is None else output,
                )
            )
        return PastTraffic(
            requests=tuple(requests),
            rate_per_s=rate,
            mean_input=_mean([each.num_prompt_tokens for each in found]),
            mean_output=_mean([each.output_tokens for each in requests]),
        )

    def _lately(self, now: float) -> list[_Arrival]:
        found: list[_Arrival] = []
        for arrival in reversed(self._arrivals):
            is_recent = now - arrival.at < self._window_s
            if len(found) >= (MOST_PREDICTED if is_recent else ENOUGH_REQUESTS):
                break
            found.append(arrival)
        return found[::-1]

    def load(self, since: float, until: float) -> OfferedLoad:
        """What came then."""
        came = [each for each in self._arrivals if since <= each.at < until]
        return OfferedLoad(
            rate_per_s=len(came) / (until - since),
            mean_input=_mean([each.num_prompt_tokens for each in came]),
            mean_output=_mean(
                [each.num_output_tokens for each in came if each.num_output_tokens is not None]
            ),
        )

    def is_over(self, since: float, until: float) -> bool:
        """Whether none that came then runs any more."""
        return not any(since <= each.at < until for each in self._running.values())

    def figures(self, since: float, until: float, slo: Slo) -> tuple[Figures | None, int]:
        """How those that came then were served, and how many they are; what runs still is left out."""
        told = [each.ended for each in self._arrivals if since <= each.at < until and each.ended is not None]
        if not told:
            return None, 0
        num_good = sum(_is_good(each, slo) for each in told)
        ttft = [each.ttft_s for each in told if each.is_completed and each.ttft_s is not None]
        itl = [each.itl_p99_s for each in told if each.is_completed and each.itl_p99_s is not None]
        figures = Figures(
            attainment=num_good / len(told),
            goodput_per_s=num_good / (until - since),
            ttft_p50_s=_percentile(ttft, 50),
            ttft_p99_s=_percentile(ttft, 99),
            itl_p99_s=_percentile(itl, 99),
        )
        return figures, len(told)

    def _forget(self, now: float) -> None:
        oldest = now - LOOK_BACK_WINDOWS * self._window_s
        while len(self._arrivals) > MOST_REQUESTS or (self._arrivals and self._arrivals[0].at < oldest):
            self._arrivals.popleft()
        # Requests that run on for longer than that are forgotten with their arrival: they count for nothing any more.
        if len(self._running) > MOST_REQUESTS:
            first = self._arrivals[0].at
            self._running = {name: each for name, each in self._running.items() if each.at >= first}


def _is_good(ended: Ended, slo: Slo) -> bool:
    return ended.is_completed and slo.holds(
        ttft_s=ended.ttft_s, tpot_s=ended.tpot_s, e2e_s=ended.e2e_s, itl_p99_s=ended.itl_p99_s
    )


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return percentile(values, percent) if values else None


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
