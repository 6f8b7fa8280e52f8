"""Decoding where every token is known: a step costs what happens in it, however many sequences it has.

A simulation samples nothing. All tokens are one id that ends no answer, so all that will happen to a sequence is known
when it joins: it needs a block at certain steps, fills one at others, and ends at one. `Lockstep` keeps those steps in
tables and touches no sequence in between. It decides nothing of its own: where room is short, the scheduler does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Sequence
from math import inf
from typing import NamedTuple

from twinpool.decode_pool.scheduler import DecodeScheduler, DecodeSequence
from twinpool.engine.batch import SequenceSlice
from twinpool.engine.block_pool import BlockPool, BlockTable
from twinpool.errors import InvariantViolation
from twinpool.messages import LockstepTokens, Token
from twinpool.metrics import Counters, WorkerMetric
from twinpool.request import FinishReason, Job, RequestKey


class LockstepLoad(NamedTuple):
    """How much a step has to do: its sequences, one new token each, and the KV positions that they read, the new ones
    among them; and the chunks of prompts beside them, on a worker that computes some."""

    num_sequences: int
    num_tokens: int
    chunks: tuple[SequenceSlice, ...] = ()


class LockstepBegun(NamedTuple):
    """A step that runs now, or None; who was preempted for it, and whether a sequence is starved (`DecodePlan`)."""

    load: LockstepLoad | None
    preempted: list[RequestKey]
    is_starved: bool


class Lockstep:
    """The sequences of a `DecodeScheduler`, all of which get `token_id` in every step.

    `begin`, `plan_ahead`, `end` and `follow` leave scheduler and pool as `plan`, `plan_ahead`, `complete` for each
    slice, and a plan ahead that begins would. While step c runs (from 0 on), a sequence has `shift` + c tokens; it gets
    those that it lacks when somebody looks at them, and its last one with step `ends_at`. It needs a block for step
    `needs_block_at`, and another each `block_size` steps later. Only in which order one step seals blocks of some
    sequences and releases those of others is not the same, and nobody can tell; nor when blocks are sealed that nobody
    else can have (`PrefixChain.grows_alone`), as long as a request has no other attempt here: that is when the sequence
    leaves.
    """

    def __init__(
        self, scheduler: DecodeScheduler, pool: BlockPool, counters: Counters, token_id: int
    ) -> None:
        self.token_id = token_id
        self._nothing_else = LockstepTokens((), (), token_id)
        self._scheduler = scheduler
        self._pool = pool
        self._counters = counters
        self._step = 0
        """The step that runs, or the next one."""
        self.is_running = False
        """Whether a step runs."""
        self._is_ahead_current = self._is_ahead_possible = False
        self._newcomers: list[DecodeSequence] = []
        """Those in the present step that were in none before."""
        self._joining: list[DecodeSequence] = []
        """Those that will be in the next one."""
        self._num_entered = 0
        """The number of the sequence that was last entered into the tables."""
        self._forget_tables()

    def _forget_tables(self) -> None:
        self._num = 0
        self._sum_of_shifts = 0
        self._is_short = False
        """Whether some need a block for the next step, and there was none for them."""
        self._growing: list[list[DecodeSequence]] = [[] for _ in range(self._pool.block_size)]
        """By the remainder of `needs_block_at`."""
        self._fills_block_at = defaultdict[int, list[DecodeSequence]](list)
        self._ends_at = defaultdict[int, list[DecodeSequence]](list)
        self._next_end = inf
        """The first step in `_ends_at`."""

    def __contains__(self, key: RequestKey) -> bool:
        """Whether the step that runs, or the one planned ahead, has this sequence."""
        sequence = self._scheduler.get(key) if self.is_running else None
        return sequence is not None and sequence.number <= self._num_entered

    @property
    def num_sequences(self) -> int:
        """Those of the step that runs."""
        return self._num if self.is_running else 0

    def changed(self) -> None:
        """A sequence has come or is to go: the plan ahead is to be made again."""
        self._is_ahead_current = False

    def begin(self, make_room: Callable[[], bool] | None = None) -> LockstepBegun:
        """A step begins, of all sequences that can be given a slot for their token."""
        if self.is_running:
            raise InvariantViolation("a step was asked for while one runs")
        self._enter_new(self._step)
        self._take_joining()
        preempted, is_starved = list[RequestKey](), False
        if not self._try_grow(self._step, ()):
            preempted, is_starved = self._plan_anew(make_room)
        self.is_running = self._num > 0 and not is_starved
        return LockstepBegun(self._load() if self.is_running else None, preempted, is_starved)

    def plan_ahead(self, leaving: Container[RequestKey]) -> LockstepLoad | None:
        """Makes room for the step after the one that runs, in which all are but those that end and those in `leaving`.
        If there is none for one of them, no step will follow at once. Returns what that step has to do if nobody ends
        or leaves; None if it was planned before."""
        if not self.is_running or self._is_ahead_current:
            return None
        self._is_ahead_current = True
        step = self._step + 1
        self._enter_new(step)
        self._is_ahead_possible = self._try_grow(step, leaving)
        num, sum_of_shifts = self._num, self._sum_of_shifts
        for sequence in self._joining:
            num += 1
            sum_of_shifts += sequence.shift
        return LockstepLoad(num, sum_of_shifts + num * step)

    def end(self, cancelled: Collection[RequestKey]) -> LockstepTokens | None:
        """The step has run; `cancelled` get nothing of it, and are to leave. Returns what is told of it, if anything
        is."""
        if not self.is_running:
            raise InvariantViolation("a step ended that was not begun")
        step = self._step
        if self._joining and cancelled:
            waiting = {sequence.key for sequence in self._joining}
            cancelled = [key for key in cancelled if key not in waiting]
        if step in self._fills_block_at:
            self._seal(step, cancelled)
        self._step += 1
        self.is_running = False
        if not (cancelled or self._newcomers or step == self._next_end):
            return self._nothing_else
        ended = [s for s in self._due(self._ends_at, step) if s.key not in cancelled]
        told = [s for s in self._newcomers if s.key not in cancelled and s not in ended]
        self._newcomers.clear()
        if step == self._next_end:
            self._next_end = min(self._ends_at, default=inf)
        left = tuple(cancelled)
        for key in left:
            if (sequence := self._scheduler.get(key)) is not None:
                sequence.shift -= 1
                self._sum_of_shifts -= 1
        is_told = self._num > len(left)
        tokens = []
        for sequence in sorted((*told, *ended), key=_number):
            finish = FinishReason.LENGTH if sequence in ended else None
            tokens.append(self._token(sequence, step, finish))
            if finish:
                self.leave(sequence.key)
        return LockstepTokens(tuple(tokens), left, self.token_id) if is_told else None

    def follow(self) -> LockstepLoad | None:
        """Begins the step that was planned ahead, if it was possible and has sequences."""
        self.is_running = self._is_ahead_current and self._is_ahead_possible
        self._is_ahead_current = self._is_ahead_possible = False
        if self.is_running:
            if self._joining:
                self._take_joining()
            self.is_running = self._num > 0
        return self._load() if self.is_running else None

    def num_quiet(self, most: int) -> int:
        """How many steps, from the one that runs on and at most `most`, will end and be followed with nothing to decide
        and nothing to tell but that each sequence has a token more, and which one that is of a newcomer."""
        is_planned = self.is_running and self._is_ahead_current and self._is_ahead_possible
        if not is_planned or self._is_short:
            return 0
        most = int(min(most, self._next_end - self._step))
        room, size = self._pool.num_available, self._pool.block_size
        if room < (self._num + len(self._joining)) * (most // size + 1):
            most = min(most, size)  # each needs at most one block then
            for number in range(most):
                step = self._step + number + 2
                room -= sum(s.needs_block_at == step for s in self._growing[step % size])
                if room < 0:
                    return number
        return most

    def skip(self, seconds: Sequence[float]) -> list[LockstepTokens]:
        """Steps that took so long each, all of them quiet, have ended, and the next one runs: as `end`, `follow` and
        `plan_ahead` for each. They are counted here. Returns what is told of the first ones, if there is more to tell
        than that each sequence has a token more."""
        num_steps, num_tokens, told = len(seconds), self._num, list[LockstepTokens]()
        if self._newcomers or self._joining:
            told.append(self._told_of_newcomers(self._step))
            self._take_joining()
            if self._newcomers and num_steps > 1:
                told.append(self._told_of_newcomers(self._step + 1))
        num_tokens += (num_steps - 1) * self._num
        self._counters.add(WorkerMetric.STEPS, num_steps)
        self._counters.add_each(WorkerMetric.STEP_SECONDS, seconds)
        self._counters.add(WorkerMetric.OUTPUT_TOKENS, num_tokens)
        growing, size = self._growing, self._pool.block_size
        first, self._step = self._step, self._step + num_steps
        tables: list[BlockTable] = []
        for step in range(first, self._step):
            if step in self._fills_block_at:
                self._grow(tables)
                tables.clear()
                self._seal(step, ())
            needed_at = step + 2
            for sequence in growing[needed_at % size]:
                if sequence.needs_block_at == needed_at <= sequence.ends_at:
                    sequence.needs_block_at += size
                    tables.append(sequence.table)
        self._grow(tables)
        self._pool.check_count()
        return told

    def _grow(self, tables: Sequence[BlockTable]) -> None:
        if tables and self._pool.grow_each(tables) < len(tables):
            raise InvariantViolation("a step that was to be skipped had no room")

    def leave(self, key: RequestKey) -> None:
        """Ends the sequence and releases its blocks."""
        sequence = self._scheduler.get(key)
        if sequence is not None and sequence.number <= self._num_entered:
            if sequence in self._joining:
                self._joining.remove(sequence)
            else:
                self._num -= 1
                self._sum_of_shifts -= sequence.shift
            if sequence in self._newcomers:
                self._newcomers.remove(sequence)
            self._growing[sequence.needs_block_at % self._pool.block_size].remove(sequence)
            self._seal_late(sequence)
        self._scheduler.leave(key)

    def _told_of_newcomers(self, step: int) -> LockstepTokens:
        """What is told of a quiet step in which they are. They are none any more."""
        tokens = tuple(self._token(sequence, step) for sequence in self._newcomers)
        self._newcomers.clear()
        return LockstepTokens(tokens, (), self.token_id)

    def _token(self, sequence: DecodeSequence, step: int, finish: FinishReason | None = None) -> Token:
        return Token(sequence.key, sequence.shift + step - sequence.job.num_prompt, self.token_id, finish)

    # ── what happens when ─────────────────────────────────────────────────────────────────────────────────

    def _load(self) -> LockstepLoad:
        return LockstepLoad(self._num, self._sum_of_shifts + self._num * self._step)

    def _enter_new(self, step: int) -> None:
        """Those that have joined since are in every step from `step` on."""
        if self._scheduler.num_joined == self._num_entered:
            return
        for sequence in self._scheduler.joined_after(self._num_entered):
            _require_plain(sequence.job, self.token_id)
            self._num_entered = sequence.number
            self._joining.append(sequence)
            self._enter(sequence, step)

    def _enter(self, sequence: DecodeSequence, step: int) -> None:
        size, length = self._pool.block_size, len(sequence.token_ids)
        sequence.shift = shift = length - step
        sequence.needs_block_at = needs_block_at = len(sequence.table) * size + 1 - shift
        self._growing[needs_block_at % size].append(sequence)
        if not sequence.chain.grows_alone:
            self._fills_block_at[-(-length // size) * size - shift].append(sequence)
        job = sequence.job
        sequence.ends_at = ends_at = job.num_prompt + job.sampling.max_tokens - 1 - shift
        self._ends_at[ends_at].append(sequence)
        self._next_end = min(self._next_end, ends_at)

    def _seal(self, step: int, cancelled: Container[RequestKey]) -> None:
        """Blocks that are full at the end of `step` become findable."""
        for sequence in self._due(self._fills_block_at, step):
            if sequence.key not in cancelled:
                self._catch_up(sequence, step + 1)
                self._scheduler.seal(sequence, sequence.shift + step)
                self._fills_block_at[step + self._pool.block_size].append(sequence)

    def _seal_late(self, sequence: DecodeSequence) -> None:
        """Blocks of a sequence that grows alone become findable: those that are full before the present step."""
        if sequence.chain.grows_alone:
            self._catch_up(sequence, self._step)
            self._scheduler.seal(sequence, len(sequence.token_ids) - 1)

    def _take_joining(self) -> None:
        self._num += len(self._joining)
        self._sum_of_shifts += sum(sequence.shift for sequence in self._joining)
        self._newcomers += self._joining
        self._joining = []

    def _try_grow(self, step: int, leaving: Container[RequestKey]) -> bool:
        """Gives a block to each sequence that needs one for `step`, in order; False if there is none for the next."""
        growing, size = self._growing, self._pool.block_size
        due = [
            s for s in growing[step % size] if s.needs_block_at == step <= s.ends_at and s.key not in leaving
        ]
        num_grown = self._pool.grow_each([sequence.table for sequence in due]) if due else 0
        for sequence in due[:num_grown]:
            sequence.needs_block_at += size
        self._is_short = num_grown < len(due)
        return not self._is_short

    def _plan_anew(self, make_room: Callable[[], bool] | None) -> tuple[list[RequestKey], bool]:
        """Room is short: the scheduler decides who gets it. What it plans has all that remain, or it has none."""
        for sequence in self._scheduler:
            self._catch_up(sequence, self._step)
            self._seal_late(sequence)
        _, preempted, is_starved = self._scheduler.plan(make_room)
        self._forget_tables()
        self._newcomers = [s for s in self._newcomers if s.key in self._scheduler]
        for sequence in self._scheduler:
            self._enter(sequence, self._step)
            self._num += 1
            self._sum_of_shifts += sequence.shift
        return preempted, is_starved

    def _due(self, at: dict[int, list[DecodeSequence]], step: int) -> list[DecodeSequence]:
        """Takes those sequences out of a table to which it happens now, in order, if they are here still."""
        due = at.pop(step, None)
        if due is None:
            return []
        here = [sequence for sequence in due if not sequence.has_left]
        return sorted(here, key=_number) if len(here) > 1 else here

    def _catch_up(self, sequence: DecodeSequence, step: int) -> None:
        """The sequence has all the tokens of the steps before `step`."""
        num_missing = sequence.shift + step - len(sequence.token_ids)
        sequence.token_ids.extend([self.token_id] * num_missing)


class WalksInLockstep:
    """A core whose sequences go in lockstep, once it has been told to (`walk_in_lockstep`)."""

    _lockstep: Lockstep | None = None

    def skip_steps(self, seconds: Sequence[float]) -> list[LockstepTokens]:
        """`end_step` and `plan_step_ahead` for steps that took so long each, all of them quiet. What is told of the
        first ones, which is returned, and of those that follow, without tokens, is the caller's to tell."""
        return self._in_lockstep().skip(seconds)

    def _in_lockstep(self) -> Lockstep:
        if self._lockstep is None:
            raise InvariantViolation("this worker does not walk in lockstep")
        return self._lockstep


def _number(sequence: DecodeSequence) -> int:
    return sequence.number


def _require_plain(job: Job, token_id: int) -> None:
    """Raises InvariantViolation if more than the number of its tokens decides what becomes of the job."""
    sampling = job.sampling
    stops = job.finish_reason(max(sampling.min_tokens, job.num_emitted), token_id) is FinishReason.STOP
    if stops or sampling.logprobs is not None or sampling.looks_back:
        raise InvariantViolation(f"{job.key} cannot decode in lockstep: its tokens are not all alike")
