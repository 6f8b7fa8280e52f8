"""Two load generators' figures beside each other, and beside what the server noted."""

from __future__ import annotations

from typing import Any

import pytest

from twinpool.bench.agreement.figures import PERCENTS, Metric, compared
from twinpool.bench.agreement.generators import AIPERF, GUIDELLM, Generator
from twinpool.bench.scripted_server import Sent
from twinpool.bench.serving.record import Chunk, Ending, RequestRecord, Run, TokenCount
from twinpool.errors import ConfigError

GAPS_S = (0.02, 0.03)


def record(index: int, gap_s: float) -> RequestRecord:
    chunks = tuple(Chunk(1.2 + gap_s * number, 1) for number in range(3))
    return RequestRecord(
        index=index, request_id=f"r-{index}", group="", intended_at_s=1.0, sent_at_s=1.0, ended_at_s=2.0,
        ending=Ending.COMPLETED, input_tokens=1, wanted_output_tokens=3, output_tokens=3, chunks=chunks,
        token_count=TokenCount.IDS,
    )  # fmt: skip


RUN = Run(
    started_at="",
    duration_s=2.0,
    requests=tuple(record(n, gap) for n, gap in enumerate(GAPS_S)),
    senders=(),
    settings={},
)
LOG = [Sent(f"r-{n}", 5.0, [5.199 + gap * number for number in range(3)]) for n, gap in enumerate(GAPS_S)]


def guidellms(ttft_ms: float) -> dict[str, Any]:
    def metric(value: float) -> dict[str, Any]:
        return {"successful": {"percentiles": {f"p{percent}": value for percent in PERCENTS}}}

    metrics = {
        "time_to_first_token_ms": metric(ttft_ms),
        "inter_token_latency_ms": metric(20.0),
        "request_latency": metric(0.25),
    }
    return {"benchmarks": [{"metrics": metrics}]}


def aiperfs(gap_ms: float) -> dict[str, Any]:
    def metric(value: float) -> dict[str, Any]:
        return {"unit": "ms", **{f"p{percent}": value for percent in PERCENTS}}

    return {
        "time_to_first_token": metric(200.0),
        "inter_chunk_latency": metric(gap_ms),
        "inter_token_latency": metric(25.0),
        "request_latency": metric(250.0),
    }


def test_each_figure_stands_beside_the_others_and_the_servers_own() -> None:
    rows = compared(RUN, GUIDELLM.read(guidellms(ttft_ms=160.0)), LOG)
    found = {(row.metric, row.percent): row for row in rows}
    assert len(found) == 12
    first = found[Metric.TTFT, 50]
    assert (first.ours_ms, first.servers_ms) == (pytest.approx(200.0), pytest.approx(199.0))
    assert first.difference == pytest.approx(0.25)
    assert found[Metric.TPOT_BY_GAPS, 50].ours_ms == pytest.approx(20.0)
    assert found[Metric.TPOT_BY_GAPS, 99].servers_ms == pytest.approx(30.0)
    assert found[Metric.E2E, 99].ours_ms == pytest.approx(260.0)
    assert "25.00%" in str(first)


def test_gaps_and_mean_gaps_are_compared_apart() -> None:
    rows = compared(RUN, AIPERF.read(aiperfs(gap_ms=20.0)), LOG)
    found = {(row.metric, row.percent): row for row in rows}
    assert found[Metric.ITL, 99].difference == pytest.approx(0.5)
    assert found[Metric.ITL, 99].servers_ms == pytest.approx(30.0)
    assert found[Metric.TPOT, 99].difference == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("generator", "lacking"), [(GUIDELLM, "'benchmarks'"), (AIPERF, "'time_to_first_token'")]
)
def test_a_report_of_another_shape_is_told_by_what_it_lacks(generator: Generator, lacking: str) -> None:
    with pytest.raises(ConfigError, match=f"{generator.name}'s report has no {lacking}"):
        generator.read({})
