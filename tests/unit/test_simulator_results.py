"""Results of simulations are the bench's: the same records, summary, result and report, whatever they hold."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from support.simulated import LinearTimes, colocated, poisson_times, requests_at, split

from twinpool.bench.reports.page import write_report
from twinpool.bench.reports.saved import report_of
from twinpool.bench.serving.metrics import request_metrics
from twinpool.bench.serving.printed import printed
from twinpool.bench.serving.record import Chunk, Run, TokenTimes, decode_run, encode_run
from twinpool.bench.serving.result import result_json
from twinpool.bench.serving.slo import Slo
from twinpool.bench.serving.summary import summarize
from twinpool.config import CoordinatorConfig
from twinpool.planner.simulator.driver import simulate
from twinpool.planner.simulator.outcomes import Simulation

SLO = Slo(ttft_s=0.2, itl_p99_s=0.05)


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    deployment = split(
        1,
        1,
        LinearTimes(base_s=0.005, prompt_token_s=4e-4),
        LinearTimes(base_s=0.01, sequence_s=1e-3),
        coordinator=CoordinatorConfig(max_wait_s=0.5),
    )
    return simulate(deployment, requests_at(poisson_times(120, 14.0, 1), 160, 24))


@pytest.fixture(scope="module")
def plain(simulation: Simulation) -> Run:
    """The same run with a chunk for each token, as a bench has it."""
    return decode_run(encode_run(simulation.as_run()))


def test_token_times_are_chunks() -> None:
    times = TokenTimes(array("d", [0.5, 0.75, 2.0]))
    chunks = (Chunk(0.5, 1), Chunk(0.75, 1), Chunk(2.0, 1))
    assert tuple(times) == chunks
    assert times == chunks
    assert hash(times) == hash(chunks)
    assert (len(times), times[0], times[-1]) == (3, chunks[0], chunks[2])
    assert tuple(times[1:]) == chunks[1:]
    assert times != chunks[:2]


def test_a_run_reads_back_as_it_was_written(simulation: Simulation, plain: Run) -> None:
    assert type(plain.requests[0].chunks) is tuple
    assert simulation.as_run() == plain


def test_all_figures_are_those_of_the_same_run_chunk_by_chunk(simulation: Simulation, plain: Run) -> None:
    """Percentiles straight from arrays, and by the bench's functions from chunks."""
    run = simulation.as_run()
    summary = simulation.summary(SLO)
    assert summary == summarize(plain, SLO, accelerators=simulation.accelerators)
    assert summary.cohort.endings["rejected"] > 0
    for is_detailed in (False, True):
        found = result_json(run, summary, is_detailed=is_detailed)
        assert found == result_json(plain, summary, is_detailed=is_detailed)
    assert printed(result_json(run, summary), run, summary, ()) == printed(
        result_json(plain, summary), plain, summary, ()
    )


def test_each_request_has_the_metrics_of_its_chunks(simulation: Simulation, plain: Run) -> None:
    for compact, whole in zip(simulation.as_run().requests, plain.requests, strict=True):
        one, other = request_metrics(compact), request_metrics(whole)
        assert (one.ttft_s, one.tpot_s, one.itl_p99_s) == (other.ttft_s, other.tpot_s, other.itl_p99_s)
        assert one.itls_s.tolist() == other.itls_s.tolist()


def test_stages_sum_to_what_the_client_saw(simulation: Simulation) -> None:
    summary = simulation.summary()
    assert {"queue", "prefill", "deliver"} <= summary.cohort.stages.keys()
    assert summary.cohort.num_unexplained == 0


def test_accelerators_are_those_of_the_deployment(simulation: Simulation) -> None:
    summary = simulation.summary()
    assert summary.accelerators == {"prefill": 1, "decode": 1}
    total = summary.rates_per_accelerator["total"]
    assert total.output_tokens_per_s == pytest.approx(summary.rates.output_tokens_per_s / 2)


def test_a_report_is_made_of_it(simulation: Simulation, tmp_path: Path) -> None:

    page = tmp_path / "report.html"
    run = simulation.as_run()
    report = report_of([("1P1D, simulated", run)], "a simulation", SLO, "ttft:200", run.started_at)
    assert page in write_report(page, report)
    assert "1P1D, simulated" in page.read_text()


def test_what_workers_did_is_told() -> None:
    found = simulate(
        colocated(2, LinearTimes(base_s=0.01, prompt_token_s=1e-4), num_blocks=64, max_model_len=900),
        requests_at([0.0, 0.1, 0.2, 0.3], 160, 60),
    )
    assert {worker.worker_id for worker in found.workers} == {"colocated-0", "colocated-1"}
    assert all(0 < worker.kv_share <= worker.most_kv_share <= 1 for worker in found.workers)
    assert sum(worker.num_steps for worker in found.workers) >= 60
