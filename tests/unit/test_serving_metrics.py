"""Each metric of one request, on streams written by hand."""

from __future__ import annotations

import math

import pytest
from support.records import record, refused, stream

from twinpool.bench.serving.distributions import distribution, percentile
from twinpool.bench.serving.metrics import RequestMetrics, num_shared_tokens, request_metrics, unexplained_s
from twinpool.bench.serving.record import Ending, RequestRecord, ServerTimeline, Stage
from twinpool.bench.serving.slo import Slo, parse_goodput
from twinpool.errors import ConfigError

BUNDLED = record((10.5, 1), (10.6, 3), (11.0, 2), sent_at_s=10.0, intended_at_s=9.75)
"""Six tokens in three chunks, sent 0.25 s late."""


def measured(*chunks: tuple[float, int], **changes: object) -> RequestMetrics:
    return request_metrics(record(*chunks, **changes))


def test_a_chunk_of_k_tokens_gives_its_gap_once_and_k_minus_1_zeros() -> None:
    found = request_metrics(BUNDLED)
    assert found.itls_s.tolist() == pytest.approx([0.1, 0, 0, 0.4, 0])
    assert found.chunk_gaps_s.tolist() == pytest.approx([0.1, 0.4])
    assert num_shared_tokens(BUNDLED) == 5


def test_latencies_count_from_sending_and_from_the_intended_time() -> None:
    found = request_metrics(BUNDLED)
    assert (found.ttft_s, found.ttft_from_intended_s) == (0.5, 0.75)
    assert (found.e2e_s, found.e2e_from_intended_s) == (1.0, 1.25)


def test_tpot_and_rates_have_one_gap_less_than_tokens() -> None:
    found = request_metrics(BUNDLED)
    assert found.tpot_s == pytest.approx(0.5 / 5)
    assert found.decode_rate_per_s == pytest.approx(5 / 0.5)
    assert found.request_rate_per_s == pytest.approx(6 / 1.0)


def test_the_end_of_the_stream_behind_the_last_output_is_in_no_metric() -> None:
    found = measured((0.5, 1), (0.75, 1), ended_at_s=9.0)
    assert (found.e2e_s, found.tpot_s) == (0.75, 0.25)


def test_the_servers_number_of_tokens_divides_not_that_of_the_chunks() -> None:
    assert measured((0.5, 1), (1.5, 1), output_tokens=5).tpot_s == 0.25


def test_the_first_output_may_hold_no_whole_token() -> None:
    found = measured((0.25, 0), (0.5, 1), (0.75, 1))
    assert found.ttft_s == 0.25
    assert found.itls_s.tolist() == [0.25]


def test_without_output_there_is_no_latency() -> None:
    found = request_metrics(refused())
    assert (found.ttft_s, found.e2e_s, found.tpot_s, found.itl_p99_s) == (None, None, None, None)
    assert (len(found.itls_s), len(found.chunk_gaps_s)) == (0, 0)


def test_one_token_has_an_e2e_and_no_gap() -> None:
    found = measured((0.5, 1))
    assert (found.ttft_s, found.e2e_s, found.request_rate_per_s) == (0.5, 0.5, 2.0)
    assert (found.tpot_s, found.decode_rate_per_s, found.itl_p99_s) == (None, None, None)


def test_an_answer_in_one_piece_has_no_decode_rate() -> None:
    found = measured((0.5, 4))
    assert (found.tpot_s, found.decode_rate_per_s, found.itl_p99_s) == (0.0, None, 0.0)


def test_what_the_servers_stages_leave_out_of_the_ttft_is_told() -> None:
    stages = (Stage("queue", 0.0, 0.125), Stage("prefill", 0.125, 0.25))
    timeline = ServerTimeline(ttft_s=0.375, e2e_s=1.0, stages=stages, beside=(Stage("decode", 0.3, 0.6),))
    assert unexplained_s(record((0.5, 1), timeline=timeline)) == 0.125
    assert unexplained_s(record((0.5, 1))) is None


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, p) for p in (0, 7, 50, 99, 99.5, 100)] == [1, 7, 50, 99, 100, 100]
    assert percentile([3.0], 99) == 3
    assert percentile([2.0, 1.0], 50) == 1
    assert math.isnan(percentile([], 50))


def test_a_distribution_is_of_at_least_one_value() -> None:
    found = distribution([4.0, 2.0])
    assert found is not None
    assert (found.count, found.mean, found.std, found.min, found.p50, found.max) == (2, 3, 1, 2, 2, 4)
    assert distribution([]) is None


GOOD = stream(3, ttft_s=0.5, gap_s=0.125)


@pytest.mark.parametrize(
    ("slo", "request_record", "is_met"),
    [
        (Slo(), GOOD, True),
        (Slo(ttft_s=0.5, tpot_s=0.125, e2e_s=0.75, itl_p99_s=0.125), GOOD, True),
        (Slo(ttft_s=0.499), GOOD, False),
        (Slo(tpot_s=0.124), GOOD, False),
        (Slo(e2e_s=0.749), GOOD, False),
        (Slo(itl_p99_s=0.124), GOOD, False),
        (Slo(ttft_s=0.5), stream(3, 0.5, 0.1, intended_at_s=-0.25), False),
        (Slo(e2e_s=0.75), stream(3, 0.5, 0.125, intended_at_s=-0.25), False),
        (Slo(tpot_s=0.01, itl_p99_s=0.01), stream(1, 0.5, 0.0), True),
        (Slo(ttft_s=9.0), record(), False),
        *(
            (Slo(), stream(3, 0.1, 0.1, ending=ending), False)
            for ending in Ending
            if ending != Ending.COMPLETED
        ),
    ],
)
def test_an_slo_is_met_by_what_completed_within_every_bound(
    slo: Slo, request_record: RequestRecord, is_met: bool
) -> None:
    assert slo.is_met(request_metrics(request_record)) is is_met


def test_a_single_stall_breaks_the_bound_on_itl_in_99_gaps_but_not_in_100() -> None:
    slo = Slo(itl_p99_s=0.05)
    for num_gaps, is_met in ((99, False), (100, True)):
        times = [0.5 + 0.025 * n + (1.2 if n >= 50 else 0) for n in range(num_gaps + 1)]
        assert slo.is_met(measured(*((at, 1) for at in times))) is is_met


def test_goodput_bounds_are_milliseconds_with_the_names_of_vllm() -> None:
    assert parse_goodput(["ttft:300", "tpot:50", "e2el:2500.5", "itl:80"]) == Slo(
        ttft_s=0.3, tpot_s=0.05, e2e_s=2.5005, itl_p99_s=0.08
    )
    assert parse_goodput([]) is None
    assert str(parse_goodput(["ttft:300", "itl:80"])) == "TTFT 300 ms, ITL p99 80 ms"


@pytest.mark.parametrize(
    "pair", ["ttft", "ttft:", "ttft:fast", "ttft:-1", "ttft:nan", "ttft:inf", "p99:5", ":5"]
)
def test_other_bounds_are_refused_by_name(pair: str) -> None:
    with pytest.raises(ConfigError, match=f"--goodput is '{pair}'; allowed: ttft:MILLISECONDS, tpot"):
        parse_goodput([pair])


def test_a_bound_is_given_once() -> None:
    with pytest.raises(ConfigError, match="ttft twice"):
        parse_goodput(["ttft:1", "ttft:2"])
