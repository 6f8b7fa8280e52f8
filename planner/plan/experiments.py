"""Simulations as experiments: what clients of a deployment would see at a rate, kept, counted and told as they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from twinpool.bench.serving.datasets.shapes import Shape
from twinpool.bench.serving.distributions import Values, percentile
from twinpool.bench.serving.slo import Slo
from twinpool.config import Role
from twinpool.planner.deployment import Deployment
from twinpool.planner.plan.rates import Capacity, grid_rate, highest_rate, nearest_place
from twinpool.planner.plan.traffic import Traffic

WARM_UP_SHARE, TAIL_SHARE = 0.25, 0.1
"""Of a stretch's requests: the first meet an empty deployment, the last one that empties; neither are measured."""


class Use(NamedTuple):
    """Of a pool's workers, on average over a run: the share of the time in which they computed, and the share of their
    KV blocks that requests held; and the largest share of one worker's."""

    busy_share: float
    kv_share: float
    most_kv_share: float


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What clients saw of the measured requests of a run, each an array over them: seconds, infinite of one that did
    not complete, 0 of a gap that there is none of."""

    ttft_s: Values
    tpot_s: Values
    itl_p99_s: Values
    e2e_s: Values
    uses: Mapping[Role, Use] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ttft_s)

    def is_good(self, slo: Slo) -> NDArray[np.bool_]:
        """Whether each completed within all bounds, as `Slo.is_met` has it."""
        good = np.isfinite(self.ttft_s)
        for values, bound in (
            (self.ttft_s, slo.ttft_s),
            (self.tpot_s, slo.tpot_s),
            (self.itl_p99_s, slo.itl_p99_s),
            (self.e2e_s, slo.e2e_s),
        ):
            if bound is not None:
                good &= values <= bound
        return good

    def share_good(self, slo: Slo) -> float:
        """Of the measured ones."""
        return float(self.is_good(slo).mean())


class Simulate(Protocol):
    """Sends requests with times through an empty deployment until all have ended. Same arguments, same result."""

    def __call__(self, deployment: Deployment, shapes: Sequence[Shape]) -> Seen: ...


def measured(count: int) -> slice:
    """Which of so many requests, in the order in which they come, are measured."""
    return slice(int(count * WARM_UP_SHARE), count - int(count * TAIL_SHARE))


@dataclass(frozen=True, slots=True)
class Point:
    """A deployment at a rate, of all replications together: the share within the objectives, the least of one
    replication, and percentiles in seconds (infinite: of requests that did not complete)."""

    rate: float
    attainment: float
    least_attainment: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p99_s: float
    """p99 of the requests' own p99 gaps."""
    num_requests: int
    uses: Mapping[Role, Use]


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated beside the rate: a deployment under its name, and traffic. `num_requests` are those of a
    stretch."""

    name: str
    deployment: Deployment
    traffic: Traffic
    num_requests: int


@dataclass(slots=True)
class Laboratory:
    """Runs experiments, each once. `say` hears of each as it ends."""

    simulate: Simulate
    target: float
    seed: int
    say: Callable[[str], None] = lambda _: None
    num_simulations: int = 0
    num_requests: int = 0
    _seen: dict[tuple[str, str, int, int, float], Seen] = field(default_factory=dict)

    def seen(self, setting: Setting, rate: float, replication: int) -> Seen:
        """One stretch at a rate."""
        traffic, count = setting.traffic, setting.num_requests
        key = (setting.name, traffic.name, count, replication, rate)
        if key not in self._seen:
            shapes = traffic.stretch(rate, count, replication, self.seed)
            self._seen[key] = self.simulate(setting.deployment, shapes)
            self.num_simulations += 1
            self.num_requests += count
        return self._seen[key]

    def shares(self, setting: Setting, slo: Slo) -> dict[float, list[float]]:
        """By rate, ascending, the shares of good requests of the stretches that were simulated."""
        found: dict[float, list[float]] = {}
        for (name, traffic, count, _, rate), seen in self._seen.items():
            if (name, traffic, count) == (setting.name, setting.traffic.name, setting.num_requests):
                found.setdefault(rate, []).append(seen.share_good(slo))
        return dict(sorted(found.items()))

    def capacity(
        self, setting: Setting, slo: Slo, replication: int, start: float, most: float, width: int = 2
    ) -> Capacity:
        """The highest rate up to `most` at which enough requests of a stretch meet the objectives. What was simulated
        of the stretch, for whatever objectives, narrows the search."""

        def share_at(rate: float) -> float:
            share = self.seen(setting, rate, replication).share_good(slo)
            self.say(f"{setting.name} at {rate:.3g} requests/s: {share:.0%} within the objectives")
            return share

        known = self._shares_of(setting, slo, replication)
        return highest_rate(share_at, start=start, most=most, target=self.target, width=width, known=known)

    def holding(self, setting: Setting, slo: Slo) -> list[Seen]:
        """What was seen at rates at which enough requests of the stretch met the objectives."""
        wanted = (setting.name, setting.traffic.name, setting.num_requests)
        found = (seen for key, seen in self._seen.items() if key[:3] == wanted)
        return [seen for seen in found if seen.share_good(slo) >= self.target]

    def _shares_of(self, setting: Setting, slo: Slo, replication: int) -> dict[float, float]:
        """Of one stretch, by those rates of the grid that were simulated."""
        wanted = (setting.name, setting.traffic.name, setting.num_requests, replication)
        return {
            rate: seen.share_good(slo)
            for (*key, rate), seen in self._seen.items()
            if tuple(key) == wanted and grid_rate(nearest_place(rate)) == rate
        }

    def point(self, setting: Setting, slo: Slo, rate: float, replications: Sequence[int]) -> Point:
        """What that rate comes to."""
        each = [self.seen(setting, rate, replication) for replication in replications]
        shares = [seen.share_good(slo) for seen in each]
        self.say(f"{setting.name} at {rate:.3g} requests/s: {min(shares):.0%} or more within the objectives")
        ttft = np.concatenate([seen.ttft_s for seen in each])
        itl = np.concatenate([seen.itl_p99_s for seen in each])
        return Point(
            rate=rate,
            attainment=float(np.mean(shares)),
            least_attainment=min(shares),
            ttft_p50_s=percentile(ttft, 50),
            ttft_p99_s=percentile(ttft, 99),
            itl_p99_s=percentile(itl, 99),
            num_requests=len(ttft),
            uses={role: _mean_use([seen.uses[role] for seen in each]) for role in each[0].uses},
        )


def _mean_use(uses: Sequence[Use]) -> Use:
    return Use(
        float(np.mean([use.busy_share for use in uses])),
        float(np.mean([use.kv_share for use in uses])),
        max(use.most_kv_share for use in uses),
    )
