"""The arithmetic behind the reports, on outcomes written by hand."""

import pytest

from twinpool.bench.client import End, Outcome
from twinpool.bench.load import throughput
from twinpool.bench.metrics import (
    goodput_per_s,
    is_good,
    itls_s,
    slo_of,
    slope_per_hour,
    summary,
    tpot_s,
    ttft_s,
)
from twinpool.bench.serving.slo import Slo


def outcome(*token_at: float, end: End = End.COMPLETE, sent_at: float = 10.0) -> Outcome:
    first = token_at[0] if token_at else None
    ended = token_at[-1] if token_at else sent_at
    return Outcome(
        end=end,
        sent_at=sent_at,
        ended_at=ended,
        first_output_at=first,
        token_ids=list(range(len(token_at))),
        token_at=list(token_at),
    )


def test_ttft_itl_and_tpot_of_a_stream() -> None:
    stream = outcome(10.5, 10.6, 10.6, 11.1)
    assert ttft_s(stream) == pytest.approx(0.5)
    assert itls_s(stream) == pytest.approx([0.1, 0.0, 0.5])
    assert tpot_s(stream) == pytest.approx(0.2)


def test_text_before_the_first_token_id_is_the_first_output() -> None:
    stream = outcome(10.5, 10.6)
    stream.first_output_at = 10.4
    assert ttft_s(stream) == pytest.approx(0.4)
    assert itls_s(stream) == pytest.approx([0.1])


def test_without_output_there_is_no_ttft_and_with_one_token_no_tpot() -> None:
    assert ttft_s(outcome()) is None
    assert tpot_s(outcome(10.5)) is None
    assert itls_s(outcome(10.5)) == []


def test_a_summary_leaves_out_what_was_not_measured() -> None:
    found = summary([0.1, None, 0.3])
    assert (found.count, found.p50_s, found.max_s) == (2, 0.1, 0.3)
    assert str(found) == "100.0 / 300.0 / 300.0 ms (p50 / p99 / max of 2)"
    assert summary([]).count == 0


@pytest.mark.parametrize(
    ("stream", "is_met"),
    [
        (outcome(10.5, 10.6), True),
        (outcome(10.5), True),
        (outcome(11.5, 11.6), False),
        (outcome(10.5, 10.9), False),
        (outcome(10.5, 10.6, end=End.FAILED), False),
        (outcome(10.5, 10.6, end=End.LEFT), False),
        (outcome(end=End.REFUSED), False),
        (outcome(), False),
    ],
)
def test_only_what_succeeded_within_every_bound_is_goodput(stream: Outcome, is_met: bool) -> None:
    slo = Slo(ttft_s=1.0, itl_p99_s=0.2)
    assert is_good(stream, slo) is is_met
    assert goodput_per_s([stream, stream], slo, seconds=4.0) == (0.5 if is_met else 0.0)


def test_an_slo_is_a_multiple_of_what_undisturbed_requests_kept() -> None:
    slo = slo_of([outcome(10.5, 10.6), outcome(10.7, 11.0), outcome(end=End.REFUSED)], factor=2)
    assert (slo.ttft_s, slo.itl_p99_s) == (pytest.approx(1.4), pytest.approx(0.6))


def test_throughput_counts_what_ended_and_what_arrived_in_the_window() -> None:
    found = throughput([outcome(10.5, 11.5, 12.5), outcome(12.5, 13.5), outcome(end=End.REFUSED)], 11.0, 13.0)
    assert len(found.outcomes) == 1
    assert found.tokens_per_s == 1.5


def test_a_slope_is_the_growth_per_hour() -> None:
    assert slope_per_hour([(0.0, 5.0), (60.0, 6.0), (120.0, 7.0)]) == pytest.approx(60.0)
    assert slope_per_hour([(0.0, 5.0)]) == 0
