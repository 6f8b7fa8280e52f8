"""A prefill worker's decisions: what to compute, what to push where, when blocks come back."""

from __future__ import annotations

from collections.abc import Iterable

from twinpool.config import SchedulerConfig
from twinpool.engine.batch import StepBatch, StepOutput
from twinpool.engine.block_pool import BlockPool, BlockTable, Chains
from twinpool.errors import InvariantViolation
from twinpool.layout import KVLayout
from twinpool.messages import (
    Cancel,
    Dropped,
    DropReason,
    Message,
    Prefill,
    PushTo,
    Revoke,
    RevokeAck,
    Seal,
    SealAck,
    StepTokens,
    Token,
    WorkerStats,
)
from twinpool.metrics import Counters, WorkerMetric
from twinpool.prefill_pool.handoff import (
    ACTIVE,
    RENEWALS_PER_LEASE,
    Handoff,
    HandoffState,
    Peer,
    RevokedFences,
    renewals,
)
from twinpool.prefill_pool.scheduler import PrefillScheduler, Prompt
from twinpool.request import Job, RequestKey
from twinpool.worker.core import (
    Command,
    Event,
    FinishPush,
    FromCoordinator,
    FromPeer,
    LinkLost,
    PeerGone,
    PeerLinked,
    PlanAhead,
    Push,
    PushFailed,
    PushFinished,
    PushStopped,
    SendCoordinator,
    SendPeer,
    StepDone,
    StepPlan,
    StopPush,
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
        self._layout = layout
        self._fingerprint = fingerprint
        self.token_budget = TOKEN_BUDGET if config.token_budget is None else config.token_budget
        self._max_parked = num_blocks // 2 if config.max_parked_blocks is None else config.max_parked_blocks
        self._renew_every_s = config.transfer_timeout_s / RENEWALS_PER_LEASE
        self._renewed_at = 0.0
        self.pool = BlockPool(num_blocks, layout.block_size, config.prefix_cache)
        self.counters = Counters()
        self._scheduler = PrefillScheduler(self.pool, config, chains=chains)
        self._jobs: dict[RequestKey, Handoff] = {}
        self._by_fence: dict[int, Handoff] = {}
        self._running: frozenset[RequestKey] = frozenset()
        self._num_ungranted_blocks = 0
        self.awaits_room = False
        """Whether a granted prompt found no room in the last plan: whoever starts now would take what it needs."""
        self._links: set[Peer] = set()
        self._revoked = RevokedFences()
        self._commands: list[Command] = []

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._jobs

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
                self._from_peer((worker_id, incarnation), message)
            case StepDone():
                self._step_done(event, now)
            case PushFinished():
                self._push_finished(event)
            case PushFailed(fence, reason):
                self._push_failed(fence, reason)
            case PushStopped(fence):
                self._push_stopped(fence)
            case PeerLinked(worker_id, incarnation, _):
                self._links.add((worker_id, incarnation))
            case LinkLost(worker_id, incarnation):
                self._link_lost((worker_id, incarnation))
            case PeerGone(worker_id, incarnation):
                self._peer_gone((worker_id, incarnation))
            case Tick():
                self._renew(now)
            case _:
                raise InvariantViolation(f"a prefill worker got {type(event).__name__}")
        return self.flush()

    def flush(self) -> list[Command]:
        """Takes the commands that planning gave rise to, in order."""
        commands, self._commands = self._commands, []
        return commands

    def next_step(self, now: float, most_tokens: int | None = None) -> StepPlan | None:
        """The next chunks, and the blocks that they complete for those that are granted. Of at most `most_tokens`
        (None: only the token budget counts)."""
        if self._running:
            raise InvariantViolation("a step was asked for while one runs")
        self._num_ungranted_blocks = sum(
            len(job.prompt.table) for job in self._jobs.values() if job.prompt.table and not job.grant
        )
        budget = self.token_budget if most_tokens is None else min(most_tokens, self.token_budget)
        self.awaits_room = False
        slices = self._scheduler.plan(now, budget, self)
        if not slices:
            return None
        self._running = frozenset(chunk.key for chunk in slices)
        pushes = [self._jobs[chunk.key].take_push(chunk.end, self.pool.block_size) for chunk in slices]
        return StepPlan(StepBatch(tuple(slices)), tuple(push for push in pushes if push))

    def plan_ahead(self) -> PlanAhead | None:
        """None: a step takes so long that nothing is gained, and what comes next depends on who comes meanwhile."""
        return None

    def stats(self) -> WorkerStats:
        """Blocks by state, queue lengths and counters now. Blocks of computed prompts are leased."""
        handed = [job.prompt.table for job in self._jobs.values() if job.prompt.is_done]
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
        tables = [*others, *(job.prompt.table for job in self._jobs.values() if job.prompt.table)]
        held = {block for table in tables for block in table.block_ids}
        if len(held) != self.pool.num_owned:
            raise InvariantViolation(f"{self.pool.num_owned} blocks are owned, jobs have {len(held)}")
        granted = [job for job in self._jobs.values() if job.grant]
        queued = [prompt.job.key for prompt in self._scheduler]
        if len(granted) != len(self._by_fence) or not self._jobs.keys() >= set(queued):
            raise InvariantViolation("fences or queued prompts do not belong to the jobs here")

    # ── admission to the scheduler ────────────────────────────────────────────────────────────────────────

    def may_start(self, prompt: Prompt, num_blocks: int) -> bool:
        """A granted prompt always, and one that is never handed over; another while the blocks of ungranted ones stay
        within the bound."""
        if self._jobs[prompt.job.key].grant or prompt.job.ends_with_first_token:
            return True
        held = self._num_ungranted_blocks
        if held and held + num_blocks > self._max_parked:
            return False
        self._num_ungranted_blocks += num_blocks
        return True

    def make_room(self, prompt: Prompt) -> bool:
        """For a granted prompt, the youngest parked one gives up its blocks."""
        if not self._jobs[prompt.job.key].grant:
            return False
        parked = [job for job in self._jobs.values() if job.is_parked and not job.ending]
        if not parked:
            self.awaits_room = True
            return False
        self.counters.add(WorkerMetric.PREEMPTIONS)
        youngest = max(parked, key=lambda job: job.prompt.arrived_at)
        self._end(
            youngest,
            Dropped(youngest.key, DropReason.PREEMPTED, "parked, and a granted prompt needed the room"),
        )
        return True

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────

    def _from_coordinator(self, message: Message, now: float) -> None:
        match message:
            case Prefill(job, _):
                self._accept(job, now)
            case PushTo():
                self._grant(message)
            case Cancel(key):
                self._cancel(key)
            case _:
                self.counters.add(WorkerMetric.JUNK_MESSAGES)

    def _from_peer(self, peer: Peer, message: Message) -> None:
        match message:
            case SealAck(_, fence, error):
                self._seal_ack(peer, fence, error)
            case Revoke(key, fence):
                self._revoke(peer, key, fence)
            case _:
                self.counters.add(WorkerMetric.JUNK_MESSAGES)

    def _accept(self, job: Job, now: float) -> None:
        if job.key in self._jobs:
            self.counters.add(WorkerMetric.JUNK_MESSAGES)
            return
        needed = self.pool.blocks_for(len(job.token_ids))
        if needed > self.pool.num_blocks:
            self.counters.add(WorkerMetric.REFUSED)
            detail = f"the prompt needs {needed} KV blocks, the pool has {self.pool.num_blocks}"
            self._tell(Dropped(job.key, DropReason.REFUSED, detail))
            return
        self._jobs[job.key] = Handoff(self._scheduler.add(job, now))

    def _cancel(self, key: RequestKey) -> None:
        self.counters.add(WorkerMetric.CANCELLED)
        dropped = Dropped(key, DropReason.CANCELLED)
        if (job := self._jobs.get(key)) is None:
            self._tell(dropped)
        else:
            self._end(job, dropped)

    def _grant(self, grant: PushTo) -> None:
        job = self._jobs.get(grant.key)
        peer = (grant.decode_worker, grant.decode_incarnation)
        was_revoked = self._revoked.take(peer, grant.fence)
        if job is None or job.ending or job.state is not HandoffState.WAITING:
            self.counters.add(WorkerMetric.STALE_FENCES)
        elif was_revoked:
            self._end(job, Dropped(job.key, DropReason.REVOKED, "the grant was revoked before it came"))
        elif peer not in self._links:
            self._fail(job, f"no link to {peer[0]}/{peer[1]}")
        elif grant.fence in self._by_fence:
            self._fail(job, f"fence {grant.fence} is in use for another worker")
        elif len(grant.block_ids) != (needed := self.pool.blocks_for(job.prompt.num_tokens)):
            self._fail(job, f"{len(grant.block_ids)} blocks were granted, {needed} are needed")
        else:
            job.accept(grant)
            self._by_fence[grant.fence] = job
            self._advance(job)

    def _seal_ack(self, peer: Peer, fence: int, error: str) -> None:
        job = self._granted_by(peer, fence)
        if job is None or job.state is not HandoffState.SEALED:
            self.counters.add(WorkerMetric.STALE_FENCES)
        elif error:
            self._fail(job, error)
        else:
            job.move(HandoffState.CLOSED)
            self._end(job, None)

    def _revoke(self, peer: Peer, key: RequestKey, fence: int) -> None:
        if (job := self._granted_by(peer, fence)) is None:
            self._revoked.remember(peer, fence)
            self._commands.append(SendPeer(*peer, RevokeAck(key, fence)))
            return
        job.num_acks_owed += 1
        if not job.ending:
            self._end(job, Dropped(job.key, DropReason.REVOKED, f"{peer[0]} revoked its grant"))

    def _link_lost(self, peer: Peer) -> None:
        self._links.discard(peer)
        for job in [job for job in self._by_fence.values() if job.peer == peer and job.awaits_seal]:
            self._fail(job, f"the link to {peer[0]} is lost")

    def _peer_gone(self, peer: Peer) -> None:
        self._links.discard(peer)
        self._revoked.forget(peer)
        for job in [job for job in self._by_fence.values() if job.peer == peer and not job.ending]:
            self._fail(job, f"{peer[0]} is gone")

    # ── the step ──────────────────────────────────────────────────────────────────────────────────────────

    def _step_done(self, done: StepDone, now: float) -> None:
        self._running = frozenset()
        self.counters.add(WorkerMetric.STEPS)
        self.counters.add(WorkerMetric.STEP_SECONDS, done.output.seconds)
        self.counters.add(WorkerMetric.PROMPT_TOKENS_COMPUTED, done.plan.batch.num_tokens)
        jobs = [self._jobs[chunk.key] for chunk in done.plan.batch.slices]
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
            self._advance(job)
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

    # ── the hand-off ──────────────────────────────────────────────────────────────────────────────────────

    def _advance(self, job: Handoff) -> None:
        """Does what is due for the job between two events: pushes, the end of pushing, or letting go."""
        if job.ending:
            self._wind_down(job)
            return
        if job.key in self._running or job.state is not HandoffState.PUSHING or job.grant is None:
            return
        if push := job.take_push(job.prompt.num_done, self.pool.block_size):
            self._commands.append(Push(push))
        if job.first_token is None or job.prompt.table is None:
            return
        if sent := job.sent_blocks(job.prompt.table.block_ids):
            job.move(HandoffState.FINISHING)
            self._commands.append(FinishPush(job.grant.fence, job.grant.decode_worker, sent))
        else:
            self._seal(job, None)

    def _seal(self, job: Handoff, finished: PushFinished | None) -> None:
        job.move(HandoffState.SEALED)
        if job.grant:
            job.seal = Seal(job.manifest(self._fingerprint, self._layout, finished))
            self.counters.add(WorkerMetric.BLOCKS_SKIPPED, job.grant.num_cached_blocks)
            self._commands.append(SendPeer(job.grant.decode_worker, job.grant.decode_incarnation, job.seal))

    def _push_finished(self, event: PushFinished) -> None:
        job = self._by_fence.get(event.fence)
        if job is None or job.state is not HandoffState.FINISHING or job.ending:
            return
        self.counters.add(WorkerMetric.BLOCKS_SENT, len(event.digests))
        self.counters.add(WorkerMetric.BYTES_SENT, event.num_bytes)
        self.counters.add(WorkerMetric.TRANSFER_SECONDS, event.transfer_s)
        self._seal(job, event)

    def _push_failed(self, fence: int, reason: str) -> None:
        job = self._by_fence.get(fence)
        if job is None or job.state not in ACTIVE:
            return
        job.move(HandoffState.CLOSED)
        if job.ending:
            self._wind_down(job)
        else:
            self._fail(job, reason)

    def _push_stopped(self, fence: int) -> None:
        job = self._by_fence.get(fence)
        if job and job.state is HandoffState.STOPPING:
            job.move(HandoffState.CLOSED)
            self._wind_down(job)

    def _renew(self, now: float) -> None:
        if now - self._renewed_at < self._renew_every_s:
            return
        self._renewed_at = now
        self._commands += renewals(self._by_fence.values())

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────

    def _fail(self, job: Handoff, detail: str) -> None:
        self.counters.add(WorkerMetric.TRANSFER_FAILURES)
        self._end(job, Dropped(job.key, DropReason.TRANSFER, detail))

    def _end(self, job: Handoff, farewell: Dropped | None) -> None:
        """The job is over here. Its blocks and `farewell` go when nothing reads or writes them any more."""
        job.ending = True
        job.farewell = farewell
        self._scheduler.withdraw(job.key)
        self._wind_down(job)

    def _wind_down(self, job: Handoff) -> None:
        if job.key in self._running or job.state is HandoffState.STOPPING:
            return
        if job.state in ACTIVE and job.grant:
            # Never while a step runs that pushes under this fence: what comes after a stop would go astray.
            job.move(HandoffState.STOPPING)
            self._commands.append(StopPush(job.grant.fence, job.grant.decode_worker))
            return
        if job.prompt.table:
            self.pool.release(job.prompt.table)
        del self._jobs[job.key]
        if grant := job.grant:
            del self._by_fence[grant.fence]
            self._commands += job.acks_owed()
        if job.farewell:
            self._tell(job.farewell)

    def _granted_by(self, peer: Peer, fence: int) -> Handoff | None:
        job = self._by_fence.get(fence)
        return job if job and job.peer == peer else None

    def _tell(self, message: Message) -> None:
        self._commands.append(SendCoordinator(message))
