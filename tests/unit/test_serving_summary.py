"""What is said of a run: who is measured, what is counted, and by what it is divided."""

from __future__ import annotations

import pytest
from support.records import record, refused, run_of, stream

from twinpool.bench.serving.record import Ending, ServerTimeline, Stage, TokenCount
from twinpool.bench.serving.slo import Slo
from twinpool.bench.serving.summary import WindowKind, closed_cohort, steady_state, summarize
from twinpool.errors import ConfigError

MIXED = run_of(
    [
        stream(3, 0.5, 0.25, sent_at_s=1.0, input_tokens=100, group="a"),
        stream(5, 1.5, 0.25, sent_at_s=2.0, input_tokens=600, group="b"),
        refused(at_s=3.0, input_tokens=600, group="a"),
        refused(Ending.FAILED, at_s=4.0, wanted_output_tokens=600),
        stream(2, 0.5, 9.0, sent_at_s=5.0, ending=Ending.TIMED_OUT),
        stream(2, 0.5, 0.5, sent_at_s=6.0, ending=Ending.CANCELLED),
    ],
    duration_s=20.0,
)


def test_each_way_to_end_is_counted_apart_and_only_completed_ones_have_latencies() -> None:
    cohort = summarize(MIXED, Slo(ttft_s=1.0)).cohort
    assert cohort.endings == {"completed": 2, "rejected": 1, "failed": 1, "timed_out": 1, "cancelled": 1}
    assert (cohort.num_requests, cohort.num_good) == (6, 1)
    assert cohort.failure_share == pytest.approx(4 / 6)
    assert cohort.good_share == pytest.approx(1 / 6)
    assert cohort.ttft is not None
    assert (cohort.ttft.count, cohort.ttft.min, cohort.ttft.max) == (2, 0.5, 1.5)
    assert cohort.itl is not None
    assert (cohort.itl.count, cohort.itl.max) == (2 + 4, 0.25)
    assert cohort.wait_before_send is not None
    assert cohort.wait_before_send.count == 6


def test_rates_of_a_closed_cohort_are_over_the_whole_time() -> None:
    rates = summarize(MIXED, Slo(ttft_s=1.0)).rates
    assert (rates.requests_per_s, rates.goodput_per_s) == (0.1, 0.05)
    assert (rates.input_tokens_per_s, rates.output_tokens_per_s) == (35.0, 0.4)
    assert summarize(MIXED).rates.goodput_per_s is None


def test_rates_are_told_per_pool_and_per_all_accelerators() -> None:
    found = summarize(MIXED, Slo(ttft_s=1.0), accelerators={"prefill": 1, "decode": 3})
    assert found.rates_per_accelerator["prefill"] == found.rates
    assert found.rates_per_accelerator["decode"].output_tokens_per_s == pytest.approx(0.4 / 3)
    assert found.rates_per_accelerator["total"].requests_per_s == pytest.approx(0.1 / 4)
    assert found.rates_per_accelerator["total"].goodput_per_s == pytest.approx(0.05 / 4)
    assert summarize(MIXED).rates_per_accelerator == {}


@pytest.mark.parametrize("accelerators", [{"decode": 0}, {"total": 2}])
def test_a_pool_has_an_accelerator(accelerators: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="number of accelerators"):
        summarize(MIXED, accelerators=accelerators)


def test_a_warm_up_leaves_out_who_was_intended_within_it_and_its_time() -> None:
    found = summarize(MIXED, window=closed_cohort(MIXED, warm_up_s=2.0))
    assert found.cohort.endings["completed"] == 1
    assert found.rates.requests_per_s == pytest.approx(1 / 18)
    assert found.window.kind is WindowKind.CLOSED_COHORT


def test_a_steady_state_measures_who_was_intended_in_it_and_counts_what_ended_in_it() -> None:
    """Of four requests 2 s apart, each 3 s long, with a window from 1 to 6 s: those at 2 and 4 are measured, though the
    latter ends after it; those that began at 0 and 2 ended in it."""
    run = run_of(
        [stream(2, 0.5, 2.5, sent_at_s=2.0 * n, input_tokens=10 * n) for n in range(4)], duration_s=9.0
    )
    found = summarize(run, window=steady_state(run, warm_up_s=1.0))
    assert (found.window.from_s, found.window.to_s) == (1.0, 6.0)
    assert found.cohort.num_requests == 2
    assert found.cohort.input_tokens == 10 + 20
    assert found.rates.requests_per_s == pytest.approx(2 / 5)
    assert found.rates.input_tokens_per_s == pytest.approx((0 + 10) / 5)


@pytest.mark.parametrize("warm_up_s", [-1.0, 20.0, 30.0])
def test_a_warm_up_leaves_time_to_measure(warm_up_s: float) -> None:
    sentence = f"--warm-up is {warm_up_s}; allowed: 0 or more, and less than the load's 20 s"
    with pytest.raises(ConfigError, match=sentence):
        closed_cohort(MIXED, warm_up_s)


def test_requests_that_come_at_once_have_no_steady_state() -> None:
    run = run_of([stream(2, 0.5, 0.1), stream(2, 0.5, 0.1)], duration_s=1.0)
    with pytest.raises(
        ConfigError, match="--window is 'steady_state'; allowed: closed_cohort, as all requests"
    ):
        steady_state(run, 0.0)


def test_buckets_go_by_prompt_and_by_what_came_or_was_asked_for() -> None:
    found = summarize(MIXED)
    by_input = [(b.at_least, b.below, b.cohort.num_requests) for b in found.by_input_length]
    assert by_input == [(0, 128, 4), (512, 2048, 2)]
    by_output = [(b.at_least, b.below, b.cohort.num_requests) for b in found.by_output_length]
    assert by_output == [(0, 32, 5), (512, 2048, 1)]
    last = summarize(MIXED, input_edges=(50, 600)).by_input_length
    assert [(b.at_least, b.below, b.cohort.num_requests) for b in last] == [(50, 600, 4), (600, None, 2)]


def test_groups_are_told_apart() -> None:
    groups = summarize(MIXED, Slo(ttft_s=1.0)).by_group
    assert {name: (group.num_requests, group.num_good) for name, group in groups.items()} == {
        "a": (2, 1),
        "b": (1, 0),
    }


def test_chunks_with_several_tokens_and_counts_that_differ_are_told() -> None:
    run = run_of(
        [
            record((0.5, 1), (0.6, 4)),
            record((0.5, 1), (0.6, 1), output_tokens=3, token_count=TokenCount.CHUNK),
        ],
        duration_s=1.0,
    )
    cohort = summarize(run).cohort
    assert (cohort.num_shared_tokens, cohort.num_miscounted) == (4, 1)
    assert cohort.token_counts == {"chunk": 1, "ids": 1}
    assert cohort.itl is not None
    assert cohort.chunk_gap is not None
    assert (cohort.itl.count, cohort.chunk_gap.count) == (5, 2)


def test_stages_that_do_not_sum_to_the_clients_ttft_within_2_ms_are_counted() -> None:
    def timeline(*seconds: float) -> ServerTimeline:
        names = ("queue", "prefill", "queue")
        stages = tuple(Stage(name, 0.0, each) for name, each in zip(names, seconds, strict=False))
        return ServerTimeline(ttft_s=sum(seconds), e2e_s=1.0, stages=stages)

    run = run_of(
        [
            stream(2, 0.5, 0.1, timeline=timeline(0.2, 0.2985)),
            stream(2, 0.5, 0.1, timeline=timeline(0.2, 0.2, 0.0975)),
            stream(2, 0.5, 0.1),
        ],
        duration_s=1.0,
    )
    cohort = summarize(run).cohort
    assert cohort.unexplained is not None
    assert (cohort.unexplained.count, cohort.num_unexplained) == (2, 1)
    assert cohort.unexplained.max == pytest.approx(0.0025)
    assert cohort.stages["queue"].max == pytest.approx(0.2975)


def test_a_run_without_requests_has_a_summary() -> None:
    found = summarize(run_of([], duration_s=1.0), Slo(ttft_s=1.0))
    assert (found.cohort.num_requests, found.cohort.ttft, found.rates.goodput_per_s) == (0, None, 0.0)
    assert (found.cohort.failure_share, found.cohort.good_share) == (0.0, None)
