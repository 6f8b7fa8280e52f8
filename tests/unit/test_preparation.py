"""Grammars are prepared ahead of their steps, and whatever comes of that is no worker's end."""

from __future__ import annotations

import logging
import threading
from queue import Queue

import pytest
from support.jobs import GRAMMAR, job

from twinpool.engine.batch import StepBatch, StepOutput
from twinpool.messages import Cancel, Generate, Message, Prefill, Reserve
from twinpool.request import Job
from twinpool.worker.preparation import Preparation

WAIT_S = 10.0
WORK = job("a", 3, grammar=GRAMMAR)


class Runner:
    """Says what it was asked to prepare, and where, and then goes on when the test lets it."""

    def __init__(self, error: Exception | None = None, *, is_held: bool = False) -> None:
        self.asked: Queue[tuple[Job, str]] = Queue()
        self.may_end = threading.Event()
        self._error = error
        if not is_held:
            self.may_end.set()

    def run(self, batch: StepBatch, on_layer_done: object = None) -> StepOutput:
        raise NotImplementedError

    def prepare(self, job: Job) -> None:
        self.asked.put((job, threading.current_thread().name))
        assert self.may_end.wait(WAIT_S)
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize(
    "message",
    [Prefill(WORK, "decode-0"), Reserve(WORK, "prefill-0", "life-1"), Generate(WORK)],
    ids=lambda message: type(message).__name__,
)
def test_a_job_with_a_grammar_is_prepared_on_a_thread_of_its_own(message: Message) -> None:
    runner = Runner()
    preparation = Preparation(runner)
    preparation.heard(message)
    asked, thread = runner.asked.get(timeout=WAIT_S)
    preparation.close()
    assert asked is WORK
    assert thread.startswith("prepare")


def test_a_job_without_one_and_other_messages_are_no_work() -> None:
    runner = Runner()
    preparation = Preparation(runner)
    for message in (Generate(job("plain", 3)), Cancel(WORK.key), Generate(WORK)):
        preparation.heard(message)
    assert runner.asked.get(timeout=WAIT_S)[0] is WORK
    preparation.close()
    assert runner.asked.empty()


def test_what_goes_wrong_is_logged_by_its_type_and_the_next_one_is_prepared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = Runner(KeyError("the client's words"))
    preparation = Preparation(runner)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            preparation.heard(Generate(WORK))
        for _ in range(2):
            runner.asked.get(timeout=WAIT_S)
        preparation._executor.shutdown(wait=True)
    assert "a grammar could not be prepared: KeyError" in caplog.text
    assert "words" not in caplog.text


def test_no_more_jobs_wait_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.worker.preparation.MOST_AHEAD", 2)
    runner = Runner(is_held=True)
    preparation = Preparation(runner)
    for _ in range(5):
        preparation.heard(Generate(WORK))
    runner.may_end.set()
    preparation._executor.shutdown(wait=True)
    assert runner.asked.qsize() == 2
    preparation.close()
