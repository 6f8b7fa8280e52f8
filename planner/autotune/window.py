"""What came and how it was served, in the last minutes: bounded in time and number."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from random import Random
from typing import NamedTuple

from twinpool.bench.serving.distributions import percentile
from twinpool.bench.serving.slo import Slo
from twinpool.coordinator.routing import CHUNK_TOKENS
from twinpool.planner.autotune.words import Arrived, Ended, Figures, PastRequest, PastTraffic, Withdrawn

MOST_REQUESTS = 1 << 16
"""That are remembered, in some 20 MB: those of a minute at a thousand a second."""
MOST_PREDICTED = 1024
"""Requests of which a prediction is made, the latest: more say little more of the traffic, but for its rate."""
MOST_PREFIXES = 2 * MOST_PREDICTED
"""Requests whose prefixes are remembered: some of the latest may be withdrawn."""
LEAST_REQUESTS, ENOUGH_REQUESTS = 20, 60
"""Of fewer than the one nothing is said; for as many as the other a window looks further back."""
LOOK_BACK_WINDOWS = 5
LIKE_WITHIN = 1.5
"""Traffic whose rate or mean lengths differ by a larger factor is other traffic."""

_at = attrgetter("at")
_took_s = attrgetter("took_s")


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


class _Served(NamedTuple):
    """How well; times in seconds, None of what did not complete."""

    is_good: bool
    ttft_s: float | None
    itl_p99_s: float | None


@dataclass(slots=True, eq=False)
class _Arrival:
    """Nobody knows `num_output_tokens` while it runs, and of what was refused or failed how many they would have been.
    `served` is None while it runs, and of one that tells nothing of how well requests are served."""

    at: float
    num_prompt_tokens: int
    prefix: tuple[int, ...]
    num_output_tokens: int | None = None
    served: _Served | None = None


class _Answer(NamedTuple):
    """One that ended `at` that time, `took_s` after its request came."""

    at: float
    took_s: float
    num_output_tokens: int


class Window:
    """Requests by their arrival, over `LOOK_BACK_WINDOWS` times `window_s`, at most `MOST_REQUESTS`. Those are served
    well that meet `slo`."""

    def __init__(self, window_s: float, slo: Slo, started_at: float) -> None:
        self._window_s = window_s
        self._slo = slo
        self._known_from = started_at
        self._arrivals: deque[_Arrival] = deque()
        self._running: dict[str, _Arrival] = {}
        self._answers: deque[_Answer] = deque(maxlen=MOST_PREDICTED)

    def arrived(self, event: Arrived, now: float) -> None:
        """A request came."""
        arrival = _Arrival(now, event.num_prompt_tokens, event.prefix)
        self._running[event.request_id] = arrival
        self._add(arrival)

    def ended(self, event: Ended, now: float) -> None:
        """It is over. One whose prompt nobody has read is taken to be like the one before it."""
        arrival = self._running.pop(event.request_id, None)
        if arrival is None:
            if not self._arrivals:
                return
            before = self._arrivals[-1]
            arrival = _Arrival(now, before.num_prompt_tokens, before.prefix)
            self._add(arrival)
        if event.is_completed:
            self._answered(arrival, event.num_output_tokens, now)
            is_good = self._slo.holds(
                ttft_s=event.ttft_s, tpot_s=event.tpot_s, e2e_s=event.e2e_s, itl_p99_s=event.itl_p99_s
            )
            arrival.served = _Served(is_good, event.ttft_s, event.itl_p99_s)
        else:
            arrival.served = _Served(is_good=False, ttft_s=None, itl_p99_s=None)

    def withdrawn(self, event: Withdrawn, now: float) -> None:
        """It is over, and tells nothing of how it was served."""
        if (arrival := self._running.pop(event.request_id, None)) is None:
            return
        if event.num_output_tokens is None:
            self._remove(arrival)
        else:
            self._answered(arrival, max(1, event.num_output_tokens), now)

    def traffic(self, now: float) -> PastTraffic | None:
        """What came in the last window, or further back where that is little; None where nothing came then, too little
        before, or no answer is known. The rate is of all that came, the requests are the latest `MOST_PREDICTED`."""
        num_recent = len(self._arrivals) - bisect_right(self._arrivals, now - self._window_s, key=_at)
        num_found = min(len(self._arrivals), max(ENOUGH_REQUESTS, min(num_recent, MOST_PREDICTED)))
        if not num_recent or num_found < LEAST_REQUESTS or not self._answers:
            return None
        found = self._slice(len(self._arrivals) - num_found, len(self._arrivals))
        since = max(self._known_from, min(found[0].at, now - self._window_s))
        counts = Counter(chunk for each in found for chunk in each.prefix)
        requests = []
        for each, num_output_tokens in zip(found, self._output_tokens(found, now), strict=True):
            shared = tuple(chunk for chunk in each.prefix if counts[chunk] > 1)
            own_tokens = max(1, each.num_prompt_tokens - CHUNK_TOKENS * len(shared))
            requests.append(PastRequest(each.at - found[0].at, shared, own_tokens, num_output_tokens))
        return PastTraffic(
            requests=tuple(requests),
            rate_per_s=max(num_found, num_recent) / max(1e-3, now - since),
            mean_input=_mean([each.num_prompt_tokens for each in found]),
            mean_output=_mean([each.output_tokens for each in requests]),
        )

    def _output_tokens(self, found: Sequence[_Arrival], now: float) -> Iterator[int]:
        """Of each. One that is not complete gets the length of an answer that took longer than this one has, if any
        did: of the latest requests the short answers have ended, and the long ones run."""
        known = sorted(self._answers, key=_took_s)
        dice = Random(0)
        for each in found:
            if each.num_output_tokens is not None:
                yield each.num_output_tokens
                continue
            age_s = now - each.at if each.served is None else 0.0
            first = bisect_right(known, age_s, key=_took_s)
            yield known[dice.randrange(first if first < len(known) else 0, len(known))].num_output_tokens

    def load(self, since: float, until: float) -> OfferedLoad:
        """What came then, as far as it is remembered."""
        came, seconds = self._came(since, until)
        if not came:
            return NOTHING_CAME
        return OfferedLoad(
            rate_per_s=len(came) / seconds,
            mean_input=_mean([each.num_prompt_tokens for each in came]),
            mean_output=_mean(
                [each.num_output_tokens for each in came if each.num_output_tokens is not None]
            ),
        )

    def is_over(self, since: float, until: float) -> bool:
        """Whether none that came then runs any more."""
        return not any(since <= each.at < until for each in self._running.values())

    def is_being_forgotten(self, since: float) -> bool:
        """Whether so many came that the first of those since then are not remembered."""
        return self._known_from > since

    def figures(self, since: float, until: float) -> tuple[Figures | None, int]:
        """How those that came then were served, and how many they are, as far as they are remembered; what runs still
        is left out."""
        came, seconds = self._came(since, until)
        told = [each.served for each in came if each.served is not None]
        if not told:
            return None, 0
        num_good = sum(each.is_good for each in told)
        ttft = [each.ttft_s for each in told if each.ttft_s is not None]
        itl = [each.itl_p99_s for each in told if each.itl_p99_s is not None]
        figures = Figures(
            attainment=num_good / len(told),
            goodput_per_s=num_good / seconds,
            ttft_p50_s=_percentile(ttft, 50),
            ttft_p99_s=_percentile(ttft, 99),
            itl_p99_s=_percentile(itl, 99),
        )
        return figures, len(told)

    # ── what is remembered ──────────────────────────────────────────────────────────────────────────────────

    def _add(self, arrival: _Arrival) -> None:
        self._arrivals.append(arrival)
        if len(self._arrivals) > MOST_PREFIXES:
            self._arrivals[-1 - MOST_PREFIXES].prefix = ()
        oldest = arrival.at - LOOK_BACK_WINDOWS * self._window_s
        while len(self._arrivals) > MOST_REQUESTS or self._arrivals[0].at < oldest:
            self._known_from = self._arrivals.popleft().at
        while self._answers and self._answers[0].at < oldest:
            self._answers.popleft()
        # Requests that run on for longer than that are forgotten with their arrival: they count for nothing any more.
        if len(self._running) > MOST_REQUESTS:
            first = self._arrivals[0].at
            self._running = {name: each for name, each in self._running.items() if each.at >= first}

    def _remove(self, arrival: _Arrival) -> None:
        """If it is still remembered. Few others came at the same time, and few after it."""
        place = bisect_left(self._arrivals, arrival.at, key=_at)
        while place < len(self._arrivals) and self._arrivals[place].at == arrival.at:
            if self._arrivals[place] is arrival:
                del self._arrivals[place]
                return
            place += 1

    def _answered(self, arrival: _Arrival, num_output_tokens: int, now: float) -> None:
        arrival.num_output_tokens = num_output_tokens
        self._answers.append(_Answer(now, now - arrival.at, num_output_tokens))

    def _came(self, since: float, until: float) -> tuple[list[_Arrival], float]:
        """What is remembered of what came then, and of how many seconds that is."""
        since = max(since, self._known_from)
        first, end = (bisect_left(self._arrivals, at, key=_at) for at in (since, until))
        return self._slice(first, end), until - since

    def _slice(self, first: int, end: int) -> list[_Arrival]:
        return list(islice(self._arrivals, first, end))


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return percentile(values, percent) if values else None


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
