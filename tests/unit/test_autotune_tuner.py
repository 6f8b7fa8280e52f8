"""The shell of live tuning: what it makes of the coordinator's words, and of a process that predicts badly."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from support.coordinator_core import CoreDriver
from support.made_profiles import made_profile
from support.tuned import SLO, settings

from twinpool.commands.pools import tuning_lines
from twinpool.config import CoordinatorConfig, SchedulerConfig
from twinpool.coordinator.exposition import Exposition
from twinpool.coordinator.pool_desk import PoolDesk
from twinpool.coordinator.record_file import RecordFile
from twinpool.coordinator.registry import Registry
from twinpool.coordinator.request_record import EndedRequest
from twinpool.coordinator.tuning import WorkerTerms
from twinpool.errors import ConfigError
from twinpool.layout import Dtype, KVLayout
from twinpool.metrics import TunerMetric
from twinpool.planner.autotune import asking
from twinpool.planner.autotune import tuner as tuner_module
from twinpool.planner.autotune.asking import ask
from twinpool.planner.autotune.core import AutotuneCore
from twinpool.planner.autotune.questions import LiveQuestion
from twinpool.planner.autotune.regret_log import RegretLog
from twinpool.planner.autotune.tuner import PoolTuner, _Progress, event_of, pools_of
from twinpool.planner.autotune.words import (
    Ended,
    Measured,
    PastTraffic,
    Pools,
    Predict,
    Split,
    Withdrawn,
    Write,
)
from twinpool.request import RequestState

LINE = Measured(
    number=1,
    layout="1P1D",
    num_requests=0,
    rate_per_s=0.0,
    mean_input=0.0,
    mean_output=0.0,
    figures=None,
    errors={},
    why="nothing came",
)


def ended(outcome: RequestState, code: str = "", count: int = 5) -> EndedRequest:
    return EndedRequest("r", "", 10.0, outcome, error_code=code, num_output_tokens=count)


def progress() -> _Progress:
    """Five tokens, at 10.5, 10.6 (two), 10.7 and 11.0."""
    tuner = PoolTuner(settings(), made_profile(), None, SchedulerConfig(), CoordinatorConfig(), None)
    made = tuner._running["r"] = _Progress()
    for at, count in ((10.5, 1), (10.6, 2), (10.7, 1), (11.0, 1)):
        tuner.emitted("r", count, at)
    return made


def test_a_complete_request_is_told_by_when_its_tokens_came() -> None:
    event = event_of(ended(RequestState.COMPLETED), progress())
    assert isinstance(event, Ended)
    assert event.is_completed
    assert event.num_output_tokens == 5
    assert event.ttft_s == pytest.approx(0.5)
    assert event.tpot_s == pytest.approx(0.5 / 4)
    assert event.itl_p99_s == pytest.approx(0.3)
    assert event.e2e_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("outcome", "code", "expected"),
    [
        (RequestState.REJECTED, "queue_full", Ended("r", 0, is_completed=False)),
        (RequestState.REJECTED, "deadline_unmeetable", Ended("r", 0, is_completed=False)),
        (RequestState.REJECTED, "quota_exceeded", Withdrawn("r", None)),
        (RequestState.CANCELLED, "cancelled", Withdrawn("r", 5)),
        (RequestState.FAILED, "client_too_slow", Withdrawn("r", 5)),
        (RequestState.FAILED, "request_failed", Ended("r", 5, is_completed=False)),
        (RequestState.TIMED_OUT, "deadline_exceeded", Ended("r", 5, is_completed=False)),
    ],
)
def test_what_did_not_complete_counts_against_the_pools_only_where_they_are_to_blame(
    outcome: RequestState, code: str, expected: object
) -> None:
    assert event_of(ended(outcome, code), None) == expected


def test_pools_are_those_that_serve_and_settled_when_nobody_is_missing() -> None:
    workers = [
        {"worker": "prefill-0", "role": "prefill", "state": "serves"},
        {"worker": "decode-0", "role": "decode", "state": "serves", "fixed_role": "it is a hybrid"},
        {"worker": "decode-1", "role": "decode", "state": "serves"},
    ]
    status = {"ready": True, "reason": "", "workers": workers}
    assert pools_of(status) == Pools(Split(1, 2), Split(1, 1))
    workers.append({"worker": "decode-2", "state": "failed", "reason": "no memory"})
    assert pools_of(status).unsettled == "decode-2 failed"
    assert pools_of({"ready": False, "reason": "no link", "workers": workers[:3]}).unsettled == "no link"


def test_before_it_has_begun_it_hears_nothing_and_says_so() -> None:
    tuner = PoolTuner(settings(), made_profile(), None, SchedulerConfig(), CoordinatorConfig(), None)
    tuner.ended(ended(RequestState.COMPLETED), 0.0)
    assert tuner.status()["why_nothing"] == "it has not begun"
    assert set(tuner.counts()) == set(TunerMetric)
    assert tuner.median_errors() == {}


# ── a bug of its own ────────────────────────────────────────────────────────────────────────────────────────


class Site:
    """A `TunedServer` whose pools are empty and whose clock stands still."""

    def __init__(self) -> None:
        self.pool_desk = PoolDesk(Registry(), lambda _: None, self.now)

    def now(self) -> float:
        return 0.0

    def worker_terms(self) -> WorkerTerms | None:
        return None


async def test_a_bug_of_its_own_ends_it_and_nothing_else_and_is_told_everywhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it hears of a request, or time passes: who tells it must not suffer."""
    monkeypatch.setattr(tuner_module, "TICK_S", 0.0)
    tuner = PoolTuner(settings(), made_profile(), None, SchedulerConfig(), CoordinatorConfig(), None)
    desk = PoolDesk(Registry(), lambda _: None, lambda: 0.0)
    desk.tuner = tuner
    exposition = Exposition(CoreDriver().core, Counter(), lambda: 0.0)
    exposition.tuner = tuner
    has_begun = asyncio.Event()
    monkeypatch.setattr(AutotuneCore, "handle", lambda *_: has_begun.set() or [])
    running = asyncio.create_task(tuner.run(Site()))
    await has_begun.wait()
    assert b'twinpool_autotune_ended{reason=""} 0.0' in exposition.text()
    monkeypatch.setattr(AutotuneCore, "handle", lambda *_: [].pop())
    tuner.ended(ended(RequestState.COMPLETED), 0.0)
    tuner.ended(ended(RequestState.COMPLETED), 0.0)
    await running
    assert tuner.why_ended.startswith("IndexError at test_autotune_tuner.py:")
    assert f'twinpool_autotune_ended{{reason="{tuner.why_ended}"}} 1.0'.encode() in exposition.text()
    shown = desk.pools()["autotune"]
    assert shown["ended"] == tuner.why_ended
    assert tuning_lines(shown) == [
        f"autotune act: it has ended by a bug in Twinpool ({tuner.why_ended}; the server's log has more); "
        "serving goes on"
    ]
    assert caplog.text.count("the pools are not tuned any more") == 1


async def test_a_bug_in_a_prediction_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner_module, "TICK_S", 0.0)
    monkeypatch.setattr(
        AutotuneCore, "handle", lambda *_: [Predict(1, PastTraffic((), 1.0, 0.0, 0.0), Split(1, 1))]
    )
    monkeypatch.setattr(Site, "worker_terms", lambda _: {}["terms"])
    tuner = PoolTuner(settings(), made_profile(), None, SchedulerConfig(), CoordinatorConfig(), None)
    await tuner.run(Site())
    assert tuner.why_ended.startswith("KeyError at")


# ── the process that predicts ───────────────────────────────────────────────────────────────────────────────


def question(seconds: float = 30.0) -> LiveQuestion:
    return LiveQuestion(
        profile=made_profile(), transport=None, kv=KVLayout(2, 2, 8, 16, Dtype.BFLOAT16), num_blocks=100,
        max_model_len=1024, scheduler=SchedulerConfig(), max_queue_requests=10, max_queue_tokens=1000, max_wait_s=1.0,
        slo=SLO, attainment=0.9, traffic=PastTraffic((), 1.0, 0.0, 0.0), prefill=1, decode=1,
        sizes=None, seconds=seconds,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.stdin.buffer.read(); sys.exit('no such module')", "status 1: no such module"),
        ("import sys; sys.stdin.buffer.read(); print('hello')", "status 0: it said nothing"),
        (
            "import os, signal, sys; sys.stdin.buffer.read(); os.kill(os.getpid(), signal.SIGALRM)",
            "more than 30 s",
        ),
        ("raise SystemExit(3)", "status 3"),
    ],
)
def test_a_process_that_fails_says_why(program: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "COMMAND", (sys.executable, "-c", program))
    answer = asyncio.run(ask(question()))
    assert answer.prediction is None
    assert words in answer.reason


def test_a_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "COMMAND", (sys.executable, "-c", "import signal; signal.pause()"))
    monkeypatch.setattr(asking, "_GRACE_S", 0.0)
    assert "more than 0.2 s" in asyncio.run(ask(question(seconds=0.2))).reason


# ── the regret log ──────────────────────────────────────────────────────────────────────────────────────────


def test_lines_are_json_with_the_time_of_day(tmp_path: Path) -> None:
    log = RegretLog(str(tmp_path / "tune.jsonl"))
    log.put(LINE)
    log.close()
    (line,) = map(json.loads, (tmp_path / "tune.jsonl").read_text().splitlines())
    assert line["kind"] == "measured"
    assert line["why"] == "nothing came"
    assert line["time"].endswith("+00:00")


def test_a_file_of_before_is_moved_aside_and_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tune.jsonl").write_text("before\n")
    RegretLog(str(tmp_path / "tune.jsonl")).close()
    assert (tmp_path / "tune.jsonl.1").read_text() == "before\n"
    with pytest.raises(ConfigError, match="--autotune-log is"):
        RegretLog(str(tmp_path))


def test_a_disk_that_takes_nothing_costs_lines_and_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RegretLog(str(tmp_path / "tune.jsonl"))
    (tmp_path / "tune.jsonl").unlink()
    tmp_path.rmdir()
    log.put(LINE)
    log.put(LINE)
    log.close()
    assert log.num_lost == 2
    assert caplog.messages == ["--autotune-log: lines are lost: No such file or directory; serving goes on"]


class Impatient(RegretLog):
    """Its end does not wait for the disk."""

    def close(self, timeout_s: float = 0.0) -> None:
        super().close(timeout_s)


async def test_a_disk_that_hangs_holds_up_neither_the_tuning_nor_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tick has a line; the first is never written."""
    hangs, goes_on, has_ticked = threading.Event(), threading.Event(), asyncio.Event()
    ticks = 0

    def hang(_file: RecordFile, _line: bytes) -> None:
        hangs.set()
        assert goes_on.wait(10)

    def tick(*_: object) -> list[Write]:
        nonlocal ticks
        ticks += hangs.is_set()
        if ticks == 3:
            has_ticked.set()
        return [Write(LINE)]

    monkeypatch.setattr(RecordFile, "append", hang)
    monkeypatch.setattr(tuner_module, "TICK_S", 0.0)
    monkeypatch.setattr(AutotuneCore, "handle", tick)
    log = Impatient(str(tmp_path / "tune.jsonl"))
    tuner = PoolTuner(settings(), made_profile(), None, SchedulerConfig(), CoordinatorConfig(), log)
    running = asyncio.create_task(tuner.run(Site()))
    async with asyncio.timeout(10):
        await has_ticked.wait()
        running.cancel()
        await asyncio.wait({running})
    assert running.cancelled()
    assert not goes_on.is_set(), "the disk hangs still"
    assert tuner.counts()[TunerMetric.NOT_LOGGED] >= 2
    goes_on.set()
    log.close(timeout_s=10)
