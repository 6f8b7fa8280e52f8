"""Service times of a worker by its profile."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

from twinpool.engine.processor import processor
from twinpool.errors import ConfigError
from twinpool.planner.profile.saved import Profile, load_profile
from twinpool.planner.step_shape import StepShape
from twinpool.planner.times.service_times import Overheads


class FittedTimes:
    """`ServiceTimes` of a measured worker.

    KV travels by `transport`, or by the one that a server would take here. Where the profile has none (one worker was
    measured, or a transport does not work on its machine), asking for a transfer is an error.
    """

    __slots__ = ("_fit", "_knots", "_name", "_rows", "_served", "_slope", "_slow", "_transfer", "profile")

    def __init__(self, profile: Profile, transport: str | None = None) -> None:
        """Raises ConfigError if the profile has no such transport."""
        self.profile = profile
        self._fit = profile.steps
        self._knots, self._rows = profile.steps.row_knots, profile.steps.rows_s
        self._slope = _slope_at_end(self._knots, self._rows)
        self._slow = profile.slow_down
        self._served = profile.served
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
        """As `ServiceTimes.step_s`. A step of nothing takes what one token takes."""
        num_sequences, context, num_chunks, prompt_tokens, pairs, prompt_context = shape
        fit, served, slow = self._fit, self._served, self._slow
        weights_s = self._rows[0]
        products_s = (
            self._products_s(num_sequences + prompt_tokens)
            - weights_s
            + fit.sequence_s * num_sequences
            + fit.chunk_s * num_chunks
        )
        context_s = fit.context_token_s * context + fit.prompt_context_token_s * prompt_context
        pairs_s = fit.prompt_pair_s * pairs
        around_s = served.step_s + served.sequence_s * num_sequences
        alone_s = weights_s + products_s + context_s + pairs_s
        if not num_busy:
            return alone_s + around_s
        if slow is None:  # they share this one's cores
            return (alone_s + around_s) * (1 + num_busy)
        return (
            alone_s
            + around_s
            + num_busy
            * (
                slow.weights * weights_s
                + slow.products * products_s
                + slow.context * context_s
                + slow.pairs * pairs_s
                + served.busy_sequence_s * num_sequences
            )
        )

    def transfer_s(self, num_bytes: int) -> float:
        """As `ServiceTimes.transfer_s`. Raises ConfigError if the profile has no transport."""
        if self._transfer is None:
            raise ConfigError(
                f"the profile of {self._name} has no transfer times, so it cannot tell what two pools take: measure "
                "with --threads of at most half of the cores"
            )
        return self._transfer.start_s + self._transfer.byte_s * num_bytes

    def _products_s(self, rows: int) -> float:
        knots, times = self._knots, self._rows
        if rows >= knots[-1]:
            return times[-1] + self._slope * (rows - knots[-1])
        if rows <= 1:
            return times[0]
        after = bisect_left(knots, rows)
        low, high = knots[after - 1], knots[after]
        between = times[after - 1] + (times[after] - times[after - 1]) * (rows - low) / (high - low)
        return min(between, times[after])  # rounding must not lift it beyond the knot


def load_times(path: Path, *, model: str | None = None, transport: str | None = None) -> FittedTimes:
    """The times in a file of `twinpool profile`.

    Raises:
        ConfigError: it cannot be read, is no profile, is of another model than `model`, or lacks `transport`.
    """
    profile = load_profile(path)
    if model is not None and profile.model != model:
        raise ConfigError(
            f"{path} is a profile of {profile.model}, not of {model}: measure that with `twinpool profile`"
        )
    return FittedTimes(profile, transport)


def doubts(profile: Profile) -> list[str]:
    """Why its times may not hold here, a sentence each: what it says itself, and that another machine was measured."""
    found = list(profile.warnings)
    if (measured := profile.machine.get("cpu")) != (here := processor().name):
        found.append(f"the profile was measured on {measured}, this machine is {here}: it tells of that one")
    return found


def _slope_at_end(knots: tuple[int, ...], times: tuple[float, ...]) -> float:
    """Seconds per row beyond the last knot: over its upper half, as one short segment may be noise."""
    first = bisect_left(knots, knots[-1] / 2)
    first = min(first, len(knots) - 2)
    return (times[-1] - times[first]) / (knots[-1] - knots[first])
