"""Answers questions of live tuning by the planner's means."""

from __future__ import annotations

from dataclasses import replace

from twinpool.config import CoordinatorConfig
from twinpool.errors import TwinpoolError
from twinpool.planner.autotune.predicting import Aim, predict
from twinpool.planner.autotune.questions import Answer, LiveQuestion
from twinpool.planner.autotune.words import Split
from twinpool.planner.plan.capacity import KvCapacity
from twinpool.planner.plan.layouts import LayoutSpace, WorkerKind
from twinpool.planner.plan.simulated import simulated
from twinpool.planner.profile.fitted_times import FittedTimes
from twinpool.prefill_pool.core import TOKEN_BUDGET

MACHINE = "the server's machine"


def space_of(question: LiveQuestion) -> LayoutSpace:
    """Workers as the server has them. Raises ConfigError."""
    times = FittedTimes(question.profile, question.transport)
    kv_bytes = question.num_blocks * question.kv.block_bytes
    capacity = KvCapacity(question.kv, 1, kv_bytes, 0, kv_bytes, question.num_blocks)
    budget = question.scheduler.token_budget or TOKEN_BUDGET
    return LayoutSpace(
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


def answer(question: LiveQuestion) -> Answer:
    """Predicts, or says why not."""
    try:
        prediction = predict(
            question.traffic,
            Split(question.prefill, question.decode),
            space_of(question),
            Aim(question.slo, question.attainment),
            simulated,
            sizes=question.sizes,
        )
    except TwinpoolError as exc:
        return Answer(None, str(exc))
    return Answer(prediction)
