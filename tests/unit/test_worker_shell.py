"""The worker's shell around a core that only says what the test wants."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from queue import Queue

import pytest
from support.jobs import GRAMMAR, job
from support.join_token import TEST_TOKEN

from twinpool.channel import RouterChannel
from twinpool.config import LinkConfig, Role, TransportName
from twinpool.engine.batch import StepBatch, StepOutput
from twinpool.engine.block_pool import BlockPool
from twinpool.errors import InvariantViolation, NotAMember, StepStuck, StrangerRefused, WorkerDenied
from twinpool.join_token import JoinToken
from twinpool.kv_transfer.connector import BlockRange, KVRegion, LocalEnd
from twinpool.layout import Dtype, KVLayout
from twinpool.messages import Dropped, DropReason, PeerInfo, Register, Reserve, Stop, TakeRole, WorkerStats
from twinpool.metrics import Counters, WorkerMetric
from twinpool.request import Job, RequestKey
from twinpool.worker.core import (
    CancelReceive,
    Command,
    Event,
    FromCoordinator,
    PeerLinked,
    PlanAhead,
    ReceiveCancelled,
    SendCoordinator,
    StepDone,
    StepPlan,
)
from twinpool.worker.links import LinkSettings, LocalPool
from twinpool.worker.outgoing import OutgoingLinks
from twinpool.worker.parts import WorkerParts
from twinpool.worker.shell import WorkerShell
from twinpool.worker.step_thread import Grammars, Runner

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=8, dtype=Dtype.FLOAT32)
NUM_BLOCKS = 4


class Core:
    """Keeps its events, and raises `error` at the first one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.counters = Counters()
        self.pool = BlockPool(NUM_BLOCKS, LAYOUT.block_size)
        self.num_quarantined = 0
        self.events: list[Event] = []
        self.news: asyncio.Queue[Event] = asyncio.Queue()
        self.plan: StepPlan | None = None
        self.planned: list[Command] = []
        self._error = error

    def handle(self, event: Event, now: float) -> list[Command]:  # noqa: ARG002
        self.events.append(event)
        self.news.put_nowait(event)
        if self._error is not None:
            raise self._error
        return []

    def next_step(self, now: float) -> StepPlan | None:  # noqa: ARG002
        return self.plan

    def plan_ahead(self) -> PlanAhead | None:
        return None

    def flush(self) -> list[Command]:
        commands, self.planned = self.planned, []
        return commands

    def stats(self) -> WorkerStats:
        return WorkerStats(NUM_BLOCKS, 0, 0, self.num_quarantined, 0, 0, 0, 0, {})

    def check(self) -> None:
        raise NotImplementedError


class NoRunner:
    """No model."""

    def __init__(self) -> None:
        self.prepared: Queue[Job] = Queue()
        self.forgotten: list[RequestKey] = []

    def run(self, batch: StepBatch, on_layer_done: object = None) -> StepOutput:
        raise NotImplementedError

    @property
    def grammars(self) -> Grammars:
        return self

    def prepare(self, job: Job) -> None:
        self.prepared.put(job)

    def forget(self, key: RequestKey) -> None:
        self.forgotten.append(key)

    def get_ahead(self) -> bool:
        return True


class StuckRunner(NoRunner):
    """A model whose step ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.end = threading.Event()

    def run(self, batch: StepBatch, on_layer_done: object = None) -> StepOutput:  # noqa: ARG002
        self.end.wait(30)
        return StepOutput({}, 0.0)


class GraphlessRunner(NoRunner):
    """A model on a GPU whose decode steps no graph holds."""

    def run(self, batch: StepBatch, on_layer_done: object = None) -> StepOutput:  # noqa: ARG002
        return StepOutput({}, 0.0, missed_graph=True)


def shell_of(
    core: Core,
    runner: Runner | None = None,
    step_timeout_s: float = 60.0,
    coordinator: str = "tcp://127.0.0.1:1",
    *,
    strict: bool = False,
) -> WorkerShell:
    """A decode worker whose coordinator never answers."""
    return WorkerShell(
        WorkerParts(
            core=core,
            runner=runner or NoRunner(),
            pool=pool(),
            register=Register("decode-0", "b1", Role.DECODE, 1, "", "model", LAYOUT, NUM_BLOCKS, 8, 1),
            link=LinkConfig(coordinator, "decode-0", TEST_TOKEN),
            settings=replace(settings("decode-0"), strict=strict),
            peer_bind="tcp://127.0.0.1:*",
            step_timeout_s=step_timeout_s,
        )
    )


def pool() -> LocalPool:
    memory = memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes))
    return LocalPool(KVRegion(memory, LAYOUT, NUM_BLOCKS), None, (NUM_BLOCKS - 1,), "model")


def settings(worker_id: str) -> LinkSettings:
    loopback = TransportName.LOOPBACK
    return LinkSettings(LocalEnd(worker_id, "b1"), "host", loopback, (loopback,), TEST_TOKEN)


@pytest.mark.parametrize("error", [InvariantViolation("two owners"), KeyError("a bug of another kind")])
async def test_whatever_a_core_raises_ends_the_worker(error: Exception) -> None:
    core = Core(error)
    async with asyncio.timeout(10):
        with pytest.raises(type(error)):
            await shell_of(core).run()
    assert len(core.events) == 1
    assert core.counters[WorkerMetric.INVARIANT_VIOLATIONS] == isinstance(error, InvariantViolation)


async def test_a_worker_whose_step_never_ends_ends_itself_and_waits_for_nothing() -> None:
    core, runner = Core(), StuckRunner()
    core.plan = StepPlan(StepBatch(()))
    shell = shell_of(core, runner, step_timeout_s=0.2)
    try:
        async with asyncio.timeout(10):
            with pytest.raises(StepStuck, match="--step-timeout"):
                await shell.run()
    finally:
        runner.end.set()
        await shell._close()  # what the end of the process does


async def test_a_worker_that_is_told_to_stop_does_not_wait_forever_for_its_step() -> None:
    core, runner = Core(), StuckRunner()
    core.plan = StepPlan(StepBatch(()))
    shell = shell_of(core, runner, step_timeout_s=0.5)
    running = asyncio.create_task(shell.run())
    try:
        async with asyncio.timeout(10):
            await core.news.get()
            shell.stop("the test is over")
            with pytest.raises(StepStuck):
                await running
    finally:
        runner.end.set()
        await shell._close()  # what the end of the process does


async def test_decode_steps_that_no_graph_holds_are_counted_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = Core()
    core.plan = StepPlan(StepBatch(()))
    shell = shell_of(core, GraphlessRunner())
    running = asyncio.create_task(shell.run())
    async with asyncio.timeout(10):
        for _ in range(3):
            while not isinstance(await core.news.get(), StepDone):
                pass
    shell.stop("the test is over")
    await running
    assert core.counters[WorkerMetric.MISSED_GRAPHS] >= 3
    assert [record.levelname for record in caplog.records if "CUDA graph" in record.message] == ["WARNING"]


async def test_in_strict_mode_a_decode_step_that_no_graph_holds_ends_the_worker() -> None:
    core = Core()
    core.plan = StepPlan(StepBatch(()))
    async with asyncio.timeout(10):
        with pytest.raises(
            InvariantViolation, match="--strict: a decode step of 0 sequences ran kernel by kernel"
        ):
            await shell_of(core, GraphlessRunner(), strict=True).run()
    assert core.counters[WorkerMetric.MISSED_GRAPHS] == 1


async def test_what_planning_gives_rise_to_does_not_wait_for_the_next_event() -> None:
    core = Core()
    core.planned = [CancelReceive(7)]
    shell = shell_of(core)
    running = asyncio.create_task(shell.run())
    async with asyncio.timeout(10):
        while await core.news.get() != ReceiveCancelled(7):
            pass
    shell.stop("the test is over")
    await running


async def test_a_job_with_a_grammar_is_prepared_while_the_core_hears_of_it() -> None:
    core, runner = Core(), NoRunner()
    shell = shell_of(core, runner)
    running = asyncio.create_task(shell.run())
    message = Reserve(job("a", 3, grammar=GRAMMAR), "prefill-0", "b1")
    shell._from_coordinator("", message)
    assert await asyncio.to_thread(runner.prepared.get, timeout=10) is message.job
    assert FromCoordinator(message) in core.events
    shell.stop("the test is over")
    await running


async def test_what_was_prepared_for_a_job_goes_with_it() -> None:
    core, runner, key = Core(), NoRunner(), RequestKey("a", 0)
    shell = shell_of(core, runner)
    core.planned = [SendCoordinator(Dropped(key, DropReason.NO_ROOM))]
    shell._start_step()
    assert runner.forgotten == [key]
    await shell._close()


async def test_a_coordinator_that_does_not_answer_is_named_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("twinpool.worker.shell.REGISTER_AGAIN_S", 0.01)
    monkeypatch.setattr("twinpool.worker.shell.NO_ANSWER_S", 0.02)
    shell = shell_of(Core())
    told: list[logging.LogRecord] = []
    third = asyncio.Event()

    def keep(record: logging.LogRecord) -> bool:
        if "no coordinator answers at tcp://127.0.0.1:1" in record.getMessage():
            told.append(record)
            if len(told) == 3:
                third.set()
        return True

    caplog.handler.addFilter(keep)
    running = asyncio.create_task(shell.run())
    try:
        async with asyncio.timeout(10):
            await third.wait()
    finally:
        caplog.handler.removeFilter(keep)
    shell.stop("the test is over")
    await running
    silent_s = [record.args[1] for record in told if isinstance(record.args, tuple)]
    assert silent_s[:3] == pytest.approx([0.02, 0.04, 0.08])


async def test_a_worker_with_another_token_is_told_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.worker.vigil.MOST_REFUSALS", 2)
    others: list[object] = []

    def keep(*what: object) -> None:
        others.append(what)

    with RouterChannel("tcp://127.0.0.1:*", JoinToken.fresh(), keep, keep) as coordinator:
        async with asyncio.timeout(10):
            with pytest.raises(
                WorkerDenied, match=rf"{coordinator.endpoint} does not accept this join token"
            ):
                await shell_of(Core(), coordinator=coordinator.endpoint).run()
    assert {type(error) for _, error in others} == {StrangerRefused}  # type: ignore[misc]


async def test_what_a_transport_drops_is_counted_once_as_a_stale_fence() -> None:
    core = Core()
    shell = shell_of(core)
    running = asyncio.create_task(shell.run())
    linked: asyncio.Queue[Event] = asyncio.Queue()
    tasks: list[asyncio.Task[None]] = []

    def spawn(coroutine: object) -> asyncio.Task[None]:
        tasks.append(asyncio.create_task(coroutine))  # type: ignore[arg-type]
        return tasks[-1]

    links = OutgoingLinks(
        pool(), settings("prefill-0"), linked.put_nowait, lambda _: None, lambda *_: None, spawn
    )
    shell._links.update((PeerInfo("prefill-0", "b1", Role.PREFILL, ""),))
    links.add(PeerInfo("decode-0", "b1", Role.DECODE, shell._register.endpoint))
    async with asyncio.timeout(10):
        assert isinstance(await linked.get(), PeerLinked)
    links.senders["decode-0"].push(7, BlockRange([0], [1], 0, LAYOUT.num_layers))
    for _ in range(2):
        shell._links.count_into(core.counters)
        assert core.counters[WorkerMetric.STALE_FENCES] == 1
        assert core.counters[WorkerMetric.JUNK_MESSAGES] == 0
    await links.close()
    shell.stop("the test is over")
    assert await running == "the test is over"


async def test_a_worker_leaves_for_another_role_when_its_last_block_is_free() -> None:
    core = Core()
    core.num_quarantined = 1
    shell = shell_of(core)
    running = asyncio.create_task(shell.run())
    shell._from_coordinator("", TakeRole(Role.PREFILL))
    async with asyncio.timeout(10):
        await core.news.get()
        assert not running.done()
        core.num_quarantined = 0
        assert await running == "becomes a prefill worker"
    assert shell.next_role is Role.PREFILL


async def test_a_worker_whose_blocks_stay_lent_starts_anew_in_the_other_role(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("twinpool.worker.shell.EMPTY_WITHIN_S", 0.05)
    core = Core()
    core.num_quarantined = 1
    shell = shell_of(core)
    shell._from_coordinator("", TakeRole(Role.PREFILL))
    async with asyncio.timeout(10):
        with pytest.raises(NotAMember, match="not all blocks of the decode role are free"):
            await shell.run()
    assert shell.next_role is Role.PREFILL


async def test_a_worker_that_is_to_stop_takes_no_other_role_first() -> None:
    core = Core()
    core.num_quarantined = 1
    shell = shell_of(core)
    running = asyncio.create_task(shell.run())
    shell._from_coordinator("", TakeRole(Role.PREFILL))
    shell._from_coordinator("", Stop())
    async with asyncio.timeout(10):
        assert await running == "the coordinator said so"
    assert shell.next_role is None


@pytest.mark.parametrize("role", [Role.DECODE, Role.COLOCATED])
async def test_a_role_that_makes_no_sense_is_junk(role: Role) -> None:
    core = Core()
    shell = shell_of(core)
    shell._from_coordinator("", TakeRole(role))
    assert core.counters[WorkerMetric.JUNK_MESSAGES] == 1
    assert shell.next_role is None
    await shell._close()
