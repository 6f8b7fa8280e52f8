"""The process that predicts: `python -m twinpool.planner.autotune.child`, one question on stdin, its answer on stdout.

It runs only where nobody else wants the processor, and ends by itself when its time is up, also if the server is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import replace

import msgspec
import setproctitle

from twinpool.bench.serving.slo import Slo
from twinpool.config import CoordinatorConfig, SchedulerConfig
from twinpool.errors import TwinpoolError
from twinpool.layout import KVLayout
from twinpool.planner.autotune.predicting import Aim, predict
from twinpool.planner.autotune.words import PastTraffic, Prediction, Split
from twinpool.planner.plan.capacity import KvCapacity
from twinpool.planner.plan.layouts import Fleet, WorkerKind
from twinpool.planner.plan.simulated import simulated
from twinpool.planner.profile.fitted_times import FittedTimes
from twinpool.planner.profile.saved import Profile
from twinpool.prefill_pool.core import TOKEN_BUDGET

NICENESS = 19
MACHINE = "the server's machine"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be predicted, of workers of `profile`, whose KV travels by `transport` (None: as a server would have
    it here). `seconds` is what it may take."""

    profile: Profile
    transport: str | None
    kv: KVLayout
    num_blocks: int
    max_model_len: int
    scheduler: SchedulerConfig
    max_queue_requests: int
    max_queue_tokens: int
    max_wait_s: float
    slo: Slo
    attainment: float
    traffic: PastTraffic
    prefill: int
    decode: int
    seconds: float


class Answer(msgspec.Struct, frozen=True):
    """The prediction, or why there is none."""

    prediction: Prediction | None
    reason: str = ""


def fleet_of(question: Question) -> Fleet:
    """Workers as the server has them. Raises ConfigError."""
    times = FittedTimes(question.profile, question.transport)
    kv_bytes = question.num_blocks * question.kv.block_bytes
    capacity = KvCapacity(question.kv, 1, kv_bytes, 0, kv_bytes, question.num_blocks)
    budget = question.scheduler.token_budget or TOKEN_BUDGET
    return Fleet(
        kinds={1: WorkerKind(times, capacity)},
        kv=question.kv,
        max_model_len=question.max_model_len,
        prefill=replace(question.scheduler, token_budget=budget),
        decode=question.scheduler,
        token_budgets=(),
        coordinator=CoordinatorConfig(
            max_queue_requests=question.max_queue_requests,
            max_queue_tokens=question.max_queue_tokens,
            max_wait_s=question.max_wait_s,
        ),
        machine=MACHINE,
    )


def answer(question: Question) -> Answer:
    """Predicts, or says why not."""
    began_at = time.monotonic()
    try:
        prediction = predict(
            question.traffic,
            Split(question.prefill, question.decode),
            fleet_of(question),
            Aim(question.slo, question.attainment),
            simulated,
        )
    except TwinpoolError as exc:
        return Answer(None, str(exc))
    return Answer(msgspec.structs.replace(prediction, took_s=time.monotonic() - began_at))


def give_way() -> None:
    """Everybody else's work goes first from here on."""
    os.nice(NICENESS)
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    """One question, one answer."""
    setproctitle.setproctitle("twinpool autotune")
    question = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Question)
    signal.setitimer(signal.ITIMER_REAL, question.seconds)  # whose signal ends the process
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer(question)))


if __name__ == "__main__":
    give_way()
    main()
