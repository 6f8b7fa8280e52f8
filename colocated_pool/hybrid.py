"""A prefill or decode worker that also runs whole jobs: its role's core, and a colocated core as its guest, over one
block pool and in one step.

On a hybrid decode worker the guest computes prompts, in the time that the decode step leaves, and they join the role's
batch. On a hybrid prefill worker the guest computes prompts and generates, and the role's prompts get the rest.

**Isolation** stays the first promise. A step with prompt tokens is so small that, as measured, it takes at most half of
`itl_budget_ms` wherever streams run or may join: one that joins waits for the step that runs, and for one more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import msgspec

from twinpool.colocated_pool.core import ColocatedCore, Host
from twinpool.colocated_pool.step_times import StepTimes
from twinpool.config import SchedulerConfig
from twinpool.decode_pool.core import DecodeCore
from twinpool.engine.batch import StepBatch
from twinpool.engine.prefix_chain import Chains
from twinpool.errors import InvariantViolation
from twinpool.layout import KVLayout
from twinpool.messages import Cancel, Generate, Prefill, Reserve, StepTokens, WorkerStats
from twinpool.metrics import WorkerMetric
from twinpool.prefill_pool.core import PrefillCore
from twinpool.step_pace import LEAST_CHUNK_TOKENS, prompt_limit_s
from twinpool.worker.core import (
    Command,
    Event,
    FromCoordinator,
    PlanAhead,
    SendCoordinator,
    StepDone,
    StepPlan,
    StepTimed,
    Tick,
)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of both parts as the step thread knows it, what each part knows of it, and how many sequences decode."""

    whole: StepPlan
    role: StepPlan | None
    guest: StepPlan | None
    num_sequences: int


class HybridCore(ABC):
    """The `RoleCore` that both kinds of hybrids share. `role` is the core of their role, `guest` runs whole jobs."""

    def __init__(self, role: PrefillCore | DecodeCore, guest: ColocatedCore, config: SchedulerConfig) -> None:
        self.role = role
        self.guest = guest
        self.pool = role.pool
        self.counters = role.counters
        self.times = StepTimes()
        self._limit_s = prompt_limit_s(config.itl_budget_ms / 1e3)
        self._patience_s = config.max_queue_age_s
        self._running: _Step | None = None

    # ── the role's interface ──────────────────────────────────────────────────────────────────────────────

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes one event; returns what to do about it, in order."""
        match event:
            case StepTimed(num_sequences, num_prompt_tokens, seconds):
                self.times.observe(num_sequences, num_prompt_tokens, seconds)
                return []
            case StepDone():
                return self._step_done(event, now)
            case FromCoordinator(Prefill(job) | Reserve(job)) if job.key in self.guest:
                self.counters.add(WorkerMetric.JUNK_MESSAGES)
                return []
            case FromCoordinator(Generate(job)) if job.key in self.role:
                self.counters.add(WorkerMetric.JUNK_MESSAGES)
                return []
            case FromCoordinator(Generate()):
                return self.guest.handle(event, now)
            case FromCoordinator(Cancel(key)) if key in self.guest:
                # What the guest lets go of may be what the role waits for.
                return [*self.guest.handle(event, now), *self.role.handle(Tick(), now)]
            case Tick():
                self.guest.send_back_stuck(now, self._patience_s)
                return [*self.guest.flush(), *self.role.handle(event, now)]
        return self.role.handle(event, now)

    def flush(self) -> list[Command]:
        """Takes the commands that planning gave rise to, in order."""
        return [*self.role.flush(), *self.guest.flush()]

    def minds_time(self, now: float) -> bool:  # noqa: ARG002  # which is asked in simulations alone
        """Yes, always: what is stuck goes back with time."""
        return True

    def next_step(self, now: float) -> StepPlan | None:
        """One token for every sequence, then prompt chunks within the budget."""
        if self._running is not None:
            raise InvariantViolation("a step was asked for while one runs")
        self._running = self._plan(now)
        return self._running.whole if self._running else None

    def plan_ahead(self) -> PlanAhead | None:
        """The next token of every sequence, where a step has no other part and no prompt waits."""
        step = self._running
        if step is None or self.guest.num_prompts or (step.role and step.guest):
            return None
        return self._plan_ahead(step)

    def stats(self) -> WorkerStats:
        """Blocks by state, queue lengths, counters and step times at this moment."""
        role, guest = self.role.stats(), self.guest.stats()
        return msgspec.structs.replace(
            role,
            waiting=role.waiting + guest.waiting,
            running=role.running + guest.running,
            waiting_tokens=role.waiting_tokens + guest.waiting_tokens,
            pace=self.times.pace,
        )

    def check(self) -> None:
        """Raises InvariantViolation if a block has no owner, or another count is wrong."""
        self.role.check(self.guest.tables)

    # ── the step ──────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _plan(self, now: float) -> _Step | None:
        """The next step, of both parts."""

    @abstractmethod
    def _plan_ahead(self, step: _Step) -> PlanAhead | None:
        """What comes after a step of one part, if that part knows."""

    def _step_done(self, done: StepDone, now: float) -> list[Command]:
        step = self._running
        if step is None or step.whole != done.plan:
            raise InvariantViolation("a step ended that was not begun")
        num_prompt_tokens = done.plan.batch.num_tokens - step.num_sequences
        self.times.observe(step.num_sequences, num_prompt_tokens, done.output.seconds)
        following = done.following
        self._running = None
        if following is not None:
            of_role, of_guest = following if step.role else None, following if step.guest else None
            self._running = _Step(following, of_role, of_guest, following.batch.num_tokens)
        commands: list[Command] = []
        if step.guest is not None:
            commands += self.guest.handle(StepDone(step.guest, done.output, following), now)
        if step.role is not None:
            commands += self.role.handle(StepDone(step.role, done.output, following), now)
        else:
            self.counters.add(WorkerMetric.STEPS)
            self.counters.add(WorkerMetric.STEP_SECONDS, done.output.seconds)
            commands += self.role.handle(Tick(), now)
        return _one_message_of_tokens(commands)


class HybridDecodeCore(HybridCore):
    """The `RoleCore` of a hybrid decode worker."""

    role: DecodeCore

    def __init__(
        self,
        num_blocks: int,
        layout: KVLayout,
        fingerprint: str,
        config: SchedulerConfig,
        incarnation: str,
        chains: Chains | None = None,
    ) -> None:
        role = DecodeCore(num_blocks, layout, fingerprint, config, incarnation, chains=chains)
        host = Host(
            role.pool, role.counters, lambda: 0 if role.awaits_room else role.num_free_slots, role.join
        )
        guest = ColocatedCore(num_blocks, layout, config, host, chains)
        role.host(guest)
        super().__init__(role, guest, config)

    def _plan(self, now: float) -> _Step | None:
        decoding = self.role.next_step(now)
        num_sequences = len(decoding.batch.slices) if decoding else 0
        prompts = None
        if self.guest.num_prompts:
            prompts = self.guest.next_step(now, self.times.prompt_tokens_within(self._limit_s, num_sequences))
        whole = _merged(decoding, prompts)
        return None if whole is None else _Step(whole, decoding, prompts, num_sequences)

    def _plan_ahead(self, step: _Step) -> PlanAhead | None:
        return self.role.plan_ahead() if step.role else None


class HybridPrefillCore(HybridCore):
    """The `RoleCore` of a hybrid prefill worker.

    Beside streams its prompts are computed in chunks within the budget, of `LEAST_CHUNK_TOKENS` at least: they get on
    in any case. The coordinator sends no stream where chunks would get so small. Of prompts to hand off and of those
    of whole jobs, the side whose oldest came first has the first claim.
    """

    role: PrefillCore

    def __init__(
        self,
        num_blocks: int,
        layout: KVLayout,
        fingerprint: str,
        config: SchedulerConfig,
        chains: Chains | None = None,
    ) -> None:
        role = PrefillCore(num_blocks, layout, fingerprint, config, chains)
        host = Host(role.pool, role.counters, lambda: 0 if role.awaits_room else config.max_num_seqs)
        super().__init__(role, ColocatedCore(num_blocks, layout, config, host, chains), config)

    def _plan(self, now: float) -> _Step | None:
        num_streams, left = self.guest.num_sequences, self.role.token_budget
        if num_streams:
            fitting = self.times.prompt_tokens_within(self._limit_s, num_streams)
            left = max(LEAST_CHUNK_TOKENS, fitting)
        prompts = None
        if is_first := self.role.oldest_prompt_at <= self.guest.oldest_prompt_at:
            prompts = self.role.next_step(now, left)
            left -= prompts.batch.num_tokens if prompts else 0
        whole_jobs = self.guest.next_step(now, num_streams + left)
        num_sequences = 0
        if whole_jobs is not None:
            num_sequences = sum(self.guest.generates(chunk.key) for chunk in whole_jobs.batch.slices)
            left -= whole_jobs.batch.num_tokens - num_sequences
        if not is_first:
            prompts = self.role.next_step(now, left)
        whole = _merged(whole_jobs, prompts)
        return None if whole is None else _Step(whole, prompts, whole_jobs, num_sequences)

    def _plan_ahead(self, step: _Step) -> PlanAhead | None:
        return self.guest.plan_ahead() if step.guest and not self.role.num_prompts else None


def _merged(first: StepPlan | None, second: StepPlan | None) -> StepPlan | None:
    if first is None or second is None:
        return first or second
    batch = StepBatch((*first.batch.slices, *second.batch.slices))
    return StepPlan(batch, (*first.pushes, *second.pushes))


def _one_message_of_tokens(commands: list[Command]) -> list[Command]:
    """`commands`, with all tokens in the last of the messages that carry some: one per step, after the reports."""
    carriers = [
        i
        for i, c in enumerate(commands)
        if isinstance(c, SendCoordinator) and isinstance(c.message, StepTokens)
    ]
    if len(carriers) < 2:
        return commands
    messages = [c.message for c in commands if isinstance(c, SendCoordinator)]
    tokens = tuple(t for message in messages if isinstance(message, StepTokens) for t in message.tokens)
    commands[carriers[-1]] = SendCoordinator(StepTokens(tokens))
    return [command for i, command in enumerate(commands) if i not in carriers[:-1]]
