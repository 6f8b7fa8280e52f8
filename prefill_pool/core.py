"""A prefill worker's decisions: what to compute, what to push where, when blocks come back."""

from __future__ import annotations

from collections.abc import Iterable

from twinpool.config import SchedulerConfig
from twinpool.engine.batch import StepBatch, StepOutput
from twinpool.engine.block_pool import BlockPool, BlockTable
from twinpool.engine.prefix_chain import Chains
from twinpool.errors import InvariantViolation
from twinpool.layout import KVLayout
from twinpool.messages import (
    Cancel,
    Dropped,
    DropReason,
    Message,
    Prefill,
    PushTo,
    StepTokens,
    Token,
    WorkerStats,
)
from twinpool.metrics import Counters, WorkerMetric
from twinpool.prefill_pool.handoff import Handoff
from twinpool.prefill_pool.outbox import Outbox
from twinpool.prefill_pool.scheduler import PrefillScheduler, Prompt
from twinpool.request import Job, RequestKey
from twinpool.worker.core import (
    Command,
    Event,
    FromCoordinator,
    FromPeer,
    LinkLost,
    PeerGone,
    PeerLinked,
    PlanAhead,
    PushFailed,
    PushFinished,
    PushStopped,
    SendCoordinator,
    StepDone,
    StepPlan,
    Tick,
    cannot_go_on,
)

TOKEN_BUDGET = 512
"""Prompt tokens of one step unless configured. Larger chunks compute hardly faster; the first token of a short prompt
that arrives meanwhile waits for one."""


class PrefillCore:
    """The `RoleCore` of a prefill worker.

    A grant is renewed `RENEWALS_PER_LEASE` times per `transfer_timeout_s` from its arrival until the Seal, so
    that decode's lease runs out only if this worker is dead or has lost the job, however long the prompt
    queues. A Seal that is not answered for as long is sent again, since a message can be lost.

    Prompts without a grant hold at most `max_parked_blocks` blocks together (one alone may hold more). A
    granted prompt always gets its blocks in the end: parked ones give theirs up for it, the youngest first,
    and are dropped as "preempted". So a grant never waits for a prompt that waits for a grant. `chains` names the
    prefixes of jobs; None: by their tokens.
    """

    def __init__(
        self,
        num_blocks: int,
        layout: KVLayout,
        fingerprint: str,
        config: SchedulerConfig,
        chains: Chains | None = None,
    ) -> None:
        self.token_budget = TOKEN_BUDGET if config.token_budget is None else config.token_budget
        self._max_parked = num_blocks // 2 if config.max_parked_blocks is None else config.max_parked_blocks
        self.pool = BlockPool(num_blocks, layout.block_size, config.prefix_cache)
        self.counters = Counters()
        self._scheduler = PrefillScheduler(self.pool, config, chains=chains)
        self._commands: list[Command] = []
        self._outbox = Outbox(
            self.pool, self._scheduler, layout, fingerprint, config, self.counters, self._commands
        )
        self._num_ungranted_blocks = 0
        self.awaits_room = False
        """Whether a granted prompt found no room in the last plan: whoever starts now would take what it needs."""

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._outbox

    @property
    def num_prompts(self) -> int:
        """Prompts that are not computed yet."""
        return len(self._scheduler)

    @property
    def oldest_prompt_at(self) -> float:
        """When the one came that has been here for longest; infinite if there is none."""
        return self._scheduler.oldest_at

    # ── the role's interface ──────────────────────────────────────────────────────────────────────────────

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes one event; returns what to do about it, in order."""
        match event:
            case FromCoordinator(message):
                self._from_coordinator(message, now)
            case FromPeer(worker_id, incarnation, message):
                self._outbox.from_peer((worker_id, incarnation), message)
            case StepDone():
                self._step_done(event, now)
            case PushFinished():
                self._outbox.push_finished(event)
            case PushFailed(fence, reason):
                self._outbox.push_failed(fence, reason)
            case PushStopped(fence):
                self._outbox.push_stopped(fence)
            case PeerLinked(worker_id, incarnation, _):
                self._outbox.link((worker_id, incarnation))
            case LinkLost(worker_id, incarnation):
                self._outbox.link_lost((worker_id, incarnation))
            case PeerGone(worker_id, incarnation):
                self._outbox.peer_gone((worker_id, incarnation))
            case Tick():
                self._outbox.renew(now)
            case _:
                raise InvariantViolation(f"a prefill worker got {type(event).__name__}")
        return self.flush()

    def flush(self) -> list[Command]:
        """Takes the commands that planning gave rise to, in order."""
        commands = self._commands[:]
        self._commands.clear()
        return commands

    def minds_time(self, now: float) -> bool:
        """Whether a `Tick` at `now` could change anything, or a step begin after it."""
        return (not self._outbox.in_step and len(self._scheduler) > 0) or self._outbox.minds_time(now)

    def next_step(self, now: float, most_tokens: int | None = None) -> StepPlan | None:
        """The next chunks, and the blocks that they complete for those that are granted. Of at most `most_tokens`
        (None: only the token budget counts)."""
        outbox = self._outbox
        if outbox.in_step:
            raise InvariantViolation("a step was asked for while one runs")
        if not self._scheduler:
            self.awaits_room = False
            return None
        self._num_ungranted_blocks = sum(
            len(job.prompt.table) for job in outbox if job.prompt.table and not job.grant
        )
        budget = self.token_budget if most_tokens is None else min(most_tokens, self.token_budget)
        self.awaits_room = False
        slices = self._scheduler.plan(now, budget, self)
        if not slices:
            return None
        outbox.in_step = frozenset(chunk.key for chunk in slices)
        pushes = [outbox[chunk.key].take_push(chunk.end, self.pool.block_size) for chunk in slices]
        return StepPlan(StepBatch(tuple(slices)), tuple(push for push in pushes if push))

    def plan_ahead(self) -> PlanAhead | None:
        """None: a step takes so long that nothing is gained, and what comes next depends on who comes meanwhile."""
        return None

    def stats(self) -> WorkerStats:
        """Blocks by state, queue lengths and counters now. Blocks of computed prompts are leased."""
        handed = [job.prompt.table for job in self._outbox if job.prompt.is_done]
        num_started = self._scheduler.num_started
        return WorkerStats(
            free_blocks=self.pool.num_free,
            owned_blocks=self.pool.num_owned,
            cached_blocks=self.pool.num_cached,
            quarantined_blocks=self.pool.num_quarantined,
            leased_blocks=sum(len(table) for table in handed if table),
            waiting=len(self._scheduler) - num_started,
            running=num_started + len(handed),
            waiting_tokens=self._scheduler.num_tokens_left,
            counters=self.counters.snapshot(),
        )

    def check(self, others: Iterable[BlockTable] = ()) -> None:
        """Raises InvariantViolation if a block has no owner, or a queued prompt or a fence no job. `others` are tables
        that a hybrid has over the same pool."""
        self.pool.check()
        tables = [*others, *(job.prompt.table for job in self._outbox if job.prompt.table)]
        held = {block for table in tables for block in table.block_ids}
        if len(held) != self.pool.num_owned:
            raise InvariantViolation(f"{self.pool.num_owned} blocks are owned, jobs have {len(held)}")
        num_granted = sum(1 for job in self._outbox if job.grant)
        are_here = all(prompt.key in self._outbox for prompt in self._scheduler)
        if num_granted != self._outbox.num_granted or not are_here:
            raise InvariantViolation("fences or queued prompts do not belong to the jobs here")

    # ── admission to the scheduler ────────────────────────────────────────────────────────────────────────

    def may_start(self, prompt: Prompt, num_blocks: int) -> bool:
        """A granted prompt always, and one that is never handed over; another while the blocks of ungranted ones stay
        within the bound."""
        if self._outbox[prompt.key].grant or prompt.job.ends_with_first_token:
            return True
        held = self._num_ungranted_blocks
        if held and held + num_blocks > self._max_parked:
            return False
        self._num_ungranted_blocks += num_blocks
        return True

    def make_room(self, prompt: Prompt) -> bool:
        """For a granted prompt, the youngest parked one gives up its blocks."""
        if not self._outbox[prompt.key].grant:
            return False
        parked = [job for job in self._outbox if job.is_parked and not job.ending]
        if not parked:
            self.awaits_room = True
            return False
        self.counters.add(WorkerMetric.PREEMPTIONS)
        youngest = max(parked, key=lambda job: job.prompt.arrived_at)
        detail = "parked, and a granted prompt needed the room"
        self._outbox.end(youngest, Dropped(youngest.key, DropReason.PREEMPTED, detail))
        return True

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────

    def _from_coordinator(self, message: Message, now: float) -> None:
        match message:
            case Prefill(job, _):
                self._accept(job, now)
            case PushTo():
                self._outbox.grant(message)
            case Cancel(key):
                self._cancel(key)
            case _:
                self.counters.add(WorkerMetric.JUNK_MESSAGES)

    def _accept(self, job: Job, now: float) -> None:
        if job.key in self._outbox:
            self.counters.add(WorkerMetric.JUNK_MESSAGES)
            return
        needed = self.pool.blocks_for(len(job.token_ids))
        if needed > self.pool.num_blocks:
            self.counters.add(WorkerMetric.REFUSED)
            detail = f"the prompt needs {needed} KV blocks, the pool has {self.pool.num_blocks}"
            self._tell(Dropped(job.key, DropReason.REFUSED, detail))
            return
        self._outbox.add(self._scheduler.add(job, now))

    def _cancel(self, key: RequestKey) -> None:
        self.counters.add(WorkerMetric.CANCELLED)
        dropped = Dropped(key, DropReason.CANCELLED)
        if key in self._outbox:
            self._outbox.end(self._outbox[key], dropped)
        else:
            self._tell(dropped)

    # ── the step ──────────────────────────────────────────────────────────────────────────────────────────

    def _step_done(self, done: StepDone, now: float) -> None:
        self._outbox.in_step = frozenset()
        self.counters.add(WorkerMetric.STEPS)
        self.counters.add(WorkerMetric.STEP_SECONDS, done.output.seconds)
        self.counters.add(WorkerMetric.PROMPT_TOKENS_COMPUTED, done.plan.batch.num_tokens)
        jobs = [self._outbox[chunk.key] for chunk in done.plan.batch.slices]
        tokens: list[Token] = []
        for job, chunk in zip(jobs, done.plan.batch.slices, strict=True):
            if job.ending:
                continue
            if (farewell := cannot_go_on(chunk.key, done.output)) is not None:
                self.counters.add(WorkerMetric.REFUSED)
                self._scheduler.withdraw(job.key)
                job.ending, job.farewell = True, farewell
                continue
            self._scheduler.complete(chunk, done.output.scores.get(chunk.key, ()))
            if chunk.sampling:
                tokens.append(self._first_token(job, done.output, now))
        if tokens:
            self._tell(StepTokens(tuple(tokens)))
        for job in jobs:
            self._outbox.advance(job)
        self.pool.check_count()

    def _first_token(self, job: Handoff, output: StepOutput, now: float) -> Token:
        self.counters.add(WorkerMetric.OUTPUT_TOKENS)
        self.counters.add(WorkerMetric.PROMPT_TOKENS_CACHED, job.prompt.num_cached)
        for message in job.prompt.reports(now):
            self._tell(message)
        token = job.prompt.first_token(output)
        job.prompt.look_back = None  # nothing is sampled here any more, and a matcher may have megabytes
        job.first_token = token.token_id
        job.ending = token.finish is not None
        return token

    def _tell(self, message: Message) -> None:
        self._commands.append(SendCoordinator(message))
