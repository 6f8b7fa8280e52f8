"""What the simulator asks of hardware and model: the one interface of all latency models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from twinpool.planner.step_shape import StepShape


@dataclass(frozen=True, slots=True)
class Overheads:
    """What requests and steps cost outside of the model, in seconds.

    `request_s`: from the client's send until the coordinator queues it (HTTP, validation, tokenizing), with
    `prompt_token_s` more for each prompt token; `control_s`: a message from one process to another; `output_s`: from a
    step's end until its tokens are at the client; `handoff_s`: what a transfer takes beside its bytes; `wake_s`: what a
    step takes longer if its worker had nothing to do before, as caches are cold and processors slept, with
    `busy_wake_s` more for each other worker of the machine that computes; `delivery_s`: by how much a step of a prefill
    worker is delayed when another worker of the machine ends one meanwhile, as the tokens are delivered on the same
    processors, with `delivery_token_s` more for each of these; all in all by no more than the step takes alone.
    """

    request_s: float = 0.0
    prompt_token_s: float = 0.0
    control_s: float = 0.0
    output_s: float = 0.0
    handoff_s: float = 0.0
    wake_s: float = 0.0
    busy_wake_s: float = 0.0
    delivery_s: float = 0.0
    delivery_token_s: float = 0.0


class ServiceTimes(Protocol):
    """Times of one worker (all accelerators of its tensor-parallel group together). Pure functions, in seconds."""

    @property
    def name(self) -> str:
        """What it is, for people and reports: hardware, model, source."""
        ...

    @property
    def overheads(self) -> Overheads:
        """What is beside steps and transfers."""
        ...

    def step_s(self, shape: StepShape, num_busy: int = 0) -> float:
        """How long a step takes while `num_busy` other workers of the same machine compute, too. Never falls when any
        number in `shape` or `num_busy` rises."""
        ...

    def transfer_s(self, num_bytes: int) -> float:
        """How long so many bytes of KV take from one worker to another, alone on the link."""
        ...


StepsAhead = Callable[[StepShape, int, int], Sequence[float]]
"""How long each of so many steps takes, of sequences that have a token more in each, beside so many other workers."""


@runtime_checkable
class ForeseesSteps(Protocol):
    """Service times with a quick way to `StepsAhead`: what a loop over `step_s` gives, to the last bit."""

    def steps_ahead_s(self, shape: StepShape, num_steps: int, num_busy: int) -> Sequence[float]:
        """Of `num_steps` steps, the first of `shape`."""
        ...


def steps_ahead(times: ServiceTimes) -> StepsAhead:
    """That of `times`: their own, or `step_s` of each step."""
    if isinstance(times, ForeseesSteps):
        return times.steps_ahead_s
    return lambda shape, num_steps, num_busy: [
        times.step_s(shape.after(number), num_busy) for number in range(num_steps)
    ]
