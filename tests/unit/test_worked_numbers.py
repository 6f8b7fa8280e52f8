"""Worked examples whose numbers were computed by hand, through what a user runs or calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.records import refused, run_of, stream

from twinpool.bench.serving.record import Ending
from twinpool.bench.serving.slo import parse_goodput
from twinpool.bench.serving.summary import summarize
from twinpool.cli import main

Metrics = Callable[..., dict[str, Any]]


@pytest.fixture
def metrics(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Metrics:
    """`twinpool metrics --json` of an event CSV in milliseconds: events before the output, times of tokens, and what is
    declared. Its error, if it refuses."""

    def run(before: Sequence[str], token_at_ms: Sequence[float], *declared: str) -> dict[str, Any]:
        tokens = [f"token,{at:.9g}" for at in token_at_ms]
        rows = ["event,time_ms", *before, *tokens, f"end,{token_at_ms[-1]:.9g}", *declared]
        file = tmp_path / "events.csv"
        file.write_text("\n".join(rows))
        status = main(["metrics", "--json", str(file)])
        told = capsys.readouterr()
        return json.loads(told.out) if status == 0 else {"error": told.err}

    return run


@pytest.fixture
def kv_size(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `twinpool kv-size` prints, or its error; blanks count once."""

    def run(*arguments: str) -> str:
        main(("kv-size", "--memory", "80GiB", *arguments))
        told = capsys.readouterr()
        return " ".join((told.out + told.err).split())

    return run


def even(first_ms: float, gap_ms: float, count: int) -> list[float]:
    return [first_ms + n * gap_ms for n in range(count)]


def test_ttft_is_the_sum_of_its_stages_and_128_gaps_of_25_ms_take_3_2_s(metrics: Metrics) -> None:
    """40 + 8 + 160 + 12 = 220 ms; 129 tokens have 128 gaps."""
    stages = ("received,0", "queued,40", "prefill_start,48", "prefill_end,208")
    found = metrics(stages, even(220, 25, 129), "declared_ttft_ms,220", "declared_decode_s,3.2")
    assert [round(seconds * 1e3, 6) for seconds in found["stages_s"].values()] == [40, 8, 160, 12]
    assert found["ttft_s"] == pytest.approx(0.220)
    assert sum(found["itls_s"]) == pytest.approx(3.2)


def test_150_tokens_from_190_ms_at_25_ms(metrics: Metrics) -> None:
    declared = (
        "declared_e2e_ms,3915", "declared_tpot_ms,25", "declared_decode_tokens_per_s,40.00",
        "declared_request_tokens_per_s,38.31",
    )  # fmt: skip
    found = metrics(["sent,0"], even(190, 25, 150), *declared)
    assert found["e2e_s"] == pytest.approx(3.915)
    assert found["tpot_s"] == pytest.approx(0.025)
    assert round(found["decode_rate_per_s"], 2) == 40.00
    assert round(found["request_rate_per_s"], 2) == 38.31


def test_150_gaps_between_150_tokens_are_one_too_many(metrics: Metrics) -> None:
    """190 + 150 × 25 = 3,940."""
    found = metrics(["sent,0"], even(190, 25, 150), "declared_e2e_ms,3940")
    assert (
        "declared_e2e_ms 3940, and the events give 3915: off by one, 150 tokens have 149 gaps"
        in found["error"]
    )


def test_48_layers_of_4_kv_heads_in_one_byte(kv_size: Callable[..., str]) -> None:
    """2 × 48 × 4 × 128 × 1 B = 49,152 B per token, 192 MiB for 4,096 tokens."""
    shape = ("--layers", "48", "--kv-heads", "4", "--head-dim", "128", "--kv-cache-dtype", "fp8")
    said = kv_size(*shape, "--context", "4096", "--expect", "49152")
    assert "per token 48 KiB" in said
    assert "per sequence of 4,096 tokens 192 MiB" in said
    assert "--expect is 49,151 bytes per token" in kv_size(*shape, "--expect", "49151")


def test_its_256_tokens_from_420_ms_at_18_ms(metrics: Metrics) -> None:
    declared = (
        "declared_e2e_ms,5010",
        "declared_decode_tokens_per_s,55.56",
        "declared_request_tokens_per_s,51.10",
    )
    found = metrics(["sent,0"], even(420, 18, 256), *declared)
    assert found["e2e_s"] == pytest.approx(5.010)
    assert round(found["decode_rate_per_s"], 2) == 55.56
    assert round(found["request_rate_per_s"], 2) == 51.10


LLAMA_70B = ("--layers", "80", "--head-dim", "128", "--query-heads", "64")


def test_80_layers_of_8_kv_heads_in_two_bytes(kv_size: Callable[..., str]) -> None:
    """2 × 80 × 8 × 128 × 2 B = 327,680 B per token."""
    assert "per token 320 KiB" in kv_size(*LLAMA_70B, "--kv-heads", "8", "--expect", "327680")


def test_query_heads_in_place_of_kv_heads_are_refused(kv_size: Callable[..., str]) -> None:
    """2 × 80 × 64 × 128 × 2 B = 2,621,440 B would be eight times too much."""
    said = kv_size(*LLAMA_70B, "--kv-heads", "8", "--expect", "2621440")
    assert "per token" not in said.split("but")[1]
    assert "are 327,680; it has the 64 query heads in place of the 8 kv_heads" in said
    assert "--kv-heads is missing (kv_heads, not the 64 query heads, is what KV is kept for)" in kv_size(
        *LLAMA_70B
    )


def test_100_requests_in_10_s_of_which_98_complete_and_95_keep_the_slo() -> None:
    good = [stream(10, 0.2, 0.02) for _ in range(95)]
    late = [stream(10, 0.6, 0.02) for _ in range(3)]
    found = summarize(
        run_of([*good, *late, refused(), refused(Ending.FAILED)], 10.0), parse_goodput(["ttft:500"])
    )
    assert (found.rates.requests_per_s, found.rates.goodput_per_s) == (9.8, 9.5)
    assert found.cohort.failure_share == 0.02


THIRTY_PER_S_MS = 1e3 / 30


def test_100_tokens_from_0_4_s_at_30_per_s(metrics: Metrics) -> None:
    """0.4 s + 99 / 30 = 3.7 s."""
    found = metrics(["sent,0"], even(400, THIRTY_PER_S_MS, 100), "declared_e2e_s,3.7")
    assert found["e2e_s"] == pytest.approx(3.7)
    assert found["decode_rate_per_s"] == pytest.approx(30)


def test_a_stall_of_1_2_s_adds_12_ms_to_the_mean_and_all_of_it_to_the_p99(metrics: Metrics) -> None:
    """The same 100 tokens with a stall at token 50: one of 99 gaps."""
    smooth_ms = even(400, THIRTY_PER_S_MS, 100)
    stalled_ms = [at + (1200 if n >= 50 else 0) for n, at in enumerate(smooth_ms)]
    smooth, stalled = metrics(["sent,0"], smooth_ms), metrics(["sent,0"], stalled_ms)
    assert round(1e3 * (stalled["tpot_s"] - smooth["tpot_s"])) == 12
    assert stalled["itl_p99_s"] - smooth["itl_p99_s"] == pytest.approx(1.2)
