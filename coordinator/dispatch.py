"""The way from the queue to the workers: who goes next, and what is opened and sent when it goes."""

from __future__ import annotations

from collections.abc import Callable

from twinpool.config import CoordinatorConfig, Role
from twinpool.coordinator.admission import Admission
from twinpool.coordinator.custody import Custody
from twinpool.coordinator.health import Health
from twinpool.coordinator.lifecycle import LegKind, Move, Request
from twinpool.coordinator.registry import Registry
from twinpool.coordinator.routing import Route, Router
from twinpool.coordinator.tally import Tally
from twinpool.coordinator.timeline import Attempt
from twinpool.coordinator.waiting import WaitingQueue
from twinpool.messages import Generate, Prefill, Reserve
from twinpool.metrics import CoordinatorMetric, Timing


class Dispatch:
    """Starts attempts while workers have room. `no_worker` ends all that wait: it takes why, and `now`."""

    def __init__(
        self,
        config: CoordinatorConfig,
        eos_token_ids: tuple[int, ...],
        queue: WaitingQueue,
        registry: Registry,
        router: Router,
        custody: Custody,
        admission: Admission,
        health: Health,
        tally: Tally,
        no_worker: Callable[[str, float], None],
    ) -> None:
        self._max_in_flight = config.max_in_flight
        self._eos_token_ids = eos_token_ids
        self._queue = queue
        self._registry = registry
        self._router = router
        self._custody = custody
        self._admission = admission
        self._health = health
        self._tally = tally
        self._no_worker = no_worker
        self._given_up: dict[Role, str] = {}

    def give_up(self, role: Role, reason: str) -> None:
        """Notes that nobody starts workers of this role any more, and why."""
        self._given_up[role] = reason

    def hope(self) -> None:
        """Notes that workers of any role may be started again."""
        self._given_up.clear()

    def advance(self, now: float) -> None:
        """Starts attempts of the requests that wait, in their turn, while workers have room."""
        if not len(self._queue):
            return
        for role, reason in self._given_up.items():
            if not self._registry.of_role(role) and not self._registry.can_run()[0]:
                self._no_worker(f"the {role} pool has no worker left: {reason}", now)
        limit = self._max_in_flight
        if limit is None:
            limit = self._registry.default_in_flight()
        room = limit - self._registry.in_flight()
        while len(self._queue) and room > 0:
            request = self._queue.first(now)
            route = self._router.choose(request, now)
            if route is None:
                return
            self._start(request, route, now)
            if route.is_colocated or not request.ends_with_first_token:
                room -= 1

    def _start(self, request: Request, route: Route, now: float) -> None:
        num_tokens = request.num_tokens
        if request.attempt == 0:
            self._custody.serve(request, num_tokens)
            self._tally.timings[Timing.QUEUE].observe(now - request.submission.tokenized_at)
        request.attempt += 1
        request.num_emitted_at_start = len(request.emitted)
        request.handed_off = False
        self._custody.move(request, Move.DISPATCH, now)
        self._admission.pace.departed(num_tokens, now)
        self._health.moved(now)
        prefill, decode = route.prefill, route.decode
        attempt = Attempt(request.attempt, prefill.worker_id, decode.worker_id, route.candidates, now)
        if (choice := route.choice) is not None:
            attempt.way, attempt.predictions = choice.way, choice.predictions
            attempt.excluded = choice.excluded
            self._tally.add(CoordinatorMetric.HYBRID_CHOICES, choice.way)
        request.timeline.attempts.append(attempt)
        job = request.job(self._eos_token_ids)
        uncached = num_tokens - self._router.matched(request, prefill)
        if route.is_colocated:
            self._custody.open(request, LegKind.GENERATE, prefill, uncached)
            self._custody.send(prefill, Generate(job))
        else:
            self._custody.open(request, LegKind.PREFILL, prefill, uncached)
            self._custody.send(prefill, Prefill(job, decode.worker_id))
            if not job.ends_with_first_token:
                self._custody.open(request, LegKind.DECODE, decode, 0)
                self._custody.send(decode, Reserve(job, prefill.worker_id, prefill.incarnation))
        self._router.dispatched(request, route)
