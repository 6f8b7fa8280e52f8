"""What tunes the pools of a running server: it hears of requests, and may wish for other pools like an operator.

The coordinator knows no more of it than this; `planner/autotune` is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from twinpool.coordinator.pool_desk import PoolService
from twinpool.coordinator.registry import Registry
from twinpool.coordinator.request_record import EndedRequest
from twinpool.coordinator.service import Submission
from twinpool.layout import KVLayout
from twinpool.metrics import TunerMetric


@dataclass(frozen=True, slots=True)
class WorkerTerms:
    """What workers of a server have alike; `num_blocks` of the smallest KV pool, `max_model_len` that all can hold."""

    layout: KVLayout
    num_blocks: int
    max_model_len: int


def worker_terms(registry: Registry) -> WorkerTerms | None:
    """What the workers that have joined have alike; None before the first has."""
    num_blocks = min((worker.info.num_blocks for worker in registry), default=None)
    max_model_len = registry.max_model_len()
    if registry.terms is None or num_blocks is None or max_model_len is None:
        return None
    return WorkerTerms(registry.terms.layout, num_blocks, max_model_len)


class TunedServer(Protocol):
    """What a tuner may ask of the server that it runs beside."""

    @property
    def pool_desk(self) -> PoolService:
        """Where the pools are changed, as operators change them."""
        ...

    def now(self) -> float:
        """The coordinator clock, in seconds."""
        ...

    def worker_terms(self) -> WorkerTerms | None:
        """What the workers have alike; None before the first has joined."""
        ...


class Tuner(Protocol):
    """All methods are called on the event loop, must not wait, and must cost little: tokens wait meanwhile."""

    def arrived(self, submission: Submission, prefix: Sequence[int], now: float) -> None:
        """A request came, and was perhaps refused; `prefix` as in `routing.prefix_chain`, of a refused one empty."""
        ...

    def emitted(self, request_id: str, num_tokens: int, now: float) -> None:
        """A request got output tokens."""
        ...

    def ended(self, ended: EndedRequest, now: float) -> None:
        """A request's outcome was decided a moment ago, or it was refused."""
        ...

    def status(self) -> Mapping[str, Any]:
        """What operators are shown of it, as JSON values."""
        ...

    def counts(self) -> Mapping[TunerMetric, float]:
        """Its counters, none of which ever falls."""
        ...

    def median_errors(self) -> Mapping[str, float]:
        """The median error of its predictions so far, by figure, as `TUNER_ERROR_HELP` defines it."""
        ...

    @property
    def why_ended(self) -> str:
        """The bug that has ended it; empty before that."""
        ...

    async def run(self, server: TunedServer) -> None:
        """Tunes until it is cancelled, or has met a bug of its own (`why_ended`): which it does not raise: serving does
        not depend on it."""
        ...
