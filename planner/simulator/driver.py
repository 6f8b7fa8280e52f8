"""The simulation: clients, coordinator and workers, in virtual time.

Nothing here decides anything: the coordinator's core admits, queues and routes, the workers' cores schedule, grant,
push and preempt, exactly as in a server. Arrivals are the only input, so the same requests give the same run, in every
process.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import cast

from twinpool.bench.serving.datasets.shapes import Shape
from twinpool.bench.serving.record import Ending
from twinpool.config import Role, require
from twinpool.coordinator import events
from twinpool.coordinator.routing import CHUNK_TOKENS, MAX_CHUNKS
from twinpool.coordinator.service import Output, Submission
from twinpool.coordinator.state import CoordinatorCore
from twinpool.errors import ConfigError, InvariantViolation, RequestError
from twinpool.metrics import CoordinatorMetric
from twinpool.planner.deployment import Deployment
from twinpool.planner.simulator.agenda import LATER, Agenda
from twinpool.planner.simulator.control import TICK_S, Control
from twinpool.planner.simulator.fleet import Fleet
from twinpool.planner.simulator.outcomes import Outcome, Simulation
from twinpool.planner.simulator.prefixes import Prefixes
from twinpool.request import FinishReason, SamplingParams

LAST_ARRIVAL_S = 1e8
"""Three years. Times much later have no fractions of a microsecond left in a float."""
_ENDINGS = {
    FinishReason.STOP: Ending.COMPLETED,
    FinishReason.LENGTH: Ending.COMPLETED,
    FinishReason.CANCELLED: Ending.CANCELLED,
    FinishReason.TIMEOUT: Ending.TIMED_OUT,
    FinishReason.ERROR: Ending.FAILED,
}

OnProgress = Callable[[int, float], None]
"""Is told how many requests have ended, at which virtual time."""


def simulate(
    deployment: Deployment,
    requests: Sequence[Shape],
    *,
    num_clients: int | None = None,
    max_concurrency: int | None = None,
    on_progress: OnProgress | None = None,
    is_step_by_step: bool = False,
) -> Simulation:
    """Runs `requests` on `deployment`, each at its time `at_s`.

    With `num_clients` times do not count: so many clients ask one request after the other. With `max_concurrency` a
    request that comes while as many are under way waits at its client. With `is_step_by_step` every step goes through
    its whole batch, as in a server, which takes longer and gives the same. Ctrl-C ends the run: requests that have not
    ended then are cancelled, those that were not sent are left out, and the simulation says that it was interrupted.

    Raises:
        ConfigError: there are no requests, or one has no time.
    """
    driver = Driver(
        deployment,
        requests,
        num_clients=num_clients,
        max_concurrency=max_concurrency,
        on_progress=on_progress,
        is_step_by_step=is_step_by_step,
    )
    found = driver.run()
    driver.disband()
    return found


class Driver:
    """One run. The clients of all requests (`Clients`), and what makes time pass."""

    def __init__(
        self,
        deployment: Deployment,
        requests: Sequence[Shape],
        *,
        num_clients: int | None = None,
        max_concurrency: int | None = None,
        on_progress: OnProgress | None = None,
        is_step_by_step: bool = False,
    ) -> None:
        _check(requests, num_clients, max_concurrency)
        self.deployment = deployment
        self.agenda = Agenda()
        chunks = Prefixes(requests, CHUNK_TOKENS)  # as the router looks at prompts
        self.core = CoordinatorCore(
            deployment.coordinator,
            (),
            lambda submission: chunks.names(int(submission.request_id))[:MAX_CHUNKS],
        )
        self._control = Control(self.core, self.agenda, self)
        blocks = Prefixes(requests, deployment.layout.block_size)
        self._fleet = Fleet(deployment, blocks, self.agenda, self._control, is_step_by_step=is_step_by_step)
        self.workers = self._fleet.workers
        front = next(pool for pool in deployment.pools if pool.role is not Role.DECODE)
        self._overheads = front.times.overheads
        self.outcomes = [
            Outcome(index, shape, 0.0 if num_clients else shape.at_s or 0.0)
            for index, shape in enumerate(requests)
        ]
        self._sampling: dict[int, SamplingParams] = {}
        self._coming: Iterator[Outcome] = iter(sorted(self.outcomes, key=lambda each: each.intended_at_s))
        self._room: float = num_clients or max_concurrency or inf
        self._is_closed_loop = num_clients is not None
        self._held: deque[Outcome] = deque()
        self._num_open = len(self.outcomes)
        self._num_on_the_way = 0
        self._last_arrives_at = 0.0
        self._is_ticking = False
        self._beat_at = 0.0
        self._num_events = 0
        self._duration_s = 0.0
        self._num_in_flight = 0
        self._in_flight_since = self._in_flight_s = 0.0
        self._on_progress = on_progress

    # ── the run ─────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> Simulation:
        """Until every request has ended and no worker holds anything of one."""
        was_interrupted = False
        try:
            with _without_collector():
                self._run()
        except KeyboardInterrupt:
            was_interrupted = True
            self._duration_s = self.agenda.now
            self.outcomes = [outcome for outcome in self.outcomes if outcome.was_sent]
            for outcome in self.outcomes:
                if outcome.ending is None:
                    outcome.ended_at_s = max(outcome.sent_at_s, self.agenda.now)
                    outcome.error = "the run was stopped"
        lost = self.core.tally.counts(CoordinatorMetric.ATTEMPTS_LOST)
        return Simulation(
            layout_name=self.deployment.name,
            outcomes=tuple(self.outcomes),
            duration_s=self._duration_s,
            workers=self._fleet.uses(),
            attempts_lost={str(reason): count for reason, count in lost.items()},
            num_events=self._num_events,
            mean_in_flight=self._in_flight_s / self._duration_s if self._duration_s else 0.0,
            accelerators={
                pool.role.value: pool.num_workers * pool.num_accelerators for pool in self.deployment.pools
            },
            warnings=tuple(dict.fromkeys(self._control.warnings)),
            was_interrupted=was_interrupted,
        )

    def disband(self) -> None:
        """Gives up the workers, whose pools may be large."""
        for worker in self.workers:
            worker.disband()

    def _run(self) -> None:
        self._fleet.join()
        if self._is_closed_loop:
            self._ask_on()
        else:
            self._expect_next()
        step, num_events = self.agenda.step, 0
        try:
            while self._num_open:
                step()
                num_events += 1
            while self.core.num_live:
                step()
                num_events += 1
        finally:
            self._num_events = num_events

    def _tick(self, number: int) -> None:
        if not self.core.num_live and not self._num_on_the_way:
            self._is_ticking = False  # nothing runs and nothing waits: time passes without effect
            return
        self.agenda.at((number + 1) * TICK_S, LATER, self._tick, number + 1)
        if self.core.is_check_due(self.agenda.now):
            self._control.tell_of_all_steps()
        self._control.handle(events.Tick())
        self._fleet.tick()
        if self.agenda.now - self._beat_at >= self.deployment.coordinator.heartbeat_s - TICK_S / 2:
            self._beat()

    def _beat(self) -> None:
        self._beat_at = self.agenda.now
        self._fleet.beat()

    def _wake(self) -> None:
        """A request comes while nothing ticks: heartbeats have come all the time, and ticks go on."""
        if self._is_ticking:
            return
        self._is_ticking = True
        number = int(self.agenda.now / TICK_S) + 1
        self.agenda.at(number * TICK_S, LATER, self._tick, number)
        if self.agenda.now > self._beat_at:
            self._beat()

    # ── the clients ─────────────────────────────────────────────────────────────────────────────────────────

    def _expect_next(self) -> None:
        if (outcome := next(self._coming, None)) is not None:
            self.agenda.at(outcome.intended_at_s, LATER, self._come, outcome)

    def _come(self, outcome: Outcome) -> None:
        self._expect_next()
        if self._room >= 1:
            self._send(outcome)
        else:
            self._held.append(outcome)

    def _ask_on(self) -> None:
        """Clients that are free ask."""
        while self._room >= 1:
            outcome = self._held.popleft() if self._held else self._next_of_loop()
            if outcome is None:
                return
            self._send(outcome)

    def _next_of_loop(self) -> Outcome | None:
        outcome = next(self._coming, None) if self._is_closed_loop else None
        if outcome is not None:
            outcome.intended_at_s = self.agenda.now
        return outcome

    def _send(self, outcome: Outcome) -> None:
        now, overheads = self.agenda.now, self._overheads
        self._room -= 1
        self._num_on_the_way += 1
        outcome.sent_at_s = now
        outcome.was_sent = True
        self._count_in_flight(1)
        takes_s = overheads.request_s + overheads.prompt_token_s * outcome.input_tokens
        # One process reads them, in order: a short one does not overtake a long one that was sent right before it.
        self._last_arrives_at = max(self._last_arrives_at, now + takes_s)
        self.agenda.at(self._last_arrives_at, LATER, self._arrive, outcome)

    def _arrive(self, outcome: Outcome) -> None:
        self._num_on_the_way -= 1
        self._wake()
        now, shape = self.agenda.now, outcome.shape
        sampling = self._sampling.get(shape.output_tokens)
        if sampling is None:
            sampling = SamplingParams(shape.output_tokens, seed=0, temperature=0.0, ignore_eos=True)
            self._sampling[shape.output_tokens] = sampling
        # Their number counts; which are equal, `Prefixes` says.
        prompt = cast("tuple[int, ...]", range(outcome.input_tokens))
        self._control.handle(
            events.Arrived(
                Submission(
                    str(outcome.index),
                    prompt,
                    sampling,
                    outcome.sent_at_s,
                    outcome.sent_at_s,
                    tokenized_at=now,
                )
            )
        )

    def emitted(self, request_id: str, output: Output, at_s: float) -> None:
        """See `Clients`."""
        outcome = self.outcomes[int(request_id)]
        _require_next(outcome, output.first_index)
        for _ in output.token_ids:
            outcome.times.append(at_s)
        if output.finish is not None:
            outcome.status = 200
            self._end(outcome, _ENDINGS[output.finish], output.error, at_s)

    def emitted_run(self, request_id: str, first_index: int, times: Sequence[float]) -> None:
        """See `Clients`."""
        outcome = self.outcomes[int(request_id)]
        _require_next(outcome, first_index)
        outcome.times.extend(times)

    def refused(self, request_id: str, error: RequestError, at_s: float) -> None:
        """See `Clients`."""
        outcome = self.outcomes[int(request_id)]
        outcome.status = error.status
        self._end(outcome, Ending.REJECTED, error, at_s)

    def _end(self, outcome: Outcome, ending: Ending, error: RequestError | None, at_s: float) -> None:
        outcome.ending = ending
        outcome.ended_at_s = at_s
        outcome.error = "" if error is None else error.message
        if (timeline := self.core.timeline(str(outcome.index))) is not None:
            outcome.stages_us = timeline.stages_us(self.agenda.now)
            outcome.first_token_us = timeline.first_token_us
            outcome.num_attempts = len(timeline.attempts)
            if timeline.attempts:
                last = timeline.attempts[-1]
                pair = (last.prefill_worker, last.decode_worker)
                outcome.workers = pair[:1] if pair[0] == pair[1] else pair
                if last.prefill is not None:
                    outcome.cached_tokens = last.prefill.num_cached
        self._duration_s = max(self._duration_s, at_s)
        self.agenda.at(at_s, LATER, self._leave, None)  # its client has the answer then, and may ask again

    def _count_in_flight(self, change: int) -> None:
        now = self.agenda.now
        self._in_flight_s += self._num_in_flight * (now - self._in_flight_since)
        self._in_flight_since = now
        self._num_in_flight += change

    def _leave(self, _: None) -> None:
        self._count_in_flight(-1)
        self._num_open -= 1
        self._room += 1
        if self._on_progress is not None:
            self._on_progress(len(self.outcomes) - self._num_open, self.agenda.now)
        if self._is_closed_loop or self._held:
            self._ask_on()


@contextmanager
def _without_collector() -> Iterator[None]:
    """A run makes no garbage in cycles that is worth looking for, and looking takes a quarter of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _require_next(outcome: Outcome, first_index: int) -> None:
    if first_index != len(outcome.times):
        raise InvariantViolation(
            f"token {first_index} of request {outcome.index} came as its client has {len(outcome.times)}"
        )


def _check(requests: Sequence[Shape], num_clients: int | None, max_concurrency: int | None) -> None:
    require("the number of requests", len(requests), len(requests) > 0, "1 or more")
    for flag, number in (("--num-clients", num_clients), ("--max-concurrency", max_concurrency)):
        require(flag, number, number is None or number >= 1, "1 or more")
    if num_clients is not None and max_concurrency is not None:
        raise ConfigError(
            "--num-clients is a closed loop, without --max-concurrency; leave one of the two out"
        )
    last_s = max(shape.at_s or 0.0 for shape in requests)
    require(
        "the time of the last request", last_s, 0 <= last_s <= LAST_ARRIVAL_S, f"0 to {LAST_ARRIVAL_S:.0e} s"
    )
    timeless = sum(shape.at_s is None for shape in requests)
    if timeless and num_clients is None:
        raise ConfigError(
            f"{timeless} of {len(requests)} requests have no time to come at; give them times (--request-rate, or data "
            "with timestamps), or a number of clients (--num-clients)"
        )
