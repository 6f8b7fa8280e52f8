"""Two coordinators hear of the same steps, one of each token, the other in lockstep: nobody can tell them apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from support.coordinator_core import register, stats, submission

from twinpool.config import CoordinatorConfig, Role
from twinpool.coordinator.events import (
    Abandoned,
    Arrived,
    Cancelled,
    Completed,
    Emit,
    EmitRun,
    Event,
    FromWorker,
    Send,
    Tick,
    WorkerLost,
)
from twinpool.coordinator.state import CoordinatorCore
from twinpool.coordinator.tenants import Tenant
from twinpool.messages import (
    Cancel,
    Dropped,
    Granted,
    HandoffReport,
    Heartbeat,
    LinkReady,
    LockstepTokens,
    Message,
    Prefill,
    PrefillReport,
    Reserve,
    StepTokens,
    Token,
)
from twinpool.metrics import Timing
from twinpool.request import FinishReason, RequestKey

TOKEN_ID = 7
TENANTS = (Tenant("light", weight=1), Tenant("heavy", weight=3))


@dataclass
class Stream:
    """A sequence on a decode worker: the index of its next token, and how many its answer has at most."""

    index: int
    most: int


@dataclass
class Decoder:
    """A decode worker as far as it talks. `told` had a token in its last step; what is `leaving` has none any more."""

    name: str
    granted: dict[RequestKey, Stream] = field(default_factory=dict)
    running: dict[RequestKey, Stream] = field(default_factory=dict)
    told: set[RequestKey] = field(default_factory=set)


class Twins:
    """`whole` hears every token, `lockstep` the differences. Events come in an order that `dice` choose."""

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)
        self.now = 1.0
        config = CoordinatorConfig(max_wait_s=30.0, finished_timelines=1000)
        self.whole, self.lockstep = CoordinatorCore(config, (2,)), CoordinatorCore(config, (2,))
        self.tokens: tuple[dict[str, list[int]], dict[str, list[int]]] = ({}, {})
        self.times: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
        self.decoders = {name: Decoder(name) for name in ("D0", "D1")}
        self.prompts: dict[RequestKey, int] = {}
        self.owed: list[tuple[str, Message]] = []
        self.num_requests = 0
        for name, role in (("P", Role.PREFILL), ("D0", Role.DECODE), ("D1", Role.DECODE)):
            self.say(name, register(name, role, f"{name}-a"))
        for name in self.decoders:
            self.say("P", LinkReady(name, f"{name}-a", "loopback", 1.0, 1))

    def both(self, event: Event) -> None:
        self._compare(event, event)

    def say(self, name: str, message: Message) -> None:
        self.both(FromWorker(name, f"{name}-a", message))

    def _compare(self, whole: Event, lockstep: Event) -> None:
        told = self.whole.handle(whole, self.now), self.lockstep.handle(lockstep, self.now)
        for commands, tokens, times in zip(told, self.tokens, self.times, strict=True):
            for command in commands:
                if isinstance(command, Emit):
                    so_far = tokens.setdefault(command.request_id, [])
                    assert command.output.first_index == len(so_far)
                    so_far.extend(command.output.token_ids)
                    times.setdefault(command.request_id, []).extend(
                        [self.now] * len(command.output.token_ids)
                    )
                elif isinstance(command, EmitRun):
                    so_far = tokens.setdefault(command.request_id, [])
                    assert command.first_index == len(so_far)
                    so_far.extend([command.token_id] * len(command.times))
                    times.setdefault(command.request_id, []).extend(command.times)
        ends = [[c for c in commands if isinstance(c, Emit) and c.output.finish] for commands in told]
        others = [[c for c in commands if not isinstance(c, Emit | EmitRun)] for commands in told]
        assert str(ends[0]) == str(ends[1])  # errors are equal if they say the same
        assert str(others[0]) == str(others[1])
        for command in others[0]:
            if isinstance(command, Send):
                self._sent(command.worker_id, command.message)
        self._same_sums()

    def _same_sums(self) -> None:
        for ours, theirs in zip(self.whole.registry, self.lockstep.registry, strict=True):
            assert ours.held_tokens == theirs.held_tokens
            assert (ours.seen_at, ours.num_sequences) == (theirs.seen_at, theirs.num_sequences)
        assert self.whole.tally._counts == self.lockstep.tally._counts
        for ours, theirs in zip(self.whole.accounts, self.lockstep.accounts, strict=True):
            assert ours.service == theirs.service
        ours, theirs = (core.tally.timings[Timing.ITL] for core in (self.whole, self.lockstep))
        assert ours.counts == theirs.counts
        assert ours.total_s == pytest.approx(theirs.total_s)

    def _sent(self, name: str, message: Message) -> None:
        decoder = self.decoders.get(name)
        if isinstance(message, Prefill):
            self.prompts[message.job.key] = message.job.num_emitted
            self.owed.append(
                ("P", PrefillReport(message.job.key, 0.0, 0.01, 0, len(message.job.token_ids), 1))
            )
        elif isinstance(message, Reserve) and decoder:
            job = message.job
            decoder.granted[job.key] = Stream(job.num_emitted + 1, job.sampling.max_tokens)
            self.owed.append((name, Granted(job.key, 1, (1,), 0, 0.0)))
        elif isinstance(message, Cancel):
            self.owed.append((name, Dropped(message.key, "cancelled")))

    # ── what may happen ───────────────────────────────────────────────────────────────────────────────────

    def request(self) -> None:
        self.num_requests += 1
        dice, late_s = self.dice, self.dice.choice((None, None, None, 0.4))
        request = submission(
            f"r{self.num_requests}",
            num_prompt=dice.randint(1, 60),
            max_tokens=dice.randint(1, 25),
            at=self.now - 0.003,
            tenant=dice.choice(TENANTS),
            deadline=None if late_s is None else self.now + late_s,
        )
        self.both(Arrived(request))

    def answer(self) -> None:
        """Somebody says what it owes, in whatever order between workers."""
        if not self.owed:
            return
        name, message = self.owed.pop(self.dice.randrange(len(self.owed)))
        if isinstance(message, PrefillReport):
            index = self.prompts.pop(message.key)
            self.say("P", message)
            decoder = next((d for d in self.decoders.values() if message.key in d.granted), None)
            finish = FinishReason.LENGTH if decoder is None else None
            self.owed.append(("P", StepTokens((Token(message.key, index, TOKEN_ID, finish),))))
            if decoder is not None:
                self.owed.append((decoder.name, HandoffReport(message.key, "loopback", 1, 0.0, 0.0, 1, 0)))
            return
        if isinstance(message, Dropped) and name in self.decoders:
            self._forget(self.decoders[name], message.key)
        self.say(name, message)
        if isinstance(message, HandoffReport) and message.key in self.decoders[name].granted:
            self.decoders[name].running[message.key] = self.decoders[name].granted.pop(message.key)

    def _forget(self, decoder: Decoder, key: RequestKey) -> None:
        decoder.granted.pop(key, None)
        decoder.running.pop(key, None)

    def preempt(self) -> None:
        decoder = self.dice.choice(list(self.decoders.values()))
        if decoder.running:
            key = next(reversed(decoder.running))
            self._forget(decoder, key)
            decoder.told.discard(key)
            self.say(decoder.name, Dropped(key, "preempted"))

    def step(self) -> None:
        decoder = self.dice.choice(list(self.decoders.values()))
        tokens, told, ended = [], [], set()
        for key, stream in decoder.running.items():
            finish = FinishReason.LENGTH if stream.index + 1 >= stream.most else None
            token = Token(key, stream.index, TOKEN_ID, finish)
            tokens.append(token)
            if finish or key not in decoder.told:
                told.append(token)
            if finish:
                ended.add(key)
            stream.index += 1
        if not tokens:
            return
        left = tuple(key for key in decoder.told if key not in decoder.running)
        decoder.running = {key: stream for key, stream in decoder.running.items() if key not in ended}
        decoder.told = set(decoder.running)
        self._compare(
            FromWorker(decoder.name, f"{decoder.name}-a", StepTokens(tuple(tokens))),
            FromWorker(decoder.name, f"{decoder.name}-a", LockstepTokens(tuple(told), left, TOKEN_ID)),
        )

    def disturb(self) -> None:
        request_id = f"r{self.dice.randint(1, max(1, self.num_requests))}"
        match self.dice.randrange(5):
            case 0:
                self.both(Abandoned(request_id))
            case 1:
                self.both(Cancelled(request_id, self.dice.choice(TENANTS).name))
            case 2:
                self.both(Completed(request_id, self.dice.randint(1, 5)))
            case 3:
                self.preempt()
            case 4:
                ours, theirs = self.whole.timeline(request_id), self.lockstep.timeline(request_id)
                assert (ours and ours.to_json(self.now)) == (theirs and theirs.to_json(self.now))

    def tick(self) -> None:
        for name in ("P", "D0", "D1"):
            if self.whole.registry.get(name):
                self.say(name, Heartbeat(stats()))
        self.both(Tick())

    def run(self, num_events: int) -> None:
        does = (
            self.request,
            self.answer,
            self.answer,
            self.answer,
            self.step,
            self.step,
            self.step,
            self.step,
        )
        for number in range(num_events):
            self.now += self.dice.choice((0.0, 0.001, 0.02))
            self.dice.choice(does)()
            if not number % 17:
                self.disturb()
            if not number % 23:
                self.tick()
            if not number % 101:
                self.whole.check()
                self.lockstep.check()


@pytest.mark.parametrize("seed", range(8))
def test_a_step_told_as_a_difference_is_a_step_told_token_by_token(seed: int) -> None:
    twins = Twins(seed)
    twins.run(600)
    if seed % 4 == 0:
        twins.both(WorkerLost("D0", "D0-a", "killed"))
        del twins.decoders["D0"]
        twins.owed = [(name, message) for name, message in twins.owed if name != "D0"]
        twins.run(200)
    for number in range(twins.num_requests):  # whoever looks sees everything
        ours, theirs = twins.whole.timeline(f"r{number + 1}"), twins.lockstep.timeline(f"r{number + 1}")
        assert (ours and ours.to_json(twins.now)) == (theirs and theirs.to_json(twins.now))
    twins.both(Tick())
    assert twins.tokens[0] == twins.tokens[1]
    assert twins.times[0] == twins.times[1]
    assert sum(map(len, twins.tokens[0].values())) > 100
