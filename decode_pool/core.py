"""A decode worker's decisions: whom to grant room, what to decode, who gives way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from twinpool.config import SchedulerConfig
from twinpool.decode_pool.intake import Arrival, Intake
from twinpool.decode_pool.lockstep import Lockstep, LockstepLoad, WalksInLockstep
from twinpool.decode_pool.scheduler import DecodeScheduler
from twinpool.decode_pool.steps import StepsUnderWay
from twinpool.engine.batch import StepBatch
from twinpool.engine.block_pool import BlockPool, BlockTable
from twinpool.engine.look_back import LookBack
from twinpool.engine.prefix_chain import Chains, PrefixChain, chains_of
from twinpool.errors import InvariantViolation
from twinpool.kv_transfer.ledger import OwnershipLedger, Writer
from twinpool.layout import KVLayout
from twinpool.messages import (
    Cancel,
    Dropped,
    DropReason,
    Message,
    Renew,
    Reserve,
    RevokeAck,
    Seal,
    StepTokens,
    WorkerStats,
)
from twinpool.metrics import Counters, WorkerMetric
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
    ReceiveCancelled,
    SendCoordinator,
    StepDone,
    StepPlan,
    Tick,
    Verified,
    cannot_go_on,
)


class Guests(Protocol):
    """Prompts that are computed on this worker itself, over its pool: those of a hybrid (`colocated_pool`)."""

    @property
    def num_slots(self) -> int:
        """Places in the batch that are theirs already."""
        ...

    def make_room_for_sequences(self) -> bool:
        """Releases blocks for a running sequence; False if there is nothing to release."""
        ...


class DecodeCore(WalksInLockstep):
    """The `RoleCore` of a decode worker.

    It never computes prompt tokens: a sequence joins with the KV of its whole prompt and the first token, and
    each slice is one token. Should it ever compute prompt tokens, they are counted, and with `strict` the core
    raises InvariantViolation. A grant counts as a sequence, so that at most `max_num_seqs` ever want to run, guests
    among them, which give way before a sequence is preempted. `chains` names the prefixes of jobs; None: by their
    tokens.
    """

    def __init__(
        self,
        num_blocks: int,
        layout: KVLayout,
        fingerprint: str,
        config: SchedulerConfig,
        incarnation: str,
        strict: bool = False,
        chains: Chains | None = None,
    ) -> None:
        self._strict = strict
        self._guests: Guests | None = None
        self._max_num_seqs = config.max_num_seqs
        self.pool = BlockPool(num_blocks, layout.block_size, config.prefix_cache)
        self.counters = Counters()
        self._ledger = OwnershipLedger(incarnation, self.counters)
        self._commands: list[Command] = []
        chains = chains or chains_of(layout.block_size)
        self._intake = Intake(
            self.pool, self._ledger, layout, fingerprint, config, self.counters, self._commands, chains
        )
        self._scheduler = DecodeScheduler(self.pool)
        self._steps = StepsUnderWay()
        self._cancelled: dict[RequestKey, None] = {}
        self._has_untried_room = False
        """Whether sequences were preempted since reservations were last looked at: one that waits may fit now."""

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._scheduler or key in self._intake

    @property
    def num_sequences(self) -> int:
        """Sequences that generate."""
        return len(self._scheduler)

    @property
    def awaits_room(self) -> bool:
        """Whether a reservation waits: whoever starts now would take what it needs."""
        return any(True for _ in self._intake.waiting)

    @property
    def num_free_slots(self) -> int:
        """Places in the batch that nobody has or is promised."""
        num_guests = self._guests.num_slots if self._guests else 0
        return self._max_num_seqs - len(self._scheduler) - self._intake.num_granted - num_guests

    def host(self, guests: Guests) -> None:
        """`guests` use the pool, too, and `join` when their prompts are computed."""
        self._guests = guests

    def join(
        self,
        job: Job,
        table: BlockTable,
        chain: PrefixChain,
        first_token: int,
        look_back: LookBack | None,
    ) -> None:
        """A guest's prompt is computed: it generates from the next step on, and `table` is this core's."""
        self._scheduler.join(job, table, chain, first_token, look_back)
        self._changed()

    # ── the role's interface ──────────────────────────────────────────────────────────────────────────────

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes one event; returns what to do about it, in order."""
        match event:
            case FromCoordinator(Reserve() as message):
                self._reserve(message, now)
            case FromCoordinator(Cancel(key)):
                self._cancel(key, now)
            case FromPeer(worker_id, incarnation, message):
                self._from_peer(Writer(worker_id, incarnation), message, now)
            case StepDone():
                self._step_done(event)
            case Verified():
                self._join(self._intake.verified(event, now))
            case ReceiveCancelled(fence):
                self._intake.receive_cancelled(fence)
            case PeerLinked(worker_id, incarnation, transport):
                self._intake.link(Writer(worker_id, incarnation), transport)
            case LinkLost(worker_id, incarnation):
                self._intake.writer_lost(Writer(worker_id, incarnation), now)
            case PeerGone(worker_id, incarnation):
                self._intake.writer_gone(Writer(worker_id, incarnation), now)
            case Tick():
                self._intake.expire(now)
            case FromCoordinator():
                self.counters.add(WorkerMetric.JUNK_MESSAGES)
            case _:
                raise InvariantViolation(f"a decode worker got {type(event).__name__}")
        self._grant(now)
        return self.flush()

    def flush(self) -> list[Command]:
        """Takes the commands that planning gave rise to, in order."""
        commands = self._commands[:]
        self._commands.clear()
        return commands

    def minds_time(self, now: float) -> bool:
        """Whether a `Tick` at `now` could change anything, or a step begin after it."""
        runs = self._lockstep.is_running if self._lockstep else self._steps.is_running
        return (
            self._has_untried_room or (not runs and len(self._scheduler) > 0) or self._intake.minds_time(now)
        )

    def next_step(self, now: float) -> StepPlan | None:
        """One token for every running sequence that has, or can be given, a slot for it."""
        self._steps.require_none()
        slices, preempted, is_starved = self._scheduler.plan(
            self._guests.make_room_for_sequences if self._guests else None
        )
        self._preempted(preempted, now, is_starved=is_starved)
        if not slices:
            return None
        return self._steps.begin(StepPlan(StepBatch(tuple(slices))))

    def plan_ahead(self) -> PlanAhead | None:
        """The next token of every sequence, if each has a slot for it."""
        return self._steps.plan_ahead(lambda running: self._scheduler.plan_ahead(running, self._cancelled))

    # ── the same where all tokens are one ─────────────────────────────────────────────────────────────────

    def walk_in_lockstep(self, token_id: int) -> None:
        """Every token will be `token_id`, as in a simulation. From now on steps are begun, planned ahead and ended by
        the three methods below, which do what `next_step`, `plan_ahead` and `StepDone` do, at a cost that does not
        grow with the batch. They tell of tokens in `LockstepTokens`."""
        self._lockstep = Lockstep(self._scheduler, self.pool, self.counters, token_id)

    def begin_step(self, now: float) -> LockstepLoad | None:
        """`next_step`. Returns what the step has to do; None: there is nothing to run."""
        begun = self._in_lockstep().begin(self._guests.make_room_for_sequences if self._guests else None)
        self._preempted(begun.preempted, now, is_starved=begun.is_starved)
        return begun.load

    def plan_step_ahead(self) -> LockstepLoad | None:
        """`plan_ahead`: to be called after each event while a step runs. Returns what the step planned now has to do if
        none of those in the present one ends; None if nothing was planned anew."""
        return self._in_lockstep().plan_ahead(self._cancelled)

    def end_step(self, seconds: float, now: float) -> tuple[list[Command], LockstepLoad | None]:
        """`handle` for the `StepDone` of a step that took `seconds`. Returns also what the step has to do that was
        planned ahead and runs since then; None if nothing runs."""
        lockstep = self._in_lockstep()
        num_sequences = lockstep.num_sequences
        told = lockstep.end(self._cancelled)
        self._count_step(seconds, num_sequences)
        if told is not None:
            self._tell(told)
        if self._cancelled:
            self._release_cancelled()
        following = lockstep.follow()
        self._grant(now)
        return self.flush(), following

    def num_quiet_steps(self, most: int) -> int:
        """How many steps, from the one that runs on and at most `most`, can be skipped unless an event comes: they only
        change counts. To be asked after `plan_step_ahead`."""
        if self._cancelled or self._has_untried_room:
            return 0
        return self._in_lockstep().num_quiet(most)

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────────

    def stats(self) -> WorkerStats:
        """Blocks by state, queue lengths and counters at this moment. Blocks lent to writers are leased."""
        waiting = [len(arrival.job.token_ids) for arrival in self._intake.waiting]
        return WorkerStats(
            free_blocks=self.pool.num_free,
            owned_blocks=self.pool.num_owned,
            cached_blocks=self.pool.num_cached,
            quarantined_blocks=self.pool.num_quarantined,
            leased_blocks=self._ledger.num_reserved,
            waiting=len(waiting),
            running=len(self._scheduler) + self._intake.num_granted,
            waiting_tokens=sum(waiting),
            counters=self.counters.snapshot(),
        )

    def check(self, others: Iterable[BlockTable] = ()) -> None:
        """Raises InvariantViolation if a block has no owner, or pool and ledger disagree about one. `others` are the
        guests' tables."""
        self.pool.check()
        self._ledger.check()
        tables = [*others, *(sequence.table for sequence in self._scheduler)]
        tables += [arrival.table for arrival in self._intake.granted if arrival.table]
        held = {block for table in tables for block in table.block_ids}
        if len(held) != self.pool.num_owned:
            raise InvariantViolation(f"{self.pool.num_owned} blocks are owned, jobs have {len(held)}")
        in_pool, in_ledger = self.pool.num_quarantined, self._ledger.num_quarantined
        if in_pool != in_ledger:
            raise InvariantViolation(f"{in_pool} blocks are in quarantine, in the ledger {in_ledger}")
        if self._ledger.num_reserved != sum(len(arrival.written_blocks) for arrival in self._intake.granted):
            raise InvariantViolation("the ledger lends other blocks than the grants here")

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────

    def _reserve(self, message: Reserve, now: float) -> None:
        key = message.job.key
        if key in self._intake or key in self._scheduler:
            self.counters.add(WorkerMetric.JUNK_MESSAGES)
            return
        self._intake.reserve(message, now)

    def _cancel(self, key: RequestKey, now: float) -> None:
        self.counters.add(WorkerMetric.CANCELLED)
        if key in self._steps or (self._lockstep and key in self._lockstep):
            self._cancelled[key] = None
            self._changed()
            return
        if key in self._intake:
            self._intake.drop(key, DropReason.CANCELLED, "", now)
            return
        if key in self._scheduler:
            self._leave(key)
        self._tell(Dropped(key, DropReason.CANCELLED))

    def _from_peer(self, writer: Writer, message: Message, now: float) -> None:
        match message:
            case Renew(fences):
                self._intake.renew(writer, fences, now)
            case Seal(manifest):
                self._join(self._intake.seal(writer, manifest, now))
            case RevokeAck(_, fence):
                self._intake.writer_acknowledged(fence, writer)
            case _:
                self.counters.add(WorkerMetric.JUNK_MESSAGES)

    def _grant(self, now: float) -> None:
        if self._intake.waiting:
            self._intake.grant(self.num_free_slots, now)
        self._has_untried_room = False

    def _join(self, arrival: Arrival | None) -> None:
        if arrival and arrival.table and arrival.manifest:
            self._scheduler.join(arrival.job, arrival.table, arrival.chain, arrival.manifest.first_token)
            self._changed()

    def _step_done(self, done: StepDone) -> None:
        slices = done.plan.batch.slices
        self._steps.end(done)
        prompt_tokens = 0
        num_failed = 0
        tokens = []
        for chunk in slices:
            if len(chunk.token_ids) > 1 or chunk.start < self._scheduler.num_prompt_tokens(chunk.key):
                prompt_tokens += len(chunk.token_ids)
            if chunk.key in self._cancelled:
                continue
            if (farewell := cannot_go_on(chunk.key, done.output)) is not None:
                num_failed += 1
                self._leave(chunk.key)
                self._tell(farewell)
            else:
                tokens.append(self._scheduler.complete(chunk, done.output))
        self._count_step(done.output.seconds, len(slices) - num_failed)
        self.counters.add(WorkerMetric.REFUSED, num_failed)
        self.counters.add(WorkerMetric.DECODE_POOL_PROMPT_TOKENS, prompt_tokens)
        if prompt_tokens and self._strict:
            raise InvariantViolation(f"--strict: this decode worker computed {prompt_tokens} prompt tokens")
        if tokens:
            self._tell(StepTokens(tuple(tokens)))
        self._release_cancelled()

    def _count_step(self, seconds: float, num_tokens: int) -> None:
        self.counters.add(WorkerMetric.STEPS)
        self.counters.add(WorkerMetric.STEP_SECONDS, seconds)
        self.counters.add(WorkerMetric.OUTPUT_TOKENS, num_tokens)
        self.pool.check_count()

    def _preempted(self, keys: Sequence[RequestKey], now: float, *, is_starved: bool) -> None:
        """The scheduler has let these go for older sequences, or the oldest is starved."""
        self._has_untried_room |= len(keys) > 0
        self.counters.add(WorkerMetric.PREEMPTIONS, len(keys))
        for key in keys:
            self._tell(Dropped(key, DropReason.PREEMPTED, "an older sequence needed the room"))
        if is_starved and not self.pool.num_quarantined:
            self._intake.preempt_youngest(now)

    def _release_cancelled(self) -> None:
        for key in [key for key in self._cancelled if key not in self._steps]:
            del self._cancelled[key]
            self._leave(key)
            self._tell(Dropped(key, DropReason.CANCELLED))

    def _changed(self) -> None:
        """A sequence has come or is to go: the plan ahead is to be made again."""
        self._steps.changed()
        if self._lockstep:
            self._lockstep.changed()

    def _leave(self, key: RequestKey) -> None:
        if self._lockstep:
            self._lockstep.leave(key)
        else:
            self._scheduler.leave(key)

    def _tell(self, message: Message) -> None:
        self._commands.append(SendCoordinator(message))
