"""Continuous batching: one token for every running sequence in each step; who leaves when blocks run out."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

from twinpool.engine.batch import SequenceSlice, StepOutput
from twinpool.engine.block_pool import BlockPool, BlockTable
from twinpool.engine.look_back import LookBack
from twinpool.engine.prefix_chain import PrefixChain
from twinpool.errors import InvariantViolation
from twinpool.messages import Token
from twinpool.request import Job, RequestKey
from twinpool.worker.core import AwaitedSlice, PlanAhead, StepPlan


def num_kv_tokens(job: Job, num_new_tokens: int | None = None) -> int:
    """KV positions of the job's tokens and at most `num_new_tokens` further ones (None: all it may generate).

    The last token of an answer is never fed back, so it needs none.
    """
    num_fed = max(0, job.sampling.max_tokens - job.num_emitted - 1)
    return len(job.token_ids) + (num_fed if num_new_tokens is None else min(num_fed, num_new_tokens))


def why_never_fits(job: Job, pool: BlockPool) -> str | None:
    """Why the job cannot run to its end even alone in the pool; None if it can."""
    needed = pool.blocks_for(num_kv_tokens(job))
    if needed <= pool.num_blocks:
        return None
    return f"prompt and output may need {needed} KV blocks, the pool has {pool.num_blocks}"


class GrownTokens(Sequence[int]):
    """A job's tokens, never copied, and those that were generated since."""

    __slots__ = ("_given", "_grown")

    def __init__(self, given: Sequence[int], first: int) -> None:
        self._given = given
        self._grown = [first]

    def append(self, token_id: int) -> None:
        """One more was generated."""
        self._grown.append(token_id)

    def extend(self, token_ids: Sequence[int]) -> None:
        """So many more were."""
        self._grown += token_ids

    def __len__(self) -> int:
        return len(self._given) + len(self._grown)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        given, grown = self._given, self._grown
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1 or start < len(given) < stop:
                return (*given, *grown)[index]
            if start < len(given):
                return given[start:stop]
            return grown[start - len(given) : max(start, stop) - len(given)]
        index = range(len(self))[index]
        return given[index] if index < len(given) else grown[index - len(given)]


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """A sequence that generates, until it `has_left`. `token_ids` are all its tokens; the KV of all but the last is in
    `table`. It joined as the `number`-th. What follows is for `Lockstep`."""

    job: Job
    table: BlockTable
    chain: PrefixChain
    token_ids: GrownTokens
    look_back: LookBack | None
    number: int
    has_left: bool = False
    shift: int = 0
    ends_at: int = 0
    needs_block_at: int = 0
    key: RequestKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.job.key

    @property
    def output_index(self) -> int:
        """The index of the next output token, over all attempts."""
        return len(self.token_ids) - self.job.num_prompt


class DecodePlan(NamedTuple):
    """One step's slices; the sequences that were preempted for it, and released already, youngest first; and
    whether the oldest sequence could not run because others than sequences hold the blocks."""

    slices: list[SequenceSlice]
    preempted: list[RequestKey]
    is_starved: bool


class DecodeScheduler:
    """The running sequences, oldest first, over one block pool.

    A sequence that crosses a block border gets a block. If there is none, the youngest gives up all of its
    own, so the oldest always goes on; what was preempted is computed again elsewhere from its tokens.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._running: dict[RequestKey, DecodeSequence] = {}
        self.num_joined = 0
        """How many sequences have ever joined."""

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[DecodeSequence]:
        return iter(self._running.values())

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._running

    def get(self, key: RequestKey) -> DecodeSequence | None:
        """The sequence, if it runs."""
        return self._running.get(key)

    def joined_after(self, number: int) -> list[DecodeSequence]:
        """The sequences that joined after the `number`-th, oldest first."""
        found: list[DecodeSequence] = []
        if number < self.num_joined:
            for sequence in reversed(self._running.values()):
                if sequence.number <= number:
                    break
                found.append(sequence)
        return found[::-1]

    def num_prompt_tokens(self, key: RequestKey) -> int:
        """Tokens that the sequence joined with KV of: its prompt, and what earlier attempts had emitted."""
        return len(self._running[key].job.token_ids)

    def join(
        self,
        job: Job,
        table: BlockTable,
        chain: PrefixChain,
        first_token: int,
        look_back: LookBack | None = None,
    ) -> None:
        """The job's tokens are in `table`, which is the scheduler's from now on; `first_token` follows them.
        `look_back` is the sequence's, if its prompt was computed here.

        Raises:
            InvariantViolation: this attempt runs already.
        """
        token_ids = GrownTokens(job.token_ids, first_token)
        look_back = LookBack.of(job) if look_back is None else look_back
        sequence = DecodeSequence(job, table, chain, token_ids, look_back, self.num_joined + 1)
        if sequence.key in self._running:
            raise InvariantViolation(f"{sequence.key} joined twice")
        self._pool.seal(table, chain, len(job.token_ids))
        self.num_joined += 1
        self._running[sequence.key] = sequence

    def leave(self, key: RequestKey) -> None:
        """Ends the sequence and releases its blocks."""
        sequence = self._running.pop(key)
        sequence.has_left = True
        self._pool.release(sequence.table)

    def plan(self, make_room: Callable[[], bool] | None = None) -> DecodePlan:
        """The next step. `make_room` is asked to release other blocks before a sequence is preempted; it says
        whether it did."""
        plan = DecodePlan([], [], False)
        for sequence in list(self._running.values()):
            if sequence.key not in self._running:
                break  # preempted for an older one, and so are all behind it
            if not self._has_room(sequence, plan.preempted, make_room):
                plan = plan._replace(is_starved=sequence.key in self._running)
                break
            plan.slices.append(self._slice(sequence))
        return plan

    def plan_ahead(self, running: StepPlan, leaving: Container[RequestKey]) -> PlanAhead | None:
        """The step after `running`, of whose tokens nothing is known yet, without those in `leaving`. None if a
        sequence has no room for its token: who gives way is decided between steps."""
        in_step = {chunk.key for chunk in running.batch.slices}
        awaited: list[AwaitedSlice] = []
        joining: list[SequenceSlice] = []
        for key, sequence in self._running.items():
            index, start = sequence.output_index, len(sequence.token_ids)
            if key in leaving or (key in in_step and sequence.job.is_last(index)):
                continue
            if not self._fits(sequence, start + 1 if key in in_step else start):
                return None
            if key in in_step:
                block_ids = sequence.table.block_ids
                awaited.append(AwaitedSlice(sequence.job, index, start, block_ids, sequence.look_back))
            else:
                joining.append(self._slice(sequence))
        return PlanAhead(running, tuple(awaited), tuple(joining)) if awaited or joining else None

    def complete(self, chunk: SequenceSlice, output: StepOutput) -> Token:
        """The slice has run, and its token is in `output`. If that ends the answer, the sequence leaves."""
        sequence = self._running[chunk.key]
        index, token_id = sequence.output_index, output.token_ids[chunk.key]
        sequence.token_ids.append(token_id)
        if chunk.end % self._pool.block_size == 0:
            self.seal(sequence, chunk.end)
        finish = sequence.job.finish_reason(index, token_id)
        if finish:
            self.leave(chunk.key)
        return Token(chunk.key, index, token_id, finish, output.logprobs.get(chunk.key))

    def seal(self, sequence: DecodeSequence, num_tokens: int) -> None:
        """The KV of so many of its tokens is in the table: full blocks become findable."""
        sequence.chain.extend(sequence.token_ids)
        self._pool.seal(sequence.table, sequence.chain, num_tokens)

    def _has_room(
        self, sequence: DecodeSequence, preempted: list[RequestKey], make_room: Callable[[], bool] | None
    ) -> bool:
        while not self._fits(sequence, len(sequence.token_ids)):
            if make_room and make_room():
                continue
            if len(self._running) == 1:
                return False
            youngest = next(reversed(self._running))
            self.leave(youngest)
            preempted.append(youngest)
            if youngest == sequence.key:
                return False
        return True

    def _fits(self, sequence: DecodeSequence, num_tokens: int) -> bool:
        """Whether the table has slots for so many tokens, perhaps because it grows by a block."""
        enough = num_tokens <= len(sequence.table) * self._pool.block_size
        return enough or self._pool.try_grow(sequence.table)

    def _slice(self, sequence: DecodeSequence) -> SequenceSlice:
        job, start = sequence.job, len(sequence.token_ids) - 1
        return SequenceSlice(
            sequence.key,
            (sequence.token_ids[start],),
            start,
            sequence.table.block_ids,
            job.sampling,
            job.banned_token_ids(sequence.output_index),
            sequence.look_back,
        )
