"""The simulation: coordinator, workers and clients, in virtual time.

Nothing here decides anything: the coordinator's core admits, queues and routes, the workers' cores schedule, grant,
push and preempt, exactly as in a server. Arrivals are the only input, so the same requests give the same run, in every
process.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import cast

from twinpool.bench.serving.datasets.shapes import Shape
from twinpool.bench.serving.record import Ending
from twinpool.config import Role, require
from twinpool.coordinator import events
from twinpool.coordinator.custody import LACK_OF_ROOM
from twinpool.coordinator.service import Output, Submission
from twinpool.coordinator.state import FULL_PAUSE_S, CoordinatorCore
from twinpool.errors import ConfigError, InvariantViolation, RequestError
from twinpool.messages import (
    Denied,
    Dropped,
    Heartbeat,
    LinkReady,
    LockstepTokens,
    Message,
    Peers,
    Register,
    Welcome,
)
from twinpool.metrics import CoordinatorMetric
from twinpool.planner.deployment import Deployment
from twinpool.planner.simulator.agenda import LATER, STEP_MESSAGES, Agenda
from twinpool.planner.simulator.lockstep import LockstepWorker
from twinpool.planner.simulator.machine import Machine
from twinpool.planner.simulator.outcomes import Outcome, Simulation, WorkerUse
from twinpool.planner.simulator.prefixes import Prefixes
from twinpool.planner.simulator.worker import FINGERPRINT, TOKEN_ID, SimulatedWorker
from twinpool.request import FinishReason, SamplingParams
from twinpool.worker.core import PeerLinked, Tick

TICK_S = 0.1
PROBE_BYTES = 1 << 26
"""Of each link, whose rate is told to the coordinator."""
PREFIX_CHUNK = 64
MAX_PREFIX_CHUNKS = 256
"""As the router looks at prompts (`coordinator/routing.py`)."""
STEP_TOKENS = LockstepTokens((), (), TOKEN_ID)
"""What is told of a step in which each sequence got a token and nothing else happened."""
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
    its whole batch, as in a server, which takes longer and gives the same. Ctrl-C ends the run; requests that have not
    ended then are cancelled, and the simulation says that it was interrupted.

    Raises:
        ConfigError: there are no requests, or one has no time.
    """
    return Driver(
        deployment,
        requests,
        num_clients=num_clients,
        max_concurrency=max_concurrency,
        on_progress=on_progress,
        is_step_by_step=is_step_by_step,
    ).run()


class Driver:
    """One run."""

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
        self.agenda = Agenda()
        self.deployment = deployment
        chunks = Prefixes(requests, PREFIX_CHUNK)
        self.core = CoordinatorCore(
            deployment.coordinator,
            (),
            lambda submission: chunks.names(int(submission.request_id))[:MAX_PREFIX_CHUNKS],
        )
        blocks = Prefixes(requests, deployment.layout.block_size)
        self.workers = _workers(deployment, blocks, self, is_step_by_step=is_step_by_step)
        is_plain = not any(pool.scheduler.hybrid for pool in deployment.pools)
        self._skipping = [
            w for w in self.workers if isinstance(w, LockstepWorker) and w.may_skip and is_plain
        ]
        self._skips_again_at = 0.0
        self._by_id = {worker.worker_id: worker for worker in self.workers}
        self._kv_shares = {worker.worker_id: _Shares() for worker in self.workers}
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
        self._is_ticking = False
        self._beat_at = 0.0
        self._num_events = 0
        self._duration_s = 0.0
        self._num_in_flight = 0
        self._in_flight_since = self._in_flight_s = 0.0
        self._on_progress = on_progress
        self._warnings: list[str] = []

    # ── the run ─────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> Simulation:
        """Until every request has ended and no worker holds anything of one."""
        self._join_all()
        if self._is_closed_loop:
            self._ask_on()
        else:
            self._expect_next()
        was_interrupted, step = False, self.agenda.step
        try:
            while self._num_open or self.core.num_live:
                step()
                self._num_events += 1
        except KeyboardInterrupt:
            was_interrupted = True
            self._duration_s = self.agenda.now
            for outcome in self.outcomes:
                if outcome.ending is None:
                    outcome.ended_at_s = max(outcome.sent_at_s, self.agenda.now)
        return Simulation(
            layout_name=self.deployment.name,
            outcomes=tuple(self.outcomes),
            duration_s=self._duration_s,
            workers=tuple(self._use(worker) for worker in self.workers),
            attempts_lost={
                str(why): n for why, n in self.core.tally.counts(CoordinatorMetric.ATTEMPTS_LOST).items()
            },
            num_events=self._num_events,
            mean_in_flight=self._in_flight_s / self._duration_s if self._duration_s else 0.0,
            accelerators={
                pool.role.value: pool.num_workers * pool.num_accelerators for pool in self.deployment.pools
            },
            warnings=tuple(dict.fromkeys(self._warnings)),
            was_interrupted=was_interrupted,
        )

    def _use(self, worker: SimulatedWorker) -> WorkerUse:
        shares = self._kv_shares[worker.worker_id]
        return WorkerUse(
            worker_id=worker.worker_id,
            role=worker.pool.role,
            busy_s=worker.busy_s,
            num_steps=worker.num_steps,
            kv_share=shares.mean,
            most_kv_share=shares.most,
            counters={name: value for name, value in worker.core.stats().counters.items() if value},
        )

    # ── the pools ───────────────────────────────────────────────────────────────────────────────────────────

    def _join_all(self) -> None:
        """All workers are there, and linked, before the first request comes."""
        for worker in self.workers:
            self._hear(worker, _offer(worker, self.deployment))
            if worker.pool.scheduler.hybrid:
                worker.time_steps()
        for sender in self._of_role(Role.PREFILL):
            gb_per_s = PROBE_BYTES / max(1e-9, sender.pool.times.transfer_s(PROBE_BYTES)) / 1e9
            for receiver in self._of_role(Role.DECODE):
                sender.take(PeerLinked(receiver.worker_id, receiver.incarnation, "simulated"))
                receiver.take(PeerLinked(sender.worker_id, sender.incarnation, "simulated"))
                ready = LinkReady(
                    receiver.worker_id, receiver.incarnation, "simulated", gb_per_s, PROBE_BYTES
                )
                self._hear(sender, ready)
        self._beat()

    def _of_role(self, role: Role) -> list[SimulatedWorker]:
        return [worker for worker in self.workers if worker.pool.role is role]

    def _tick(self, number: int) -> None:
        if not self.core.num_live and not self._num_on_the_way:
            self._is_ticking = False  # nothing runs and nothing waits: time passes without effect
            return
        self.agenda.at((number + 1) * TICK_S, LATER, self._tick, number + 1)
        self._tell_of_all_steps()
        self._handle(events.Tick())
        for worker in self.workers:
            worker.take(Tick())
        if self.agenda.now - self._beat_at >= self.deployment.coordinator.heartbeat_s - TICK_S / 2:
            self._beat()

    def _beat(self) -> None:
        self._beat_at = self.agenda.now
        self._tell_of_all_steps()
        for worker in self.workers:
            stats = worker.core.stats()
            num_blocks = worker.pool.num_blocks
            held = num_blocks - stats.free_blocks - stats.cached_blocks
            self._kv_shares[worker.worker_id].add(held / num_blocks)
            self._hear(worker, Heartbeat(stats))

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
        self._count_in_flight(1)
        takes_s = overheads.request_s + overheads.prompt_token_s * outcome.shape.input_tokens
        self.agenda.at(now + takes_s, LATER, self._arrive, outcome)

    def _arrive(self, outcome: Outcome) -> None:
        self._num_on_the_way -= 1
        self._wake()
        self._foresee()
        now, shape = self.agenda.now, outcome.shape
        sampling = self._sampling.get(shape.output_tokens)
        if sampling is None:
            sampling = SamplingParams(shape.output_tokens, seed=0, temperature=0.0, ignore_eos=True)
            self._sampling[shape.output_tokens] = sampling
        # Their number counts; which are equal, `Prefixes` says.
        prompt = cast("tuple[int, ...]", range(shape.input_tokens))
        self._handle(
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

    def _emit(self, request_id: str, output: Output, at_s: float) -> None:
        outcome = self.outcomes[int(request_id)]
        _require_next(outcome, output.first_index)
        for _ in output.token_ids:
            outcome.times.append(at_s)
        if output.finish is not None:
            outcome.status = 200
            self._end(outcome, _ENDINGS[output.finish], output.error, at_s)

    def _emit_run(self, run: events.EmitRun) -> None:
        outcome, late_s = self.outcomes[int(run.request_id)], _on_the_way_s(self._by_id[run.worker_id])
        _require_next(outcome, run.first_index)
        outcome.times.extend(array("d", (at_s + late_s for at_s in run.times)) if late_s else run.times)

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

    # ── the coordinator ─────────────────────────────────────────────────────────────────────────────────────

    def tell(self, worker: SimulatedWorker, message: Message, rank: int) -> None:
        """A worker sends a message to the coordinator."""
        when = self.agenda.now + worker.pool.times.overheads.control_s
        self.agenda.at(when, rank, self._hear_later, (worker, message, rank))

    def _hear_later(self, told: tuple[SimulatedWorker, Message, int]) -> None:
        worker, message, rank = told
        if isinstance(worker, LockstepWorker) and worker.due_at <= self.agenda.now:
            self._tell_of_steps(worker, rank)
        if len(self.core.queue) or isinstance(message, Dropped):
            self._foresee(rank)
        self._hear(worker, message)
        if isinstance(message, Dropped) and message.reason in LACK_OF_ROOM:
            self._pause_skipping()

    # ── steps that were skipped ─────────────────────────────────────────────────────────────────────────────

    def _foresee(self, rank: int = LATER) -> None:
        """The core may send a request on by what has `rank`: it looks at what workers hold, more than it was told."""
        now = self.agenda.now
        for worker in self._skipping:
            if worker.foreseen_until <= now:
                with_now = STEP_MESSAGES + worker.number <= rank
                self.core.hold(worker.worker_id, worker.foresee(now, with_now=with_now))

    def _tell_of_all_steps(self) -> None:
        for worker in self._skipping:
            if worker.due_at <= self.agenda.now:
                self._tell_of_steps(worker, LATER)

    def _tell_of_steps(self, worker: LockstepWorker, rank: int) -> None:
        """The core hears of those that it would know of, before what has `rank`."""
        now = self.agenda.now
        worker.settle(now)
        self.core.hold(worker.worker_id, -worker.num_foreseen)
        times = worker.take_untold(now, with_now=STEP_MESSAGES + worker.number <= rank)
        if times:
            late_s = _on_the_way_s(worker)
            for at_s, commands in self.core.count_steps(
                worker.worker_id, worker.incarnation, STEP_TOKENS, times
            ):
                for command in commands:
                    self._do(command, at_s, late_s)

    def _pause_skipping(self) -> None:
        """A worker gets nothing new for a moment: whatever the core hears of first after that may send a request on."""
        self._skips_again_at = self.agenda.now + FULL_PAUSE_S + TICK_S
        for worker in self._skipping:
            self._tell_of_steps(worker, LATER)
            worker.skip_no_more()
            rank = STEP_MESSAGES + worker.number
            for at_s in worker.take_untold(inf, with_now=True):
                self.agenda.at(at_s, rank, self._hear_later, (worker, STEP_TOKENS, rank))
        self.agenda.at(self._skips_again_at, LATER, self._skip_again, self._skips_again_at)

    def _skip_again(self, at_s: float) -> None:
        if at_s == self._skips_again_at:
            for worker in self._skipping:
                worker.may_skip = True

    def _hear(self, worker: SimulatedWorker, message: Message) -> None:
        self._handle(events.FromWorker(worker.worker_id, worker.incarnation, message), _on_the_way_s(worker))

    def _handle(self, event: events.Event, on_the_way_s: float = 0.0) -> None:
        """The core hears of `event`. What it gives out is with clients after `on_the_way_s`."""
        now = self.agenda.now
        for command in self.core.handle(event, now):
            self._do(command, now, on_the_way_s)

    def _do(self, command: events.Command, now: float, on_the_way_s: float) -> None:
        match command:
            case events.Send(worker_id, _, message):
                self._pass_on(self._by_id[worker_id], message)
            case events.Emit(request_id, output):
                self._emit(request_id, output, now + on_the_way_s)
            case events.EmitRun():
                self._emit_run(command)
            case events.Refuse(request_id, error):
                outcome = self.outcomes[int(request_id)]
                outcome.status = error.status
                self._end(outcome, Ending.REJECTED, error, now)
            case events.Note(text, is_fault) if is_fault:
                self._warnings.append(text)
            case events.EndProcess(worker_id):
                raise InvariantViolation(f"{worker_id} counts as lost in a simulation, where none can be")

    def _pass_on(self, worker: SimulatedWorker, message: Message) -> None:
        # Members and links are known from the start, so what tells of them changes nothing.
        if isinstance(message, Denied):
            raise ConfigError(f"the deployment is none that serves: {message.reason}")
        if not isinstance(message, Welcome | Peers):
            when = self.agenda.now + worker.pool.times.overheads.control_s
            self.agenda.at(when, LATER, worker.from_coordinator, message)


class _Shares:
    """The mean and the largest of some shares."""

    __slots__ = ("_num", "_sum", "most")

    def __init__(self) -> None:
        self._num, self._sum, self.most = 0, 0.0, 0.0

    def add(self, share: float) -> None:
        """One more."""
        self._num += 1
        self._sum += share
        self.most = max(self.most, share)

    @property
    def mean(self) -> float:
        """0 of none."""
        return self._sum / self._num if self._num else 0.0


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
    timeless = sum(shape.at_s is None for shape in requests)
    if timeless and num_clients is None:
        raise ConfigError(
            f"{timeless} of {len(requests)} requests have no time to come at; give them times (--request-rate, or data "
            "with timestamps), or a number of clients (--num-clients)"
        )


def _on_the_way_s(worker: SimulatedWorker) -> float:
    """From the coordinator's hearing of a token of this worker to its being with the client."""
    overheads = worker.pool.times.overheads
    return max(0.0, overheads.output_s - overheads.control_s)


def _workers(
    deployment: Deployment, prefixes: Prefixes, driver: Driver, *, is_step_by_step: bool
) -> list[SimulatedWorker]:
    """All workers, those of decode first: each that joins is told to all of the other role, and prefill's are fewer."""
    machines = {pool.machine: Machine() for pool in deployment.pools if pool.machine is not None}
    chains = prefixes.chains()
    workers: list[SimulatedWorker] = []
    has_hybrids = any(pool.scheduler.hybrid for pool in deployment.pools)  # whose choices depend on the time
    for pool in sorted(deployment.pools, key=lambda pool: pool.role.value):
        machine = None if pool.machine is None else machines[pool.machine]
        in_lockstep = pool.role is Role.DECODE and not has_hybrids and not is_step_by_step
        kind = LockstepWorker if in_lockstep else SimulatedWorker
        for number in range(pool.num_workers):
            workers.append(
                kind(
                    len(workers),
                    f"{pool.role}-{number}",
                    pool,
                    deployment.layout,
                    chains,
                    driver.agenda,
                    driver.tell,
                    machine,
                )
            )
    peers = {worker.worker_id: worker for worker in workers}
    for worker in workers:
        worker.peers = peers
    return workers


def _offer(worker: SimulatedWorker, deployment: Deployment) -> Register:
    pool = worker.pool
    return Register(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        role=pool.role,
        pid=worker.number,
        endpoint=f"memory://{worker.worker_id}",
        fingerprint=FINGERPRINT,
        layout=deployment.layout,
        num_blocks=pool.num_blocks,
        max_model_len=deployment.max_model_len,
        max_num_seqs=pool.scheduler.max_num_seqs,
        itl_budget_s=pool.scheduler.itl_budget_ms / 1e3 if pool.scheduler.hybrid else None,
    )
