"""Service level objectives: which requests count for goodput."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from twinpool.bench.serving.metrics import RequestMetrics
from twinpool.errors import ConfigError

_FIELDS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "e2e_s", "itl": "itl_p99_s"}
"""What `--goodput` calls the bounds, the first three as vLLM does."""


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """What a request should keep, in seconds; None is no bound. TTFT and E2E count from the intended send time."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    itl_p99_s: float | None = None
    """At least 99 % of the request's own ITLs are to be within it."""

    def __str__(self) -> str:
        names = (
            ("TTFT", self.ttft_s),
            ("TPOT", self.tpot_s),
            ("E2E", self.e2e_s),
            ("ITL p99", self.itl_p99_s),
        )
        return ", ".join(f"{name} {bound * 1e3:,.6g} ms" for name, bound in names if bound is not None)

    def is_met(self, request: RequestMetrics) -> bool:
        """Whether the request succeeded within all bounds. One that did not complete never does.

        TPOT and ITL of a single token bound nothing; TTFT and E2E of no output are met by none.
        """
        return request.is_completed and self.holds(
            ttft_s=request.ttft_from_intended_s,
            tpot_s=request.tpot_s,
            e2e_s=request.e2e_from_intended_s,
            itl_p99_s=request.itl_p99_s,
        )

    def holds(
        self, *, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None, itl_p99_s: float | None
    ) -> bool:
        """`is_met` of a completed request with these latencies, in seconds; None where it has none."""
        return (
            _is_within(ttft_s, self.ttft_s, of_none=False)
            and _is_within(e2e_s, self.e2e_s, of_none=False)
            and _is_within(tpot_s, self.tpot_s, of_none=True)
            and _is_within(itl_p99_s, self.itl_p99_s, of_none=True)
        )


def _is_within(value: float | None, bound: float | None, *, of_none: bool) -> bool:
    if bound is None:
        return True
    return of_none if value is None else value <= bound


def parse_goodput(pairs: Sequence[str]) -> Slo | None:
    """The bounds of `--goodput ttft:300 tpot:50`, in milliseconds; None of none. Raises ConfigError."""
    bounds: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        field = _FIELDS.get(name)
        ms = _milliseconds(value)
        if field is None or ms is None:
            allowed = ", ".join(f"{known}:MILLISECONDS" for known in _FIELDS)
            raise ConfigError(f"--goodput is {pair!r}; allowed: {allowed}, like ttft:300 tpot:50")
        if field in bounds:
            raise ConfigError(f"--goodput has {name} twice; give each bound once")
        bounds[field] = ms / 1e3
    return Slo(**bounds) if bounds else None


def parse_slo(pairs: Sequence[str]) -> Slo | None:
    """The bounds of `--slo ttft=2s --slo itl=50ms`; a number without a unit is milliseconds. None of none. Raises
    ConfigError."""
    inner: list[str] = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        unit = "ms" if value.endswith("ms") else "s" if value.endswith("s") else ""
        ms = _milliseconds(value.removesuffix(unit))
        factor = 1e3 if unit == "s" else 1.0
        if not equals or name not in _FIELDS or not ms:
            allowed = ", ".join(f"{known}=TIME" for known in _FIELDS)
            raise ConfigError(f"--slo is {pair!r}; allowed: {allowed}, with times like 300ms or 2s")
        if any(each.partition(":")[0] == name for each in inner):
            raise ConfigError(f"--slo has {name} twice; give each bound once")
        inner.append(f"{name}:{ms * factor!r}")
    return parse_goodput(inner)


def _milliseconds(text: str) -> float | None:
    """A number from 0 on; None if it is none."""
    try:
        ms = float(text)
    except ValueError:
        return None
    return ms if math.isfinite(ms) and ms >= 0 else None
