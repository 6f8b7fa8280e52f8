"""What the simulator asks of hardware and model: the one interface of all latency models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from twinpool.planner.step_shape import StepShape


@dataclass(frozen=True, slots=True)
class Overheads:
    """What requests and steps cost outside of the model, in seconds.

    `request_s`: from the client's send until the coordinator queues it (HTTP, validation, tokenizing), with
    `prompt_token_s` more for each prompt token; `control_s`: a message from one process to another; `output_s`: from a
    step's end until its tokens are at the client; `handoff_s`: what a transfer takes beside its bytes; `wake_s`: what a
    step takes longer if its worker had nothing to do before, as caches are cold and processors slept, with
    `busy_wake_s` more for each other worker of the machine that computes.
    """

    request_s: float = 0.0
    prompt_token_s: float = 0.0
    control_s: float = 0.0
    output_s: float = 0.0
    handoff_s: float = 0.0
    wake_s: float = 0.0
    busy_wake_s: float = 0.0


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
