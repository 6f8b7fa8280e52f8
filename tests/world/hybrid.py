"""Hybrids in the world: how long their steps really take, and what they promise beyond what all workers do."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from twinpool.config import Role
from twinpool.coordinator.state import CoordinatorCore
from twinpool.coordinator.worker import Worker
from twinpool.messages import Prefill
from twinpool.request import Job
from twinpool.step_pace import LEAST_CHUNK_TOKENS, StepPace, prompt_limit_s
from twinpool.worker.core import StepTimed
from world.story import Broken

NOISE = 0.1
"""By this part of it a step is shorter or longer than its pace says."""
MARGIN = 1.3
"""What noise in measurements and in the step itself may add to a step that was to take so long."""
TIMED = ((1, 0), (8, 0), (0, LEAST_CHUNK_TOKENS), (0, 4 * LEAST_CHUNK_TOKENS))
SILENT_S = 0.4
"""A worker that has missed a heartbeat may be frozen."""
CLEARLY = 2.0
"""By this factor a prompt must start later than elsewhere for a choice to be clearly wrong."""


def step_s(pace: StepPace, num_sequences: int, num_prompt_tokens: int, dice: Random) -> float:
    """How long such a step takes this time."""
    mean_s = pace.decode_step_s(num_sequences) + num_prompt_tokens * pace.prompt_token_s
    return mean_s * dice.uniform(1 - NOISE, 1 + NOISE)


def timed_steps(pace: StepPace, dice: Random) -> Iterator[StepTimed]:
    """What a hybrid measures at its start."""
    for num_sequences, num_prompt_tokens in TIMED:
        yield StepTimed(
            num_sequences, num_prompt_tokens, step_s(pace, num_sequences, num_prompt_tokens, dice)
        )


def check_step(
    is_decode: bool, num_streams: int, num_tokens: int, itl_budget_s: float, seconds: float
) -> None:
    """A hybrid's step with prompt tokens, so many of all its tokens, is short where streams run, or may join."""
    num_prompt_tokens = num_tokens - num_streams
    if num_prompt_tokens and (num_streams or is_decode):
        limit_s = MARGIN * prompt_limit_s(itl_budget_s)
        if seconds > limit_s:
            what = f"{num_prompt_tokens} prompt tokens beside {num_streams} streams take {seconds:.3f} s"
            raise Broken("a local prefill keeps the ITL budget", f"{what}, allowed are {limit_s:.3f} s")


def check_choice(
    core: CoordinatorCore, pace: StepPace, prefill: Worker, message: Prefill, now: float
) -> None:
    """No prompt goes to wait at a prefill worker while a decode worker has nothing to do and would start it sooner."""
    job: Job = message.job
    wait_s = (prefill.pending_tokens - prefill.legs[job.key].pending_tokens) * pace.prompt_token_s
    for worker in core.registry.of_role(Role.DECODE):
        if now - worker.seen_at > SILENT_S or worker.usable_slots < worker.num_slots or not worker.stays:
            continue
        budget_s, others = worker.info.itl_budget_s, worker.legs.keys() - {job.key}
        is_idle = not others and worker.full_until == 0.0 and worker.stats is not None and worker.stats.pace
        if not is_idle or budget_s is None or worker.num_slots < 2 * len(job.token_ids) + 64:
            continue
        chunk = pace.prompt_tokens_within(prompt_limit_s(budget_s) / MARGIN, 0)
        local_s = pace.prompt_s(len(job.token_ids), 0, chunk) if chunk else None
        if local_s is not None and wait_s > CLEARLY * local_s:
            raise Broken(
                "hybrids conserve work",
                f"{job.key} waits {wait_s:.3f} s at {prefill.worker_id}; {worker.worker_id} would need {local_s:.3f} s",
            )
