"""A colocated worker's decisions: the schedulers of both pools over one block pool, in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twinpool.config import SchedulerConfig
from twinpool.decode_pool.lockstep import Lockstep, LockstepLoad, WalksInLockstep
from twinpool.decode_pool.scheduler import DecodeScheduler, why_never_fits
from twinpool.decode_pool.steps import StepsUnderWay
from twinpool.engine.batch import SequenceSlice, StepBatch, StepOutput
from twinpool.engine.block_pool import BlockPool, BlockTable
from twinpool.engine.look_back import LookBack
from twinpool.engine.prefix_chain import Chains, PrefixChain
from twinpool.errors import InvariantViolation
from twinpool.layout import KVLayout
from twinpool.messages import (
    Cancel,
    Dropped,
    DropReason,
    Generate,
    LockstepTokens,
    Message,
    StepTokens,
    Token,
    WorkerStats,
)
from twinpool.metrics import Counters, WorkerMetric
from twinpool.prefill_pool.scheduler import PrefillScheduler, Prompt
from twinpool.request import Job, RequestKey
from twinpool.worker.core import (
    Command,
    Event,
    FromCoordinator,
    PeerGone,
    PeerLinked,
    PlanAhead,
    SendCoordinator,
    StepDone,
    StepPlan,
    Tick,
    cannot_go_on,
)

TOKEN_BUDGET = 128
"""Tokens of one step unless configured: `bench/token_budget.py` measures the knee. Every chunk is a gap in all running
streams, so this is about the smallest budget whose prompt rate is within 15 % of the best one."""


@dataclass(frozen=True, slots=True)
class Host:
    """The role that a colocated core is a guest of, in a hybrid: whose pool and counters it uses.

    `num_free_slots` jobs may start beside what the host has. With `join` that role generates: it takes each
    computed prompt (job, its table, which is the host's then, its chain, the first token, what it looks back with).
    Without, the guest does.
    """

    pool: BlockPool
    counters: Counters
    num_free_slots: Callable[[], int]
    join: Callable[[Job, BlockTable, PrefixChain, int, LookBack | None], None] | None = None


class ColocatedCore(WalksInLockstep):
    """The `RoleCore` of a colocated worker, and the part of a hybrid that runs whole jobs.

    A step is one token for every running sequence, and prompt chunks in what that leaves of `token_budget`. A
    prompt starts with its growth headroom and a slot of the batch; when its last chunk is done, its table is
    handed to the decode scheduler as it is. When a running sequence needs a block and there is none, started
    prompts give theirs up first (they wait again, here), then the youngest sequences (dropped as
    "preempted"). `chains` names the prefixes of jobs; None: by their tokens.
    """

    def __init__(
        self,
        num_blocks: int,
        layout: KVLayout,
        config: SchedulerConfig,
        host: Host | None = None,
        chains: Chains | None = None,
    ) -> None:
        self._host = host
        self._token_budget = TOKEN_BUDGET if config.token_budget is None else config.token_budget
        self._max_num_seqs = config.max_num_seqs
        self.pool = host.pool if host else BlockPool(num_blocks, layout.block_size, config.prefix_cache)
        self.counters = host.counters if host else Counters()
        self._prefill = PrefillScheduler(self.pool, config, config.headroom_tokens, chains)
        self._decode = DecodeScheduler(self.pool)
        self._num_free_slots = 0
        self._steps = StepsUnderWay()
        self._cancelled: dict[RequestKey, None] = {}
        self._commands: list[Command] = []
        self._chunks: tuple[SequenceSlice, ...] = ()
        """Those of the step that runs, in lockstep."""

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._prefill or key in self._decode

    @property
    def num_prompts(self) -> int:
        """Prompts that are not computed yet."""
        return len(self._prefill)

    @property
    def oldest_prompt_at(self) -> float:
        """When the one came that has been here for longest; infinite if there is none."""
        return self._prefill.oldest_at

    @property
    def num_sequences(self) -> int:
        """Sequences that generate here."""
        return len(self._decode)

    def generates(self, key: RequestKey) -> bool:
        """Whether that is a sequence here, its prompt being computed."""
        return key in self._decode

    @property
    def num_slots(self) -> int:
        """Places in the batch that started prompts and sequences here have."""
        return self._prefill.num_started + len(self._decode)

    @property
    def tables(self) -> list[BlockTable]:
        """The tables of started prompts and of sequences."""
        tables = [sequence.table for sequence in self._decode]
        return tables + [prompt.table for prompt in self._prefill if prompt.table]

    # ── the role's interface ──────────────────────────────────────────────────────────────────────────────

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes one event; returns what to do about it, in order."""
        match event:
            case FromCoordinator(Generate(job)):
                self._accept(job, now)
            case FromCoordinator(Cancel(key)):
                self._cancel(key)
            case StepDone():
                self._step_done(event, now)
            case Tick() | PeerLinked() | PeerGone():
                pass  # no lease runs here, and no peer matters
            case FromCoordinator():
                self.counters.add(WorkerMetric.JUNK_MESSAGES)
            case _:
                raise InvariantViolation(f"a colocated worker got {type(event).__name__}")
        return self.flush()

    def flush(self) -> list[Command]:
        """Takes the commands that planning gave rise to, in order."""
        commands, self._commands = self._commands, []
        return commands

    def minds_time(self, now: float) -> bool:  # noqa: ARG002  # no lease runs here
        """Whether a step could begin after a `Tick`, which by itself changes nothing."""
        runs = self._steps.is_running or self._chunks or (self._lockstep and self._lockstep.is_running)
        return not runs and self.num_prompts + self.num_sequences > 0

    def next_step(self, now: float, most_tokens: int | None = None) -> StepPlan | None:
        """One token for every running sequence, then prompt chunks: of at most `most_tokens` in all (None: only the
        token budget counts)."""
        self._steps.require_none()
        slices, preempted, _ = self._decode.plan(self.make_room_for_sequences)
        self._preempted(preempted)
        budget = self._token_budget if most_tokens is None else min(most_tokens, self._token_budget)
        slices += self._plan_prompts(now, budget - len(slices))
        if not slices:
            return None
        return self._steps.begin(StepPlan(StepBatch(tuple(slices))))

    def plan_ahead(self) -> PlanAhead | None:
        """The next token of every sequence, while no prompt is to be computed: which chunk comes next is decided
        between steps."""
        if len(self._prefill):
            return None
        return self._steps.plan_ahead(lambda running: self._decode.plan_ahead(running, self._cancelled))

    def _preempted(self, keys: Sequence[RequestKey]) -> None:
        self.counters.add(WorkerMetric.PREEMPTIONS, len(keys))
        for key in keys:
            self._tell(Dropped(key, DropReason.PREEMPTED, "an older sequence needed the room"))

    def _plan_prompts(self, now: float, budget: int) -> list[SequenceSlice]:
        self._num_free_slots = self._max_num_seqs - self.num_slots
        if self._host is not None:
            self._num_free_slots = min(self._num_free_slots, self._host.num_free_slots())
        return self._prefill.plan(now, max(0, budget), self)

    # ── the same where all tokens are one ─────────────────────────────────────────────────────────────────

    def walk_in_lockstep(self, token_id: int) -> None:
        """As `DecodeCore.walk_in_lockstep`, of a core that is nobody's guest. Steps have chunks of prompts, too, which
        cost what they always do; while there are prompts, no step is quiet."""
        self._lockstep = Lockstep(self._decode, self.pool, self.counters, token_id)

    def begin_step(self, now: float) -> LockstepLoad | None:
        """`next_step`. Returns what the step has to do; None: there is nothing to run."""
        begun = self._in_lockstep().begin(self.make_room_for_sequences)
        self._preempted(begun.preempted)
        load = begun.load or LockstepLoad(0, 0)
        self._chunks = tuple(self._plan_prompts(now, self._token_budget - load.num_sequences))
        return load._replace(chunks=self._chunks) if load.num_sequences or self._chunks else None

    def plan_step_ahead(self) -> LockstepLoad | None:
        """`plan_ahead`: to be called after each event while a step runs. Returns what the step planned now has to do if
        none of those in the present one ends; None if nothing was planned anew."""
        if len(self._prefill):
            return None
        return self._in_lockstep().plan_ahead(self._cancelled)

    def end_step(self, seconds: float, now: float) -> tuple[list[Command], LockstepLoad | None]:
        """`handle` for the `StepDone` of a step that took `seconds`. Returns also what the step has to do that was
        planned ahead and runs since then; None if nothing runs."""
        lockstep = self._in_lockstep()
        self.counters.add(WorkerMetric.STEPS)
        self.counters.add(WorkerMetric.STEP_SECONDS, seconds)
        num_tokens = lockstep.num_sequences
        left = tuple(key for key in self._cancelled if key in lockstep)
        told = lockstep.end(left) if num_tokens else None
        chunks, self._chunks = self._chunks, ()
        output = StepOutput({c.key: lockstep.token_id for c in chunks if c.sampling is not None}, seconds)
        first_tokens: list[Token] = []
        for chunk in chunks:
            self.counters.add(WorkerMetric.PROMPT_TOKENS_COMPUTED, len(chunk.token_ids))
            if chunk.key not in self._cancelled:
                first_tokens += self._computed(chunk, output, now)
        self.pool.check_count()
        self.counters.add(WorkerMetric.OUTPUT_TOKENS, num_tokens - len(left) + len(first_tokens))
        if first_tokens:
            others = () if told is None else told.tokens
            told = LockstepTokens((*others, *first_tokens), left, lockstep.token_id)
        if told is not None:
            self._tell(told)
        self._release_cancelled()
        if len(self._prefill):
            lockstep.changed()  # which chunk comes next is decided now
        return self.flush(), lockstep.follow()

    def num_quiet_steps(self, most: int) -> int:
        """How many steps, from the one that runs on and at most `most`, can be skipped unless an event comes. To be
        asked after `plan_step_ahead`."""
        if self._cancelled or len(self._prefill):
            return 0
        return self._in_lockstep().num_quiet(most)

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────────

    def stats(self) -> WorkerStats:
        """Blocks by state, queue lengths and counters at this moment."""
        num_started = self._prefill.num_started
        return WorkerStats(
            free_blocks=self.pool.num_free,
            owned_blocks=self.pool.num_owned,
            cached_blocks=self.pool.num_cached,
            quarantined_blocks=self.pool.num_quarantined,
            leased_blocks=0,
            waiting=len(self._prefill) - num_started,
            running=num_started + len(self._decode),
            waiting_tokens=self._prefill.num_tokens_left,
            counters=self.counters.snapshot(),
        )

    def check(self) -> None:
        """Raises InvariantViolation if a block has no owner."""
        self.pool.check()
        held = {block for table in self.tables for block in table.block_ids}
        if len(held) != self.pool.num_owned:
            raise InvariantViolation(f"{self.pool.num_owned} blocks are owned, jobs have {len(held)}")

    # ── admission to the prefill scheduler ────────────────────────────────────────────────────────────────

    def may_start(self, prompt: Prompt, num_blocks: int) -> bool:  # noqa: ARG002  # the pool looks at the blocks
        """While there is a slot for it to decode in."""
        if not self._num_free_slots:
            return False
        self._num_free_slots -= 1
        return True

    def make_room(self, prompt: Prompt) -> bool:  # noqa: ARG002  # whichever it is
        """No: a prompt that does not fit waits for sequences to end."""
        return False

    # ── as a guest ────────────────────────────────────────────────────────────────────────────────────────

    def make_room_for_sequences(self) -> bool:
        """The started prompt that came last gives up its blocks, and waits again; False if there is none."""
        return self._prefill.unstart_youngest()

    def send_back_stuck(self, now: float, patience_s: float) -> None:
        """Sends back the prompts that have not got on for so long: there is no room, or no time, for them here."""
        stuck = [p.job.key for p in self._prefill if now - p.moved_at >= patience_s]
        for key in [key for key in stuck if key not in self._steps]:
            self.counters.add(WorkerMetric.NO_ROOM)
            self._release(key)
            detail = f"no room for it beside others for {patience_s:g} s"
            self._tell(Dropped(key, DropReason.NO_ROOM, detail))

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self, job: Job, now: float) -> None:
        if job.key in self:
            self.counters.add(WorkerMetric.JUNK_MESSAGES)
        elif reason := why_never_fits(job, self.pool):
            self.counters.add(WorkerMetric.REFUSED)
            self._tell(Dropped(job.key, DropReason.REFUSED, reason))
        else:
            self._prefill.add(job, now)

    def _cancel(self, key: RequestKey) -> None:
        self.counters.add(WorkerMetric.CANCELLED)
        in_chunks = any(chunk.key == key for chunk in self._chunks)
        if key in self._steps or in_chunks or (self._lockstep and key in self._lockstep):
            self._cancelled[key] = None
            self._steps.changed()
            if self._lockstep:
                self._lockstep.changed()
            return
        self._release(key)
        self._tell(Dropped(key, DropReason.CANCELLED))

    def _release(self, key: RequestKey) -> None:
        if key in self._decode:
            (self._lockstep or self._decode).leave(key)
        elif (prompt := self._prefill.withdraw(key)) and prompt.table:
            self.pool.release(prompt.table)

    def _step_done(self, done: StepDone, now: float) -> None:
        self._steps.end(done)
        if self._host is None:
            self.counters.add(WorkerMetric.STEPS)
            self.counters.add(WorkerMetric.STEP_SECONDS, done.output.seconds)
        tokens: list[Token] = []
        for chunk in done.plan.batch.slices:
            in_prefill = chunk.key in self._prefill
            if in_prefill:
                self.counters.add(WorkerMetric.PROMPT_TOKENS_COMPUTED, len(chunk.token_ids))
                self._count_hybrid(WorkerMetric.HYBRID_PROMPT_TOKENS, len(chunk.token_ids))
            if chunk.key in self._cancelled:
                continue
            if (farewell := cannot_go_on(chunk.key, done.output)) is not None:
                self.counters.add(WorkerMetric.REFUSED)
                self._release(chunk.key)
                self._tell(farewell)
            elif not in_prefill:
                tokens.append(self._decode.complete(chunk, done.output))
                self._count_hybrid(WorkerMetric.HYBRID_OUTPUT_TOKENS, 1)
            else:
                tokens += self._computed(chunk, done.output, now)
        self.pool.check_count()
        self.counters.add(WorkerMetric.OUTPUT_TOKENS, len(tokens))
        if tokens:
            self._tell(StepTokens(tuple(tokens)))
        self._release_cancelled()

    def _release_cancelled(self) -> None:
        for key in [key for key in self._cancelled if key not in self._steps]:
            del self._cancelled[key]
            self._release(key)
            self._tell(Dropped(key, DropReason.CANCELLED))

    def _computed(self, chunk: SequenceSlice, output: StepOutput, now: float) -> list[Token]:
        """Takes note of a chunk; returns the first token if it was the last one."""
        prompt = self._prefill.complete(chunk, output.scores.get(chunk.key, ()))
        prompt.moved_at = now
        if not prompt.is_done or prompt.table is None:
            return []
        job = prompt.job
        self.counters.add(WorkerMetric.PROMPT_TOKENS_CACHED, prompt.num_cached)
        for message in prompt.reports(now):
            self._tell(message)
        token = prompt.first_token(output)
        if token.finish:
            self.pool.release(prompt.table)
        else:
            join = self._host.join if self._host and self._host.join else self._decode.join
            join(job, self.pool.hand_over(prompt.table), prompt.chain, token.token_id, prompt.look_back)
        return [token]

    def _count_hybrid(self, metric: WorkerMetric, amount: int) -> None:
        if self._host is not None:
            self.counters.add(metric, amount)

    def _tell(self, message: Message) -> None:
        self._commands.append(SendCoordinator(message))
