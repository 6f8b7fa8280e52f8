"""Grammars are prepared ahead of their steps, and whatever comes of that is no worker's end."""

from __future__ import annotations

import asyncio
import logging
import threading
from queue import Queue

import pytest
from support.jobs import GRAMMAR, job

from twinpool.errors import ModelError
from twinpool.messages import Cancel, Generate, Message, Prefill, PushTo, Reserve
from twinpool.request import Job, RequestKey
from twinpool.worker.preparation import IDLE_S, Preparation

WAIT_S = 10.0
WORK = job("a", 3, grammar=GRAMMAR)


class Runner:
    """Says what it was asked to prepare, and where, and then goes on when the test lets it."""

    def __init__(self, error: Exception | None = None, *, is_held: bool = False) -> None:
        self.asked: Queue[tuple[Job, str]] = Queue()
        self.forgotten: list[RequestKey] = []
        self.pieces: Queue[None] = Queue()
        self.may_end = threading.Event()
        self._error = error
        if not is_held:
            self.may_end.set()

    def prepare(self, job: Job) -> None:
        self.asked.put((job, threading.current_thread().name))
        assert self.may_end.wait(WAIT_S)
        if self._error is not None:
            raise self._error

    def forget(self, key: RequestKey) -> None:
        self.forgotten.append(key)

    def get_ahead(self) -> bool:
        self.pieces.put(None)
        assert self.may_end.wait(WAIT_S)
        if self._error is not None:
            raise self._error
        return self.pieces.qsize() == 3


class Bench:
    """A preparation, and what it has passed on."""

    def __init__(self, runner: Runner, *, has_streams: bool = True) -> None:
        self.runner = runner
        self.passed: list[Message] = []
        self._heard = asyncio.Event()
        self.num_touched = 0
        self.preparation = Preparation(runner, self._hear, self._touch, has_streams=has_streams)

    def _touch(self) -> bool:
        self.num_touched += 1
        return self.num_touched == 2

    def _hear(self, message: Message) -> None:
        self.passed.append(message)
        self._heard.set()

    async def until_passed(self, *messages: Message) -> None:
        """Returns when just these have been passed on, in this order."""
        async with asyncio.timeout(WAIT_S):
            while len(self.passed) < len(messages):
                await self._heard.wait()
                self._heard.clear()
        assert self.passed == list(messages)


def push_to(key: RequestKey) -> PushTo:
    return PushTo(key, "decode-0", "life-1", fence=1, block_ids=(0,), num_cached_blocks=0)


@pytest.mark.parametrize(
    "message",
    [Prefill(WORK, "decode-0"), Reserve(WORK, "prefill-0", "life-1"), Generate(WORK)],
    ids=lambda message: type(message).__name__,
)
async def test_a_job_with_a_grammar_is_passed_on_when_a_thread_of_its_own_has_prepared_it(
    message: Message,
) -> None:
    bench = Bench(Runner(is_held=True))
    plain = Generate(job("plain", 3))
    for each in (message, plain, push_to(WORK.key)):
        bench.preparation.take(each)
    asked, thread = await asyncio.to_thread(bench.runner.asked.get, timeout=WAIT_S)
    assert (asked, thread.startswith("prepare")) == (WORK, True)
    assert bench.passed == [plain], "others do not wait"
    bench.runner.may_end.set()
    await bench.until_passed(plain, message, push_to(WORK.key))
    bench.preparation.close()


async def test_a_cancelled_job_is_never_passed_on_nor_what_was_said_of_it() -> None:
    bench = Bench(Runner(is_held=True))
    second = job("b", 3, grammar=GRAMMAR)
    for each in (Prefill(WORK, "d"), Prefill(second, "d"), push_to(second.key), Cancel(second.key)):
        bench.preparation.take(each)
    assert bench.passed == [Cancel(second.key)]
    bench.runner.may_end.set()
    await bench.until_passed(Cancel(second.key), Prefill(WORK, "d"))
    await asyncio.to_thread(bench.preparation._executor.shutdown)
    await bench.until_passed(Cancel(second.key), Prefill(WORK, "d"))
    assert [asked.key for asked, _ in list(bench.runner.asked.queue)] == [WORK.key], "nor is it prepared"
    assert bench.runner.forgotten == [second.key] * 2, (
        "when it is cancelled, and when its turn would have been"
    )
    bench.preparation.close()


async def test_a_job_that_leaves_leaves_nothing_behind_though_it_is_just_being_prepared() -> None:
    bench = Bench(Runner(is_held=True))
    bench.preparation.take(Prefill(WORK, "d"))
    await asyncio.to_thread(bench.runner.asked.get, timeout=WAIT_S)
    bench.preparation.take(Cancel(WORK.key))
    assert bench.runner.forgotten == [WORK.key]
    bench.runner.may_end.set()
    await asyncio.to_thread(bench.preparation._executor.shutdown)
    await asyncio.sleep(0)
    assert bench.runner.forgotten == [WORK.key] * 2, "again, when it is there"
    bench.preparation.left(RequestKey("another", 0))
    assert bench.runner.forgotten[-1].request_id == "another"
    bench.preparation.close()


async def settled(bench: Bench) -> None:
    """Returns when the thread has done all that it was given."""
    await asyncio.wrap_future(bench.preparation._executor.submit(lambda: None))


async def test_a_worker_that_is_idle_for_long_enough_gets_ahead_piece_by_piece_and_then_no_more() -> None:
    bench = Bench(Runner())
    look = bench.preparation.look
    seen = []
    for now, is_idle in (
        (0.0, False), (1.0, True), (1.0 + IDLE_S / 2, True), (1.0 + IDLE_S, True),
        (8.0, False), (9.0, True), (9.5, True), (9.0 + IDLE_S, True), (20.0, True), (30.0, True),
    ):  # fmt: skip
        look(now, is_idle=is_idle)
        await settled(bench)
        seen.append(bench.runner.pieces.qsize())
    assert seen == [0, 0, 0, 1, 1, 1, 1, 2, 3, 3]
    assert bench.num_touched == 1
    for now in (40.0, 50.0, 60.0):
        look(now, is_idle=True)
        await settled(bench)
    assert bench.num_touched == 2, "and then the memory of the pool"
    bench.preparation.close()


async def test_a_worker_without_streams_keeps_nothing_that_nobody_asked_for() -> None:
    bench = Bench(Runner(), has_streams=False)
    for now in (0.0, 10.0, 20.0):
        bench.preparation.look(now, is_idle=True)
        await settled(bench)
    assert bench.runner.pieces.empty()
    assert bench.num_touched == 2
    bench.preparation.close()


async def test_one_piece_is_done_at_a_time_and_none_while_a_job_is_held_or_after_the_end() -> None:
    bench = Bench(Runner(is_held=True))
    for now in (0.0, 10.0, 20.0):
        bench.preparation.look(now, is_idle=True)
    await asyncio.to_thread(bench.runner.pieces.get, timeout=WAIT_S)
    bench.preparation.look(30.0, is_idle=True)
    bench.preparation.take(Generate(WORK))
    bench.runner.may_end.set()
    await bench.until_passed(Generate(WORK))
    await settled(bench)
    assert bench.runner.pieces.empty()
    bench.preparation._held[WORK.key] = []
    for now in (40.0, 50.0):
        bench.preparation.look(now, is_idle=True)
    del bench.preparation._held[WORK.key]
    bench.preparation.close()
    for now in (60.0, 70.0):
        bench.preparation.look(now, is_idle=True)
    await asyncio.to_thread(bench.preparation._executor.shutdown)
    assert bench.runner.pieces.empty()


@pytest.mark.parametrize(
    ("error", "log"), [(ModelError("no end"), ""), (ImportError("words"), "made ready: ImportError")]
)
async def test_what_cannot_be_got_ahead_of_is_left_to_the_first_grammar(
    error: Exception, log: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(Runner(error))
    for now in (0.0, 10.0, 20.0, 30.0):
        bench.preparation.look(now, is_idle=True)
        await settled(bench)
    assert bench.runner.pieces.qsize() == 1
    assert log in caplog.text
    assert "words" not in caplog.text
    assert bool(log) is bool(caplog.records)
    bench.preparation.close()


async def test_what_goes_wrong_is_logged_by_its_type_and_the_job_is_passed_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(Runner(KeyError("the client's words")))
    second = Generate(job("b", 3, grammar=GRAMMAR))
    with caplog.at_level(logging.INFO):
        bench.preparation.take(Generate(WORK))
        bench.preparation.take(second)
        await bench.until_passed(Generate(WORK), second)
    bench.preparation.close()
    assert caplog.text.count("a grammar could not be prepared: KeyError") == 2
    assert "words" not in caplog.text


async def test_beyond_so_many_none_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.worker.preparation.MOST_AHEAD", 2)
    bench = Bench(Runner(is_held=True))
    messages = [Generate(job(f"r{i}", 3, grammar=GRAMMAR)) for i in range(3)]
    for message in messages:
        bench.preparation.take(message)
    assert bench.passed == messages[2:]
    bench.preparation.close()
    bench.runner.may_end.set()
    await asyncio.to_thread(bench.preparation._executor.shutdown)
    await asyncio.sleep(0)
    assert bench.passed == messages[2:], "after its end nothing is passed on"
