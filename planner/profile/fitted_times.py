"""Service times of a worker by its profile."""

from __future__ import annotations

import math
from pathlib import Path

from twinpool.engine.processor import processor
from twinpool.errors import ConfigError
from twinpool.planner.profile.saved import Profile, load_profile
from twinpool.planner.profile.step_model import StepModel
from twinpool.planner.step_shape import StepShape
from twinpool.planner.times.service_times import Overheads


class FittedTimes:
    """`ServiceTimes` of a measured worker.

    KV travels by `transport`, or by the one that a server would take here. Where the profile has none (one worker was
    measured, or a transport does not work on its machine), asking for a transfer is an error.
    """

    __slots__ = ("_model", "_name", "_places", "_served", "_slow", "_transfer", "profile")

    def __init__(self, profile: Profile, transport: str | None = None) -> None:
        """Raises ConfigError if the profile has no such transport."""
        self.profile = profile
        self._model = StepModel(profile.steps)
        self._slow = profile.slow_down
        self._served = profile.served
        self._places = self._places_of(profile)
        known = {fit.transport: fit for fit in profile.transfers}
        if transport is not None and transport not in known:
            raise ConfigError(
                f"transport is {transport!r}; the profile of {profile.model} has {', '.join(known) or 'none'}"
            )
        self._transfer = known[transport] if transport is not None else next(iter(known.values()), None)
        machine = profile.machine.get("cpu", "a machine without a name")
        self._name = (
            f"{profile.model} in {profile.dtype}, {profile.threads} "
            f"thread{'' if profile.threads == 1 else 's'} of {machine}, profiled {profile.measured_at[:10]}"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FittedTimes):
            return NotImplemented
        return self.profile == other.profile and self._transfer == other._transfer

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return f"FittedTimes({self._name!r})"

    @property
    def name(self) -> str:
        """Model, threads, machine and day."""
        return self._name

    @property
    def overheads(self) -> Overheads:
        """As measured through a server, its load generator on the same machine."""
        return self.profile.overheads

    def step_s(self, shape: StepShape, num_busy: int = 0) -> float:
        """As `ServiceTimes.step_s`. More workers than there are cores for take turns on these."""
        memory_s, arithmetic_s = self._model.parts(shape)
        served, slow = self._served, self._slow
        taken_s = memory_s + arithmetic_s + served.step_s
        taken_s += served.sequence_s * shape.num_sequences + served.chunk_s * shape.num_chunks
        if not num_busy:
            return taken_s
        if slow is not None:
            beside_s = slow.memory * memory_s + slow.arithmetic * arithmetic_s
            # In steps of prompts each delivery counts by itself (`Overheads.delivery_s`).
            if shape.num_sequences:
                beside_s += served.busy_step_s + served.busy_sequence_s * shape.num_sequences
            taken_s += min(num_busy, self._places - 1) * beside_s + served.beside_chunk_s * shape.num_chunks
        return taken_s * max(1.0, (1 + num_busy) / self._places)

    @staticmethod
    def _places_of(profile: Profile) -> float:
        """How many workers have cores of their own at a time."""
        if profile.num_cores is None:
            return 1.0 if profile.slow_down is None else math.inf
        return max(1.0, profile.num_cores / profile.threads)

    def transfer_s(self, num_bytes: int) -> float:
        """As `ServiceTimes.transfer_s`. Raises ConfigError if the profile has no transport."""
        if self._transfer is None:
            raise ConfigError(
                f"the profile of {self._name} has no transfer times, so it cannot tell what two pools take: give "
                "--link GB/S (simulate and plan have it), or measure with --threads of at most half of the cores"
            )
        return self._transfer.start_s + self._transfer.byte_s * num_bytes


def load_times(path: Path) -> FittedTimes:
    """The times in a file of `twinpool profile`. Raises ConfigError: it cannot be read, or is no profile."""
    return FittedTimes(load_profile(path))


def doubts(profile: Profile) -> list[str]:
    """Why its times may not hold here, a sentence each: what it says itself, and that another machine was measured."""
    found = list(profile.warnings)
    if (measured := profile.machine.get("cpu")) != (here := processor().name):
        found.append(f"the profile was measured on {measured}, this machine is {here}: it tells of that one")
    return found
