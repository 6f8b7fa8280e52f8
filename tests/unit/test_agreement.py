"""Two load generators' figures beside each other, and beside what the server noted."""

from __future__ import annotations

from typing import Any

import pytest

from twinpool.bench.agreement import compared
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


def report(ttft_ms: float) -> dict[str, Any]:
    def metric(value: float) -> dict[str, Any]:
        return {"successful": {"percentiles": {f"p{percent}": value for percent in (50, 90, 95, 99)}}}

    metrics = {
        "time_to_first_token_ms": metric(ttft_ms),
        "inter_token_latency_ms": metric(20.0),
        "request_latency": metric(0.25),
    }
    return {"benchmarks": [{"metrics": metrics}]}


def test_each_figure_stands_beside_the_others_and_the_servers_own() -> None:
    rows = compared(RUN, report(ttft_ms=160.0), LOG)
    found = {(row.metric, row.percent): row for row in rows}
    assert len(found) == 12
    first = found["TTFT", 50]
    assert (first.ours_ms, first.servers_ms) == (pytest.approx(200.0), pytest.approx(199.0))
    assert first.difference == pytest.approx(0.25)
    assert found["TPOT (guidellm: ITL)", 50].difference == pytest.approx(0.0)
    assert found["TPOT (guidellm: ITL)", 99].ours_ms == pytest.approx(30.0)
    assert found["E2E", 99].ours_ms == pytest.approx(260.0)
    assert "25.00%" in str(first)


def test_a_report_of_another_shape_is_told_by_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match="guidellm's report has no 'benchmarks'"):
        compared(RUN, {}, None)
