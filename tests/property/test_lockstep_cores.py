"""A core in lockstep that skips quiet steps does what one does that goes step by step: to the last block."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import repeat

from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs import job

from twinpool.colocated_pool.core import ColocatedCore
from twinpool.config import SchedulerConfig
from twinpool.decode_pool.lockstep import LockstepLoad
from twinpool.engine.batch import StepOutput
from twinpool.engine.prefix_chain import PrefixChain
from twinpool.layout import Dtype, KVLayout
from twinpool.messages import Cancel, Dropped, Generate, LockstepTokens, PrefillReport, StepTokens
from twinpool.request import Job, RequestKey
from twinpool.worker.core import Command, FromCoordinator, PlanAhead, SendCoordinator, StepDone, StepPlan

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype=Dtype.FLOAT32)
TOKEN_ID = 7
Told = tuple[str, object]


class AloneChain(PrefixChain):
    """What a job generates is its own."""

    __slots__ = ()

    grows_alone = True


def alone(work: Job) -> PrefixChain:
    """A chain of tokens that no other job has."""
    chain = AloneChain(LAYOUT.block_size, work.request_id)
    chain.extend(work.token_ids)
    return chain


@dataclass
class ByStep:
    """The core as in a server. `heard` is what it told since it was last looked at, tokens in no order."""

    core: ColocatedCore
    plan: StepPlan | None = None
    ahead: PlanAhead | None = None
    heard: list[Told] = field(default_factory=list)

    def take(self, message: object, now: float) -> None:
        """A message has come."""
        self.hear(self.core.handle(FromCoordinator(message), now))  # type: ignore[arg-type]
        self.go_on(now)

    def go_on(self, now: float) -> None:
        """A step begins if none runs, and the next one is planned."""
        if self.plan is None:
            self.plan = self.core.next_step(now)
            self.hear(self.core.flush())
        if self.plan is not None:
            self.ahead = self.core.plan_ahead()

    def end_step(self, now: float) -> None:
        """The step that runs has ended."""
        if (plan := self.plan) is None:
            return
        keys = (chunk.key for chunk in plan.batch.slices if chunk.sampling is not None)
        output = StepOutput(dict.fromkeys(keys, TOKEN_ID), 0.5)
        self.plan = self.ahead.resolve(plan, output) if self.ahead else None
        self.ahead = None
        self.hear(self.core.handle(StepDone(plan, output, self.plan), now))
        self.go_on(now)

    def hear(self, commands: list[Command]) -> None:
        """Takes down what is told."""
        for command in commands:
            assert isinstance(command, SendCoordinator)
            message = command.message
            if isinstance(message, StepTokens):
                self.heard += [("token", (t.key, t.index, t.finish)) for t in message.tokens]
            else:
                assert isinstance(message, Dropped | PrefillReport)
                self.heard.append((type(message).__name__, message))

    @property
    def size(self) -> tuple[int, int]:
        """Slices and tokens of the step that runs."""
        return (len(self.plan.batch.slices), self.plan.batch.num_tokens) if self.plan else (0, 0)


@dataclass
class InLockstep:
    """The same in lockstep. `streams` have the index of their next token."""

    core: ColocatedCore
    load: LockstepLoad | None = None
    streams: dict[RequestKey, int] = field(default_factory=dict)
    heard: list[Told] = field(default_factory=list)

    def take(self, message: object, now: float) -> None:
        """See `ByStep`."""
        self.hear(self.core.handle(FromCoordinator(message), now))  # type: ignore[arg-type]
        self.go_on(now)

    def go_on(self, now: float) -> None:
        """See `ByStep`."""
        if self.load is None:
            self.load = self.core.begin_step(now)
            self.hear(self.core.flush())
        if self.load is not None:
            self.core.plan_step_ahead()

    def end_step(self, now: float) -> None:
        """See `ByStep`."""
        if self.load is None:
            return
        commands, self.load = self.core.end_step(0.5, now)
        self.hear(commands)
        self.go_on(now)

    def skip(self, num_steps: int) -> None:
        """So many quiet steps have ended."""
        assert self.load is not None
        told = self.core.skip_steps([0.5] * num_steps)
        num, tokens, _ = self.load
        self.load = LockstepLoad(num, tokens + num * num_steps)
        for message in (*told, *repeat(LockstepTokens((), (), TOKEN_ID), num_steps - len(told))):
            self._tokens(message)

    def hear(self, commands: list[Command]) -> None:
        """See `ByStep`."""
        for command in commands:
            assert isinstance(command, SendCoordinator)
            message = command.message
            if isinstance(message, LockstepTokens):
                self._tokens(message)
            else:
                if isinstance(message, Dropped):
                    self.streams.pop(message.key, None)
                assert isinstance(message, Dropped | PrefillReport)
                self.heard.append((type(message).__name__, message))

    def _tokens(self, message: LockstepTokens) -> None:
        for key in (*message.left, *(token.key for token in message.tokens)):
            self.streams.pop(key, None)
        for key, index in self.streams.items():
            self.heard.append(("token", (key, index, None)))
            self.streams[key] += 1
        for token in message.tokens:
            self.heard.append(("token", (token.key, token.index, token.finish)))
            if token.finish is None:
                self.streams[token.key] = token.index + 1

    @property
    def size(self) -> tuple[int, int]:
        """See `ByStep`."""
        if self.load is None:
            return 0, 0
        num_prompt = sum(len(chunk.token_ids) for chunk in self.load.chunks)
        return self.load.num_sequences + len(self.load.chunks), self.load.num_sequences + num_prompt


Move = tuple[str, int, int]
MOVES = st.lists(
    st.tuples(st.sampled_from(("come", "cancel", "end", "end", "end", "skip")), st.integers(1, 30), st.integers(1, 40)),
    max_size=60,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    MOVES,
    st.sampled_from((8, 14, 40)),
    st.sampled_from((6, 32)),
    st.sampled_from((2, 5)),
    st.sampled_from((0, 8)),
    st.booleans(),
    st.booleans(),
)
def test_lockstep_is_step_by_step(
    moves: list[Move],
    num_blocks: int,
    budget: int,
    num_seqs: int,
    headroom: int,
    is_alone: bool,
    shares: bool,
) -> None:
    config = SchedulerConfig(token_budget=budget, max_num_seqs=num_seqs, headroom_tokens=headroom)
    chains = alone if is_alone else None
    one = ByStep(ColocatedCore(num_blocks, LAYOUT, config, chains=chains))
    other = InLockstep(ColocatedCore(num_blocks, LAYOUT, config, chains=chains))
    other.core.walk_in_lockstep(TOKEN_ID)
    num_jobs = 0
    for number, (move, first, second) in enumerate(moves):
        now = float(number)
        if move == "come":
            work = job(str(num_jobs), first, second, first=0 if shares else 100 * num_jobs, ignore_eos=True)
            num_jobs += 1
            one.take(Generate(work), now)
            other.take(Generate(work), now)
        elif move == "cancel" and num_jobs:
            cancel = Cancel(RequestKey(str(first % num_jobs), 0))
            one.take(cancel, now)
            other.take(cancel, now)
        elif move == "end":
            one.end_step(now)
            other.end_step(now)
        elif move == "skip" and (num_steps := other.core.num_quiet_steps(second)):
            for _ in range(num_steps):
                one.end_step(now)
            other.skip(num_steps)
        _compare(one, other)
    while one.plan is not None:
        one.end_step(1e3)
        other.end_step(1e3)
        _compare(one, other)
    assert not other.core.num_sequences + other.core.num_prompts


def _compare(one: ByStep, other: InLockstep) -> None:
    assert sorted(map(repr, one.heard)) == sorted(map(repr, other.heard))
    one.heard.clear()
    other.heard.clear()
    assert one.size == other.size
    assert one.core.stats() == other.core.stats()
    assert [sequence.table.block_ids for sequence in one.core._decode] == [
        sequence.table.block_ids for sequence in other.core._decode
    ]
    assert one.core.pool.cached_block_ids == other.core.pool.cached_block_ids
    other.core.check()
