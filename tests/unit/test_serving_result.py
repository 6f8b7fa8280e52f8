"""The result JSON: vLLM's names with vLLM's meanings, ours apart."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from support.records import record, refused, run_of, stream

from twinpool.bench.serving.record import Ending
from twinpool.bench.serving.result import peak_concurrency, peak_output_tokens_per_s, result_json
from twinpool.bench.serving.slo import Slo
from twinpool.bench.serving.summary import steady_state, summarize
from twinpool.errors import ConfigError

RUN = run_of(
    [
        stream(4, 0.5, 0.25, sent_at_s=0.0),
        record((1.5, 2), (1.75, 3), sent_at_s=1.0, intended_at_s=0.5, input_tokens=30),
        refused(at_s=2.0, error="queue full"),
        refused(Ending.TIMED_OUT, at_s=2.5),
    ],
    duration_s=5.0,
    backend="openai", model="m", num_prompts=4, request_rate=math.inf, max_concurrency=2, extra=[1],
)  # fmt: skip
VLLM_FIELDS = [
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "input_lens",
    "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "errors", "max_output_tokens_per_s",
    "max_concurrent_requests",
]  # fmt: skip


def test_the_fields_are_those_of_vllm_and_ours_are_under_one_name() -> None:
    found = result_json(RUN, summarize(RUN), is_detailed=True)
    statistics = [
        f"{word}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for word in ("mean", "median", "std", "p50", "p90", "p95", "p99")
    ]
    assert list(found) == [*VLLM_FIELDS, *statistics, "twinpool"]


def test_it_is_json_without_infinities() -> None:
    found = result_json(RUN, summarize(RUN, Slo(ttft_s=0.75)), is_detailed=True)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["request_rate"], found["twinpool"]["settings"]["request_rate"]) == ("inf", "inf")
    assert (found["date"], found["model_id"], found["label"]) == ("20260102-030405", "m", None)


def test_totals_and_rates() -> None:
    found = result_json(RUN, summarize(RUN, Slo(ttft_s=0.75)))
    assert (found["completed"], found["failed"], found["duration"]) == (2, 2, 5.0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (40, 9)
    assert (found["request_throughput"], found["output_throughput"]) == (0.4, 1.8)
    assert found["total_token_throughput"] == pytest.approx(9.8)


def test_goodput_counts_from_the_intended_time_though_ttfts_count_from_sending() -> None:
    found = result_json(RUN, summarize(RUN, Slo(ttft_s=0.75)), is_detailed=True)
    assert found["ttfts"][:2] == [0.5, 0.5]
    assert found["queue_times"][:2] == [0.0, 0.5]
    assert found["request_goodput"] == 0.2
    assert result_json(RUN, summarize(RUN))["request_goodput"] is None


def test_statistics_follow_numpy_and_an_itl_is_a_gap_between_chunks() -> None:
    found = result_json(RUN, summarize(RUN), metric_percentiles=(25.0, 99.9))
    gaps_ms = [250.0] * 3 + [250.0]
    tpots_ms = [250.0, 62.5]
    assert found["mean_itl_ms"] == np.mean(gaps_ms)
    assert found["p25_tpot_ms"] == np.percentile(tpots_ms, 25)
    assert found["p99.9_tpot_ms"] == np.percentile(tpots_ms, 99.9)
    assert found["std_tpot_ms"] == np.std(tpots_ms)
    assert found["median_e2el_ms"] == np.median([1250.0, 750.0])


def test_our_own_definitions_are_kept_beside_them() -> None:
    own = result_json(RUN, summarize(RUN))["twinpool"]
    assert own["cohort"]["itl"]["count"] == 3 + 4
    assert own["cohort"]["chunk_gap"]["count"] == 3 + 1
    assert own["cohort"]["endings"]["rejected"] == own["cohort"]["endings"]["timed_out"] == 1
    assert own["failure_share"] == 0.5
    assert own["window"] == {"kind": "closed_cohort", "from_s": 0.0, "to_s": 5.0}
    assert own["percentile_rule"].startswith("nearest rank")


def test_lists_have_one_entry_for_each_request_and_those_that_did_not_complete_an_error() -> None:
    found = result_json(RUN, summarize(RUN), is_detailed=True)
    assert found["errors"] == ["", "", "rejected: queue full", "timed_out"]
    assert found["itls"] == [[0.25] * 3, [0.25], [], []]
    assert (found["ttfts"][2:], found["latencies"][2:], found["output_lens"][2:]) == ([0, 0], [0, 0], [0, 0])
    assert "ttfts" not in result_json(RUN, summarize(RUN))


def test_texts_are_there_if_they_were_kept() -> None:
    run = run_of([stream(2, 0.5, 0.1, output="ab"), refused(at_s=0.1)], duration_s=1.0)
    assert result_json(run, summarize(run), is_detailed=True)["generated_texts"] == ["ab", ""]


def test_only_the_window_is_told() -> None:
    found = result_json(RUN, summarize(RUN, window=steady_state(RUN, 0.5)), is_detailed=True)
    assert (found["completed"], found["failed"], found["duration"]) == (1, 1, 2.0)
    assert found["start_times"] == [1.0, 2.0]


def test_nothing_completed_is_no_latency_of_zero() -> None:
    run = run_of([refused()], duration_s=1.0)
    assert result_json(run, summarize(run))["mean_ttft_ms"] is None


def test_chosen_metrics_metadata_and_a_ramp_are_shown() -> None:
    run = run_of(
        [stream(2, 0.5, 0.1)], 1.0, ramp_up_strategy="linear", ramp_up_start_rps=1, ramp_up_end_rps=4
    )
    found = result_json(run, summarize(run), percentile_metrics=("itl",), metadata={"host": "h"})
    assert ("mean_itl_ms" in found, "mean_ttft_ms" in found, found["host"]) == (True, False, "h")
    assert (found["ramp_up_strategy"], found["ramp_up_end_rps"], found["num_prompts"]) == ("linear", 4, 1)


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        (
            {"percentile_metrics": ["ttft", "speed"]},
            "--percentile-metrics is 'ttft,speed'; allowed: names among ttft",
        ),
        ({"metric_percentiles": [101.0]}, "--metric-percentiles is 101.0; allowed: 0 to 100"),
    ],
)
def test_unknown_choices_are_named(chosen: dict[str, list[object]], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        result_json(RUN, summarize(RUN), **chosen)  # type: ignore[arg-type]


def test_peaks_are_of_one_moment_and_of_one_second() -> None:
    records = [
        stream(3, 0.25, 0.25),
        stream(3, 0.25, 0.25, sent_at_s=0.75),
        stream(3, 0.25, 0.75, sent_at_s=1.0),
    ]
    assert peak_concurrency(records) == 2
    assert peak_concurrency([stream(2, 0.25, 0.25), stream(2, 0.25, 0.25, sent_at_s=0.5)]) == 1
    assert peak_output_tokens_per_s(records) == 4.0
    assert (peak_concurrency([]), peak_output_tokens_per_s([])) == (0, 0.0)
