"""What holds of the metrics of any stream and any run."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.records import record, refused, run_of

from twinpool.bench.serving.declared import read_request
from twinpool.bench.serving.distributions import distribution, percentile
from twinpool.bench.serving.metrics import num_shared_tokens, request_metrics
from twinpool.bench.serving.record import Ending, RequestRecord, Run
from twinpool.bench.serving.slo import Slo
from twinpool.bench.serving.summary import Window, WindowKind, summarize
from twinpool.errors import ConfigError

NEAR = 1e-9
quick = settings(max_examples=50, deadline=None)
seconds = st.floats(0, 100, allow_subnormal=False)
values = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=20)


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    """Any request: sent late or not, chunks of any sizes at any gaps, ended in any way."""
    intended = draw(seconds)
    sent = intended + draw(st.sampled_from([0.0, 0.001, 5.0]))
    ending = draw(st.sampled_from(list(Ending)))
    if draw(st.booleans()) and ending is not Ending.COMPLETED:
        return refused(ending, sent, intended_at_s=intended, input_tokens=draw(st.integers(1, 5000)))
    at_s, chunks = sent, []
    for gap, tokens in draw(st.lists(st.tuples(seconds, st.integers(1, 5)), min_size=1, max_size=6)):
        at_s += gap
        chunks.append((at_s, tokens))
    return record(
        *chunks,
        sent_at_s=sent,
        intended_at_s=intended,
        ending=ending,
        input_tokens=draw(st.integers(1, 5000)),
    )


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Some of them together, until the last has ended."""
    found = draw(st.lists(records(), min_size=1, max_size=6))
    return run_of(found, 1.0 + max(each.ended_at_s for each in found))


bounds = st.one_of(st.none(), st.floats(0, 200, allow_subnormal=False))
slos = st.builds(Slo, ttft_s=bounds, tpot_s=bounds, e2e_s=bounds, itl_p99_s=bounds)


@quick
@given(records())
def test_itls_sum_to_the_time_from_first_output_to_last(request_record: RequestRecord) -> None:
    found = request_metrics(request_record)
    if found.ttft_s is None or found.e2e_s is None:
        assert not len(found.itls_s)
        return
    assert len(found.itls_s) == request_record.output_tokens - 1
    assert found.itls_s.sum() == pytest.approx(found.e2e_s - found.ttft_s, abs=NEAR)
    assert found.chunk_gaps_s.sum() == pytest.approx(found.itls_s.sum(), abs=NEAR)
    assert 0 <= found.ttft_s <= found.e2e_s
    assert found.ttft_from_intended_s is not None
    assert found.ttft_from_intended_s >= found.ttft_s


@quick
@given(records())
def test_tpot_is_the_mean_itl_and_the_decode_rate_its_inverse(request_record: RequestRecord) -> None:
    found = request_metrics(request_record)
    if found.tpot_s is not None:
        assert found.tpot_s == pytest.approx(found.itls_s.mean(), abs=NEAR)
    if found.decode_rate_per_s is not None and found.tpot_s is not None:
        assert found.decode_rate_per_s * found.tpot_s == pytest.approx(1)


@quick
@given(records())
def test_tokens_that_share_chunks_are_those_behind_more_gaps_than_chunks(
    request_record: RequestRecord,
) -> None:
    found = request_metrics(request_record)
    shared = num_shared_tokens(request_record)
    assert (shared == 0) == (len(found.itls_s) == len(found.chunk_gaps_s))
    assert shared <= request_record.output_tokens


@quick
@given(values, st.floats(0, 100), st.floats(0, 100))
def test_percentiles_rise_and_occur(numbers: list[float], one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert percentile(numbers, low) <= percentile(numbers, high)
    assert percentile(numbers, one) in numbers
    assert sum(number <= percentile(numbers, one) for number in numbers) * 100 >= one * len(numbers) * (
        1 - NEAR
    )


@quick
@given(values, st.randoms(use_true_random=False))
def test_a_distribution_is_in_order_and_knows_no_order(numbers: list[float], chance: random.Random) -> None:
    found = distribution(numbers)
    assert found is not None
    assert found.min <= found.p50 <= found.p90 <= found.p95 <= found.p99 <= found.max
    assert found.min <= found.mean <= found.max
    chance.shuffle(numbers)
    assert distribution(numbers) == found


@quick
@given(runs(), slos)
def test_all_requests_are_counted_once_everywhere(run: Run, slo: Slo) -> None:
    found = summarize(run, slo)
    assert sum(found.cohort.endings.values()) == found.cohort.num_requests == len(run.requests)
    for buckets in (found.by_input_length, found.by_output_length):
        assert sum(bucket.cohort.num_requests for bucket in buckets) == len(run.requests)
        assert sum(bucket.cohort.num_good or 0 for bucket in buckets) == found.cohort.num_good
        assert sum(bucket.cohort.output_tokens for bucket in buckets) == found.cohort.output_tokens


@quick
@given(runs(), slos, slos)
def test_goodput_is_at_most_throughput_and_falls_with_each_bound(run: Run, slo: Slo, other: Slo) -> None:
    def tighter(one: float | None, two: float | None) -> float | None:
        return min((bound for bound in (one, two) if bound is not None), default=None)

    both = Slo(
        ttft_s=tighter(slo.ttft_s, other.ttft_s), tpot_s=tighter(slo.tpot_s, other.tpot_s),
        e2e_s=tighter(slo.e2e_s, other.e2e_s), itl_p99_s=tighter(slo.itl_p99_s, other.itl_p99_s),
    )  # fmt: skip
    good, fewer = summarize(run, slo).rates, summarize(run, both).rates
    assert good.goodput_per_s is not None
    assert fewer.goodput_per_s is not None
    assert fewer.goodput_per_s <= good.goodput_per_s <= good.requests_per_s


@quick
@given(runs(), st.floats(0.1, 0.9))
def test_windows_side_by_side_have_each_request_once(run: Run, share: float) -> None:
    middle = share * run.duration_s
    windows = [
        Window(kind=WindowKind.STEADY_STATE, from_s=from_s, to_s=to_s)
        for from_s, to_s in ((0.0, middle), (middle, run.duration_s))
    ]
    parts, whole = [summarize(run, window=window) for window in windows], summarize(run)
    assert sum(part.cohort.num_requests for part in parts) == whole.cohort.num_requests
    tokens = sum(part.rates.output_tokens_per_s * part.window.duration_s for part in parts)
    assert tokens == pytest.approx(whole.cohort.output_tokens)


@quick
@given(runs(), slos, st.sampled_from([ending for ending in Ending if ending is not Ending.COMPLETED]))
def test_what_did_not_complete_changes_no_latency_and_no_rate(run: Run, slo: Slo, ending: Ending) -> None:
    more = run_of([*run.requests, record((0.1, 1), (0.2, 4), ending=ending)], run.duration_s)
    before, after = summarize(run, slo), summarize(more, slo)
    assert after.rates == before.rates
    assert (after.cohort.ttft, after.cohort.itl) == (before.cohort.ttft, before.cohort.itl)
    assert after.cohort.endings[ending] == before.cohort.endings[ending] + 1


words = st.sampled_from([
    "event", "time_ms", "tokens", "sent", "received", "prefill_start", "token", "first_token", "end", "declared_e2e_ms",
    "declared_tpot_s", "0", "5", "1e999", "0e999999999", "-1", "nan", "1_0", "²", "9" * 5000, '"', "#", "",
])  # fmt: skip
lines = st.lists(st.one_of(words, st.text(max_size=4)), max_size=4).map(",".join)


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.lists(lines, max_size=8))
def test_any_text_is_a_request_or_refused_in_words(has_header: bool, rows: list[str]) -> None:
    text = "\n".join(["event,time_ms,tokens", "sent,0", *rows, "end,9"] if has_header else rows)
    try:
        _, found = read_request(text)
    except ConfigError:
        return
    assert (found.itls_s >= 0).all()
    assert len(found.itls_s) == max(0, found.record.output_tokens - 1)
