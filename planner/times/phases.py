"""Service times made of two measurements: prompts alone, and streams alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from twinpool.config import require
from twinpool.planner.step_shape import StepShape
from twinpool.planner.times.service_times import Overheads, ServiceTimes

_EMPTY = StepShape()


class Phases(Protocol):
    """How long steps take that are all of one kind. Never falls when a number in `shape` rises."""

    @property
    def fixed_s(self) -> float:
        """What of a step of sequences does not depend on them: launching it, reading the weights. At most what a step
        of one sequence takes."""
        ...

    def prompts_s(self, shape: StepShape) -> float:
        """A step of the chunks of `shape`, of which there is one at least."""
        ...

    def sequences_s(self, shape: StepShape) -> float:
        """A step of the sequences of `shape`, of which there is one at least."""
        ...


@dataclass(frozen=True, slots=True)
class Link:
    """What KV travels over: `bytes_per_s` of one device at best, one way, of which `share` is reached, `start_s` before
    the first byte. The share is what Mooncake reports: 71 % of 8 × ConnectX-7."""

    bytes_per_s: float
    share: float = 0.7
    start_s: float = 1e-3

    def __post_init__(self) -> None:
        require("--link", self.bytes_per_s, self.bytes_per_s > 0, "bytes per second, above 0")
        require("the link's share", self.share, 0 < self.share <= 1, "above 0, at most 1")
        require("the link's start_s", self.start_s, self.start_s >= 0, "0 or more seconds")

    def transfer_s(self, num_bytes: int, num_devices: int) -> float:
        """Each of so many devices sends its part at the same time."""
        return self.start_s + num_bytes / (self.bytes_per_s * self.share * num_devices)


class PhasedTimes:
    """`ServiceTimes` of a worker whose prompts and streams were measured apart.

    A step of both reads the weights once and is launched once, so it takes the prompts' time and what the streams take
    beside their fixed part. Nobody has measured that here.
    """

    __slots__ = ("_fixed_s", "_link", "_name", "_num_devices", "_overheads", "_phases")

    def __init__(self, name: str, phases: Phases, link: Link, num_devices: int, overheads: Overheads) -> None:
        self._name = name
        self._phases = phases
        self._fixed_s = phases.fixed_s
        self._link = link
        self._num_devices = num_devices
        self._overheads = overheads

    @property
    def name(self) -> str:
        """Model, hardware and who measured."""
        return self._name

    @property
    def overheads(self) -> Overheads:
        """What the caller said; none by itself."""
        return self._overheads

    def step_s(self, shape: StepShape, num_busy: int = 0) -> float:  # noqa: ARG002
        """As `ServiceTimes.step_s`; accelerators do not slow each other down."""
        if not shape.num_chunks:
            return self._phases.sequences_s(shape) if shape != _EMPTY else 0.0
        prompts_s = self._phases.prompts_s(shape)
        if not shape.num_sequences:
            return prompts_s
        sequences_s = self._phases.sequences_s(shape)
        return max(sequences_s, prompts_s + sequences_s - self._fixed_s)

    def transfer_s(self, num_bytes: int) -> float:
        """As `ServiceTimes.transfer_s`."""
        return self._link.transfer_s(num_bytes, self._num_devices)


class OtherLink:
    """`ServiceTimes` like another's, over a link of the user's."""

    __slots__ = ("_link", "_num_devices", "_times")

    def __init__(self, times: ServiceTimes, link: Link, num_devices: int = 1) -> None:
        self._times = times
        self._link = link
        self._num_devices = num_devices

    @property
    def name(self) -> str:
        """The other's, and the link."""
        return f"{self._times.name}, link of {self._link.bytes_per_s / 1e9:g} GB/s"

    @property
    def overheads(self) -> Overheads:
        """The other's."""
        return self._times.overheads

    def step_s(self, shape: StepShape, num_busy: int = 0) -> float:
        """The other's."""
        return self._times.step_s(shape, num_busy)

    def transfer_s(self, num_bytes: int) -> float:
        """As `ServiceTimes.transfer_s`."""
        return self._link.transfer_s(num_bytes, self._num_devices)
