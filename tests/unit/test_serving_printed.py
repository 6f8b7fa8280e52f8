"""The table of a run: what it says beside vLLM's lines."""

from __future__ import annotations

import pytest
from support.records import refused, run_of, stream

from twinpool.bench.serving.printed import printed
from twinpool.bench.serving.record import Run, Sender
from twinpool.bench.serving.result import result_json
from twinpool.bench.serving.settings import ServerKind
from twinpool.bench.serving.summary import summarize


def table(run: Run, *faults: str) -> list[str]:
    summary = summarize(run)
    return printed(result_json(run, summary), run, summary, faults).splitlines()


def value(lines: list[str], label: str) -> str:
    (found,) = (line for line in lines if line.startswith(f"{label}:"))
    return found.removeprefix(f"{label}:").strip()


def test_each_half_of_the_table_says_its_rule_for_percentiles() -> None:
    lines = table(run_of([stream(3, 0.5, 0.25), stream(3, 1.0, 0.25)], duration_s=4.0))
    theirs, ours = (
        next(n for n, line in enumerate(lines) if words in line) for words in ("interpolated", "nearest")
    )
    assert theirs < lines.index(next(line for line in lines if line.startswith("P99 TTFT"))) < ours
    assert ours < lines.index(next(line for line in lines if line.startswith("Gap p99")))


def test_prompt_tokens_found_in_the_cache_are_told_where_the_server_says_them() -> None:
    known = run_of([stream(3, 0.5, 0.25, cached_tokens=n) for n in (0, 5, None)], duration_s=4.0)
    assert value(table(known), "Input tokens found in the prefix cache") == "5 of 20 (25.0%)"
    unknown = run_of([stream(3, 0.5, 0.25)], duration_s=4.0)
    assert not [line for line in table(unknown) if "found in the prefix cache" in line]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "twinpool", "extra_body": {"cache_salt": "x"}}, "a cache_salt of its own"),
        ({"kind": ServerKind.VLLM, "extra_body": {}}, "--keep-caches"),
        ({"kind": "openai", "extra_body": {}}, "takes no cache_salt"),
        ({}, "takes no cache_salt"),
    ],
)
def test_whether_earlier_runs_could_have_filled_the_cache_is_said(
    settings: dict[str, object], words: str
) -> None:
    lines = table(run_of([stream(3, 0.5, 0.25)], duration_s=4.0, **settings))
    assert [words in line for line in lines if line.startswith("prefix cache:")] == [True]


def test_a_load_of_which_much_failed_says_so_in_the_table_and_below_it() -> None:
    lines = table(run_of([stream(3, 0.5, 0.25), refused(), refused()], duration_s=4.0))
    assert value(lines, "  share of all (%)") == "66.67"
    assert any(line.startswith("WARNING: 2 of 3 requests (67%) did not complete") for line in lines)


def test_the_wait_for_a_turn_is_told_beside_the_generators_own_lag() -> None:
    sender = Sender(num_requests=1, cpu_share=0.1, send_lags_s=(0.0005,))
    run = run_of([stream(3, 0.5, 0.25, sent_at_s=2.0, intended_at_s=0.0)], duration_s=4.0, max_concurrency=1)
    lines = table(
        Run(**{name: getattr(run, name) for name in run.__struct_fields__} | {"senders": (sender,)})
    )
    assert value(lines, "Send lag p99 (ms)") == "0.50"
    assert value(lines, "Wait before sending p99 (ms)") == "2000.00 (= max)"


def test_a_percentile_that_is_the_largest_for_want_of_values_is_marked() -> None:
    requests = [stream(2, 0.5, 0.01 * (number + 1)) for number in range(99)]
    lines = table(run_of(requests, duration_s=9.0))
    assert (value(lines, "Gap p95 (ms)"), value(lines, "Gap p99 (ms)")) == ("950.00", "990.00 (= max)")
    lines = table(run_of([*requests, stream(2, 0.5, 1.0)], duration_s=9.0))
    assert (value(lines, "Gap p99 (ms)"), value(lines, "Gap max (ms)")) == ("990.00", "1000.00")
