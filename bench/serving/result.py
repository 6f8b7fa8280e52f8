"""The result of a run as one JSON object that reads like `vllm bench serve --save-result`.

A field that has vLLM's name has vLLM's meaning, so that plots and tables made for it compare like with like:
percentiles interpolate between ranks (numpy's default), an `itl` is a gap between *chunks*, latencies count from the
moment of sending, `failed` is everything that did not complete. One is stricter: `request_goodput` counts TTFT and E2E
from the intended time. What is ours, by our definitions, is under `twinpool`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import numpy as np

from twinpool.bench.serving.distributions import Values, distribution
from twinpool.bench.serving.metrics import RequestMetrics, request_metrics, wait_before_send_s
from twinpool.bench.serving.record import RequestRecord, Run, token_times
from twinpool.bench.serving.summary import Summary
from twinpool.config import require

FORMAT = 1
"""Of what is under `twinpool`; another number means other fields."""
PERCENTILE_METRICS = ("ttft", "tpot", "itl", "e2el")
"""What vLLM calls the metrics that have a mean, a median, a deviation and percentiles."""
METRIC_PERCENTILES = (50.0, 90.0, 95.0, 99.0)
_SETTINGS = {"endpoint_type": "backend", "backend": "backend", "label": "label", "model_id": "model",
             "tokenizer_id": "tokenizer"}  # fmt: skip
"""Fields, and the settings of a run that they are, in the order of vLLM's file."""
_TRAFFIC = ("request_rate", "burstiness", "max_concurrency")
_RAMP_UP = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")


def result_json(
    run: Run,
    summary: Summary,
    *,
    metadata: Mapping[str, str] | None = None,
    percentile_metrics: Sequence[str] = PERCENTILE_METRICS,
    metric_percentiles: Sequence[float] = METRIC_PERCENTILES,
    is_detailed: bool = False,
) -> dict[str, Any]:
    """The whole object, of JSON values only. `summary` is of this run; `is_detailed` adds a list for each request.

    Of `run.settings` it takes what has the names of vLLM's flags (`backend`, `label`, `model`, `tokenizer`,
    `num_prompts`, `request_rate`, `burstiness`, `max_concurrency`, `ramp_up_…`); what was not set is None. Raises
    ConfigError if a metric or percentile is none.
    """
    unknown = set(percentile_metrics) - set(PERCENTILE_METRICS)
    allowed = f"names among {', '.join(PERCENTILE_METRICS)}, separated by commas"
    require("--percentile-metrics", ",".join(percentile_metrics), not unknown, allowed)
    for percent in metric_percentiles:
        require("--metric-percentiles", percent, 0 <= percent <= 100, "0 to 100, separated by commas")
    requests = [request_metrics(record) for record in summary.window.measured(run.requests)]
    completed = [request for request in requests if request.is_completed]
    fields = _header(run) | dict(metadata or {}) | _traffic(run) | _totals(summary, requests)
    if is_detailed:
        fields |= _per_request(requests)
    fields |= {
        "max_output_tokens_per_s": peak_output_tokens_per_s(request.record for request in completed),
        "max_concurrent_requests": peak_concurrency(request.record for request in completed),
    }
    for name in percentile_metrics:
        fields |= _statistics(name, _values_s(name, completed), metric_percentiles)
    ours: dict[str, Any] = _as_json(fields | {"twinpool": _own(run, summary)})
    return ours


def peak_concurrency(records: Iterable[RequestRecord]) -> int:
    """The most of these requests that were between sending and last output at one time."""
    moves = []
    for record in records:
        if record.chunks:
            moves += [(record.sent_at_s, 1), (record.chunks[-1].at_s, -1)]
    running = most = 0
    for _, change in sorted(moves):  # who leaves goes first: [sent, last output)
        running += change
        most = max(most, running)
    return most


def peak_output_tokens_per_s(records: Iterable[RequestRecord]) -> float:
    """The most tokens that came within one of the seconds since the first of these requests was sent."""
    records = list(records)
    start = min((record.sent_at_s for record in records), default=0.0)
    seconds: Counter[int] = Counter()
    for record in records:
        if (times := token_times(record)) is not None:
            seconds.update(int(at_s - start) for at_s in times)
            continue
        for chunk in record.chunks:
            seconds[int(chunk.at_s - start)] += chunk.num_tokens
    return float(max(seconds.values(), default=0))


def _header(run: Run) -> dict[str, Any]:
    settings = run.settings
    started = datetime.fromisoformat(run.started_at)
    return {
        "date": started.strftime("%Y%m%d-%H%M%S"),
        **{field: settings.get(setting) for field, setting in _SETTINGS.items()},
        "num_prompts": settings.get("num_prompts", len(run.requests)),
    }


def _traffic(run: Run) -> dict[str, Any]:
    """A rate that is not set is infinite for vLLM: all at once."""
    settings = {"request_rate": math.inf, "burstiness": 1.0} | {
        name: value for name, value in run.settings.items() if value is not None
    }
    ramp_up = _RAMP_UP if settings.get(_RAMP_UP[0]) is not None else ()
    return {name: settings.get(name) for name in (*_TRAFFIC, *ramp_up)}


def _totals(summary: Summary, requests: Sequence[RequestMetrics]) -> dict[str, Any]:
    cohort, rates = summary.cohort, summary.rates
    completed = sum(request.is_completed for request in requests)
    return {
        "duration": summary.window.duration_s,
        "completed": completed,
        "failed": len(requests) - completed,
        "total_input_tokens": cohort.input_tokens,
        "total_output_tokens": cohort.output_tokens,
        "request_throughput": rates.requests_per_s,
        "request_goodput": rates.goodput_per_s,
        "output_throughput": rates.output_tokens_per_s,
        "total_token_throughput": rates.input_tokens_per_s + rates.output_tokens_per_s,
    }


def _per_request(requests: Sequence[RequestMetrics]) -> dict[str, list[Any]]:
    """A list each, in the order of the requests. As vLLM has it, one that did not complete has zeros and an error."""
    good = [request.is_completed for request in requests]
    fields: dict[str, list[Any]] = {
        "input_lens": [request.record.input_tokens for request in requests],
        "output_lens": [request.record.output_tokens if request.is_completed else 0 for request in requests],
        "ttfts": [
            (is_good and request.ttft_s) or 0.0 for is_good, request in zip(good, requests, strict=True)
        ],
        "itls": [request.chunk_gaps_s.tolist() if request.is_completed else [] for request in requests],
        "latencies": [
            (is_good and request.e2e_s) or 0.0 for is_good, request in zip(good, requests, strict=True)
        ],
        "start_times": [request.record.sent_at_s for request in requests],
        "queue_times": [wait_before_send_s(request.record) for request in requests],
        "errors": [_error(request.record) if not request.is_completed else "" for request in requests],
    }
    if any(request.record.output is not None for request in requests):
        fields["generated_texts"] = [request.record.output or "" for request in requests]
    return fields


def _error(record: RequestRecord) -> str:
    return f"{record.ending.value}: {record.error}" if record.error else record.ending.value


def _values_s(name: str, completed: Sequence[RequestMetrics]) -> Sequence[float] | Values:
    """All values of a metric that vLLM names, by its definition."""
    match name:
        case "itl":
            return np.concatenate([np.empty(0), *(request.chunk_gaps_s for request in completed)])
        case "ttft":
            found = [request.ttft_s for request in completed]
        case "tpot":
            found = [request.tpot_s for request in completed]
        case _:
            found = [request.e2e_s for request in completed]
    return [value for value in found if value is not None]


def _statistics(
    name: str, values_s: Sequence[float] | Values, percents: Sequence[float]
) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles in ms, percentiles by numpy's default rule; None of no values."""
    names = ["mean", "median", "std", *(f"p{percent:g}" for percent in percents)]
    if not len(values_s):
        return {f"{word}_{name}_ms": None for word in names}
    ms = 1e3 * np.asarray(values_s)
    found = [ms.mean(), np.median(ms), ms.std(), *np.percentile(ms, percents)]
    return {f"{word}_{name}_ms": float(value) for word, value in zip(names, found, strict=True)}


def _own(run: Run, summary: Summary) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "percentile_rule": "nearest rank: the smallest value that at least p percent do not exceed",
        "started_at": run.started_at,
        "settings": run.settings,
        "failure_share": summary.cohort.failure_share,
        "good_share": summary.cohort.good_share,
        **msgspec.structs.asdict(summary),
        "senders": [
            {
                "num_requests": sender.num_requests,
                "send_lag": distribution(sender.send_lags_s),
                "cpu_share": sender.cpu_share,
                "stalled_share": sender.stalled_share,
                "longest_stall_s": max(sender.loop_stalls_s, default=None),
            }
            for sender in run.senders
        ],
    }


def _as_json(value: object) -> Any:
    """The value in JSON's types. JSON has no infinity: it becomes "inf", as vLLM writes an unbounded rate."""
    plain = msgspec.to_builtins(value)
    if isinstance(plain, float) and not math.isfinite(plain):
        return str(plain)
    if isinstance(plain, dict):
        return {key: _as_json(each) for key, each in plain.items()}
    if isinstance(plain, list | tuple):
        return [_as_json(each) for each in plain]
    return plain
