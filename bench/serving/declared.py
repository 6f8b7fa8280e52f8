"""Metrics that an event CSV declares, held against those that its events give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeAlias

from twinpool.bench.serving.event_csv import (
    DECLARED,
    Declared,
    RequestEvents,
    number_in,
    parse_events,
    record_of,
)
from twinpool.bench.serving.metrics import RequestMetrics, decode_s, request_metrics
from twinpool.errors import ConfigError

_MOST_EXPONENT = 300
"""Of ten, that a float still holds."""
_Value: TypeAlias = Callable[[RequestMetrics], float | None]


def read_request(text: str) -> tuple[RequestEvents, RequestMetrics]:
    """Reads a file, computes its metrics and holds what it declares against them. Raises ConfigError."""
    events = parse_events(text)
    found = request_metrics(record_of(events))
    for declared in events.declared:
        hold(declared, found)
    return events, found


@dataclass(frozen=True, slots=True)
class _Metric:
    """A metric that can be declared, how many of its unit are a second or a token/s, and what it comes to if gaps are
    counted wrongly, as many as tokens."""

    value: _Value
    scale: float = 1.0
    off_by_one: _Value | None = None


def _time(name: str, value: _Value, off_by_one: _Value | None = None) -> dict[str, _Metric]:
    return {f"{name}_s": _Metric(value, 1.0, off_by_one), f"{name}_ms": _Metric(value, 1e3, off_by_one)}


def _one_gap_more_s(request: RequestMetrics) -> float | None:
    """From the first output to the last, if there were a gap more."""
    return None if request.tpot_s is None else request.tpot_s * request.record.output_tokens


def _e2e_off_by_one_s(request: RequestMetrics) -> float | None:
    longer = _one_gap_more_s(request)
    return None if longer is None or request.ttft_s is None else request.ttft_s + longer


def _tpot_off_by_one_s(request: RequestMetrics) -> float | None:
    decode, tokens = decode_s(request.record), request.record.output_tokens
    return None if decode is None or not tokens else decode / tokens


def _decode_rate_off_by_one(request: RequestMetrics) -> float | None:
    tpot = _tpot_off_by_one_s(request)
    return 1 / tpot if tpot else None


METRICS: dict[str, _Metric] = {
    **_time("ttft", lambda request: request.ttft_s),
    **_time("decode", lambda request: decode_s(request.record), _one_gap_more_s),
    **_time("e2e", lambda request: request.e2e_s, _e2e_off_by_one_s),
    **_time("tpot", lambda request: request.tpot_s, _tpot_off_by_one_s),
    **_time("itl_p99", lambda request: request.itl_p99_s),
    "decode_tokens_per_s": _Metric(lambda request: request.decode_rate_per_s, 1.0, _decode_rate_off_by_one),
    "request_tokens_per_s": _Metric(lambda request: request.request_rate_per_s),
    "output_tokens": _Metric(lambda request: request.record.output_tokens),
}
"""By the name behind `declared_`."""


def hold(declared: Declared, request: RequestMetrics) -> None:
    """Raises ConfigError unless the events give what is declared, rounded to as many decimals as it has."""
    metric = METRICS.get(declared.name)
    if metric is None:
        known = ", ".join(DECLARED + name for name in METRICS)
        raise ConfigError(f"line {declared.line} has {DECLARED}{declared.name}; known are {known}")
    wanted = number_in(declared.line, declared.text)
    exponent = Decimal(declared.text).as_tuple().exponent
    assert isinstance(exponent, int), "the number is finite"
    tolerance = 0.5 * 10.0 ** min(exponent, _MOST_EXPONENT) * (1 + 1e-9)

    def is_wanted(value: float | None) -> bool:
        return value is not None and abs(wanted - metric.scale * value) <= tolerance

    found = metric.value(request)
    if is_wanted(found):
        return
    where = f"line {declared.line} has {DECLARED}{declared.name} {declared.text}, and the events give "
    shown = "none" if found is None else f"{metric.scale * found:.9g}"
    if metric.off_by_one is not None and is_wanted(metric.off_by_one(request)):
        tokens = request.record.output_tokens
        raise ConfigError(f"{where}{shown}: off by one, {tokens} tokens have {tokens - 1} gaps between them")
    raise ConfigError(f"{where}{shown}; correct the one or the others")
