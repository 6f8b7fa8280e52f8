"""A run's result as text: the sections of `vllm bench serve`, and what it does not say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from twinpool.bench.serving.distributions import Distribution, percentile
from twinpool.bench.serving.record import SIMULATION, Ending, Run
from twinpool.bench.serving.settings import TAKE_SALTS
from twinpool.bench.serving.summary import Cohort, Summary, WindowKind
from twinpool.bench.serving.timelines import agreement
from twinpool.bench.serving.verdict import load_warnings

_WIDTH = 58
_LABEL = 46
_TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency (between chunks)", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


def printed(result: Mapping[str, Any], run: Run, summary: Summary, faults: Sequence[str]) -> str:
    """The whole table. `result` is what `result_json` makes of the same run and summary.

    With `faults` it ends by saying that this is no result.
    """
    lines = [
        _title("Serving Benchmark Result", "="),
        *_totals(result, summary),
        _title("As vllm bench serve: percentiles interpolated", "="),
        *(line for name in _TITLES for line in _metric(name, result)),
        _title("Twinpool's own: percentiles by nearest rank", "="),
        *_from_intended(summary.cohort, run),
        *_every_gap(summary.cohort),
        *_stages(summary.cohort, run),
        *_generator(run),
        "=" * _WIDTH,
        *_words(run, summary, faults),
    ]
    return "\n".join(lines)


def _title(text: str, rule: str = "-") -> str:
    return f" {text} ".center(_WIDTH, rule) if rule == "=" else text.center(_WIDTH, rule)


def _row(label: str, value: object) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':<{_LABEL}} {shown}"


def _totals(result: Mapping[str, Any], summary: Summary) -> Iterator[str]:
    endings = summary.cohort.endings
    yield _row("Successful requests", result["completed"])
    yield _row("Failed requests", result["failed"])
    if result["failed"]:
        yield _row("  share of all (%)", summary.cohort.failure_share * 1e2)
    for ending in Ending:
        if ending is not Ending.COMPLETED and endings[ending]:
            yield _row(f"  {ending.value.replace('_', ' ')}", endings[ending])
    if result.get("max_concurrency") is not None:
        yield _row("Maximum request concurrency", result["max_concurrency"])
    if result.get("request_rate") not in (None, "inf"):
        yield _row("Request rate configured (RPS)", float(result["request_rate"]))
    yield _row("Benchmark duration (s)", float(result["duration"]))
    yield _row("Total input tokens", result["total_input_tokens"])
    cached, looked_up = summary.cohort.cached_tokens, summary.cohort.looked_up_tokens
    if cached is not None and looked_up:  # not all, where the server has forgotten timelines
        yield _row(
            "Input tokens found in the prefix cache", f"{cached} of {looked_up} ({cached / looked_up:.1%})"
        )
    yield _row("Total generated tokens", result["total_output_tokens"])
    yield _row("Request throughput (req/s)", float(result["request_throughput"]))
    if result.get("request_goodput") is not None:
        yield _row(f"Request goodput (req/s; {summary.slo})", float(result["request_goodput"]))
    yield _row("Output token throughput (tok/s)", float(result["output_throughput"]))
    yield _row("Peak output token throughput (tok/s)", float(result["max_output_tokens_per_s"]))
    yield _row("Peak concurrent requests", float(result["max_concurrent_requests"]))
    yield _row("Total token throughput (tok/s)", float(result["total_token_throughput"]))
    for pool, rates in summary.rates_per_accelerator.items():
        yield _row(f"Output tokens/s per accelerator, {pool}", rates.output_tokens_per_s)


def _metric(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    ending = f"_{name}_ms"
    found = {key.removesuffix(ending): value for key, value in result.items() if key.endswith(ending)}
    found = {word: value for word, value in found.items() if value is not None and word != "std"}
    if not found:
        return
    title, short = _TITLES[name]
    yield _title(title)
    for word, value in found.items():
        yield _row(f"{word.capitalize()} {short} (ms)", float(value))


def _from_intended(cohort: Cohort, run: Run) -> Iterator[str]:
    """What vLLM's table leaves out: latencies from a request's own time of arrival, which a closed loop has not."""
    if not _is_simulated(run) and not any(sender.send_lags_s for sender in run.senders):
        return
    if cohort.ttft_from_intended is None or cohort.e2e_from_intended is None:
        return
    yield _title("From the intended time")
    if run.settings.get("max_concurrency") is not None and cohort.wait_before_send is not None:
        yield from _distribution("Wait before sending", cohort.wait_before_send)
    yield from _distribution("TTFT", cohort.ttft_from_intended)
    yield from _distribution("E2EL", cohort.e2e_from_intended)


def _every_gap(cohort: Cohort) -> Iterator[str]:
    if cohort.itl is not None:
        yield _title("Gap before each token")
        yield from _distribution("Gap", cohort.itl)
        if cohort.num_shared_tokens:
            yield _row("Tokens that came in one chunk with others", cohort.num_shared_tokens)


def _distribution(name: str, of: Distribution) -> Iterator[str]:
    """A percentile that so few values have none of their own for is marked: it is the largest."""
    for percent, value in ((50, of.p50), (90, of.p90), (95, of.p95), (99, of.p99)):
        mark = " (= max)" if of.count * (100 - percent) < 100 else ""
        yield _row(f"{name} p{percent} (ms)", f"{value * 1e3:.2f}{mark}")
    yield _row(f"{name} max (ms)", of.max * 1e3)


def _stages(cohort: Cohort, run: Run) -> Iterator[str]:
    if cohort.stages:
        yield _title("Stages by the server's timeline, mean")
        for name, of in cohort.stages.items():
            yield _row(f"{name} (ms)", of.mean * 1e3)
    if (found := agreement(run)) is not None and not found.is_partial:
        yield _row("Stages sum to the client's TTFT within 2 ms", f"{found.num_within} of {found.num_joined}")


def _generator(run: Run) -> Iterator[str]:
    if _is_simulated(run):
        return  # there was none
    yield _title("The load generator itself")
    lags_s = [lag for sender in run.senders for lag in sender.send_lags_s]
    if lags_s:
        for percent in (50, 99, 100):
            word = "max" if percent == 100 else f"p{percent}"
            yield _row(f"Send lag {word} (ms)", percentile(lags_s, percent) * 1e3)
    for number, sender in enumerate(run.senders):
        name = "Sender" if len(run.senders) == 1 else f"Sender {number}"
        stall_ms = max(sender.loop_stalls_s, default=0.0) * 1e3
        yield _row(f"{name}: CPU, of one core (%)", sender.cpu_share * 1e2)
        yield _row(
            f"{name}: longest stall (ms), time stalled (%)", f"{stall_ms:.2f}, {sender.stalled_share:.2%}"
        )


def _words(run: Run, summary: Summary, faults: Sequence[str]) -> Iterator[str]:
    cohort = summary.cohort
    if summary.window.kind is WindowKind.STEADY_STATE or summary.window.from_s:
        window = summary.window
        yield f"window: {window.kind.value}, from {window.from_s:g} s to {window.to_s:.2f} s"
    if len(cohort.token_counts) > 1 or "ids" not in cohort.token_counts:
        sources = ", ".join(f"{name} ({count})" for name, count in cohort.token_counts.items())
        if sources:
            yield f"tokens of a chunk are counted by: {sources}"
    if cohort.num_miscounted:
        yield f"{cohort.num_miscounted} requests' chunks hold another number of tokens than the server says"
    if (found := agreement(run)) is not None and found.is_partial:
        yield found.words()
    if not _is_simulated(run):
        yield _prefix_cache(run)
    yield from _errors(run)
    for warning in load_warnings(run):
        yield f"WARNING: {warning}"
    if run.was_interrupted:
        yield "interrupted: this is what was seen until then"
    for fault in faults:
        yield f"NOT A RESULT, the load generator was the bottleneck: {fault}"
    if faults:
        yield (
            "leave it a core that the server does not use (start that under `taskset -c …`, and this with "
            "--sender-cores), run it on another machine, or lower the rate; where a sender was busy, more of them help "
            "(--senders)"
        )


def _is_simulated(run: Run) -> bool:
    return bool(run.settings.get("backend") == SIMULATION)


def _prefix_cache(run: Run) -> str:
    """What earlier runs could have left, which the table's figures would have in them."""
    settings = run.settings
    if "cache_salt" in (settings.get("extra_body") or {}):
        return "prefix cache: this run has a cache_salt of its own, so it finds nothing that earlier ones have left"
    if settings.get("kind") in TAKE_SALTS:
        return "prefix cache: what earlier runs have left may be found (--keep-caches)"
    return (
        "prefix cache: this server takes no cache_salt, so it may find what earlier runs with these prompts have left; "
        "another --seed makes others"
    )


def _errors(run: Run) -> Iterator[str]:
    """Each way in which requests went wrong, once."""
    seen: dict[str, int] = {}
    for record in run.requests:
        if record.ending is not Ending.COMPLETED:
            words = f"{record.ending.value.replace('_', ' ')}: {record.error[:160]}"
            seen[words] = seen.get(words, 0) + 1
    for words, count in sorted(seen.items(), key=lambda each: -each[1])[:5]:
        yield f"{count} × {words}"
