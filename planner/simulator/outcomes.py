"""What became of simulated requests, in the words and types of the bench: the same summary, result and report."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twinpool.bench.serving.datasets.shapes import Shape
from twinpool.bench.serving.record import (
    Ending,
    RequestRecord,
    Run,
    ServerTimeline,
    Stage,
    TokenCount,
    TokenTimes,
)
from twinpool.bench.serving.slo import Slo
from twinpool.bench.serving.summary import Summary, Window, summarize
from twinpool.config import Role

STARTED_AT = "1970-01-01T00:00:00+00:00"
"""A simulated run has no date: the same one is the same to the last byte whenever it is done."""
_DURING = frozenset({"transfer", "decode", "resume"})
"""Stages that run while tokens are delivered."""


class Outcome:
    """One request. Times are virtual seconds since the run's start; `times` are when its client had each token.

    `stages_us` are the coordinator's, by name, in microseconds; `workers` those of the last attempt, prefill's first.
    """

    __slots__ = (
        "cached_tokens",
        "ended_at_s",
        "ending",
        "error",
        "first_token_us",
        "index",
        "input_tokens",
        "intended_at_s",
        "num_attempts",
        "sent_at_s",
        "shape",
        "stages_us",
        "status",
        "times",
        "was_sent",
        "workers",
    )

    def __init__(self, index: int, shape: Shape, intended_at_s: float) -> None:
        self.index = index
        self.shape = shape
        self.input_tokens = shape.input_tokens
        self.intended_at_s = self.sent_at_s = self.ended_at_s = intended_at_s
        self.ending: Ending | None = None
        self.status = 0
        self.error = ""
        self.times = array("d")
        self.stages_us: Mapping[str, int] = {}
        self.first_token_us: int | None = None
        self.cached_tokens: int | None = None
        self.workers: tuple[str, ...] = ()
        self.num_attempts = 0
        self.was_sent = False

    @property
    def queue_s(self) -> float:
        """In the coordinator's queue before its first token."""
        return self.stages_us.get("queue", 0) / 1e6

    @property
    def ttft_s(self) -> float | None:
        """First token − sent; None without tokens."""
        return self.times[0] - self.sent_at_s if self.times else None

    def record(self) -> RequestRecord:
        """As the bench would have seen it. The times are shared, not copied."""
        return RequestRecord(
            index=self.index,
            request_id=str(self.index),
            group=self.shape.group,
            intended_at_s=self.intended_at_s,
            sent_at_s=self.sent_at_s,
            ended_at_s=self.ended_at_s,
            ending=Ending.CANCELLED if self.ending is None else self.ending,
            input_tokens=self.input_tokens,
            wanted_output_tokens=self.shape.output_tokens,
            output_tokens=len(self.times),
            chunks=TokenTimes(self.times).as_chunks(),
            token_count=TokenCount.IDS,
            finish_reason="length" if self.ending is Ending.COMPLETED else None,
            status=self.status,
            error=self.error,
            cached_tokens=self.cached_tokens,
            timeline=self._timeline(),
        )

    def _timeline(self) -> ServerTimeline | None:
        if not self.num_attempts:
            return None
        stages: list[Stage] = []
        beside: list[Stage] = []
        start_s = 0.0
        for name, us in self.stages_us.items():
            stage = Stage(name, start_s, us / 1e6)
            start_s += us / 1e6
            (beside if name in _DURING else stages).append(stage)
        first_us, ttft_s = self.first_token_us, self.ttft_s
        if first_us is not None and ttft_s is not None:
            stages.append(Stage("deliver", first_us / 1e6, max(0.0, ttft_s - first_us / 1e6)))
        return ServerTimeline(
            ttft_s=ttft_s,
            e2e_s=self.ended_at_s - self.sent_at_s,
            stages=tuple(stages),
            beside=tuple(beside),
            num_attempts=self.num_attempts,
            workers=self.workers,
            cached_tokens=self.cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class WorkerUse:
    """What one worker did. `kv_share` is the mean part of its blocks that jobs held, `most_kv_share` the largest, both
    as heartbeats told; `counters` are its core's (`metrics.WorkerMetric`)."""

    worker_id: str
    role: Role
    busy_s: float
    num_steps: int
    kv_share: float
    most_kv_share: float
    counters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Simulation:
    """A run that was simulated. `outcomes` are by index; `num_events` says how much there was to do."""

    layout_name: str
    outcomes: tuple[Outcome, ...]
    duration_s: float
    workers: tuple[WorkerUse, ...]
    attempts_lost: Mapping[str, int]
    """Why attempts were started again, and how often."""
    num_events: int
    mean_in_flight: float
    """Requests between their sending and their end, over the run's time."""
    accelerators: Mapping[str, int]
    """How many each pool has."""
    warnings: tuple[str, ...] = ()
    """What the coordinator would have logged as errors."""
    settings: dict[str, Any] = field(default_factory=dict)
    was_interrupted: bool = False

    def as_run(self) -> Run:
        """As a run of the bench. Tokens stay as they are (8 bytes each)."""
        return Run(
            started_at=STARTED_AT,
            duration_s=self.duration_s,
            requests=tuple(outcome.record() for outcome in self.outcomes),
            senders=(),
            settings=self.settings,
            was_interrupted=self.was_interrupted,
        )

    def summary(self, slo: Slo | None = None, window: Window | None = None) -> Summary:
        """What the bench says of such a run."""
        return summarize(self.as_run(), slo, window, accelerators=self.accelerators)

    def busy_share(self, role: Role) -> float:
        """The part of the run in which the workers of a pool computed, on average; 0 without any."""
        busy = [worker.busy_s for worker in self.workers if worker.role is role]
        return sum(busy) / len(busy) / self.duration_s if busy and self.duration_s else 0.0
