"""Runs and reports that nobody measured: plausible, the same each time, for tests of what is made of runs."""

from __future__ import annotations

import random

from twinpool.bench.reports.model import (
    ArmReport,
    Better,
    Comparison,
    Fact,
    Figure,
    Found,
    Interval,
    MapCell,
    Measure,
    OutputCheck,
    RateCurve,
    RatePoint,
    Report,
    Table,
    Unit,
    WinLoseMap,
)
from twinpool.bench.serving.record import (
    Chunk,
    Ending,
    RequestRecord,
    Run,
    Sender,
    ServerTimeline,
    Stage,
    TokenCount,
)

HOSTILE = "</script><script>document.title='caught'</script><img src=x onerror=alert(1)>&\"'"
"""A text that would run if a page took it for markup."""
P99_ITL = Measure(name="p99 ITL", unit=Unit.SECONDS, better=Better.LOWER)
P99_TTFT = Measure(name="p99 TTFT", unit=Unit.SECONDS, better=Better.LOWER)
GOODPUT = Measure(name="goodput", unit=Unit.REQUESTS_PER_S, better=Better.HIGHER)


def made_up_run(
    *,
    seed: int = 1,
    num_requests: int = 40,
    rate: float = 4.0,
    is_split: bool = True,
    with_timelines: bool = True,
) -> Run:
    """Poisson arrivals of which every sixth has a long prompt; on a split server gaps are even, on the other one long
    prompts stretch them. One request in twenty does not complete."""
    chance = random.Random(seed)
    at_s, records = 0.0, []
    for index in range(num_requests):
        at_s += chance.expovariate(rate)
        records.append(_record(chance, index, at_s, is_split, with_timelines))
    lags = tuple(record.sent_at_s - record.intended_at_s for record in records)
    return Run(
        started_at="2026-01-02T03:04:05+00:00",
        duration_s=max(record.ended_at_s for record in records),
        requests=tuple(records),
        senders=(Sender(num_requests=num_requests, cpu_share=0.2, send_lags_s=lags),),
        settings={"request_rate": rate, "num_prompts": num_requests, "seed": seed},
    )


def _record(
    chance: random.Random, index: int, at_s: float, is_split: bool, with_timelines: bool
) -> RequestRecord:
    is_long = index % 6 == 5
    input_tokens, wanted = (1500, 32) if is_long else (chance.randint(100, 400), 48)
    sent_at_s = at_s + chance.uniform(0.0001, 0.0006)
    ending = chance.choice((Ending.REJECTED, Ending.FAILED)) if chance.random() < 0.05 else Ending.COMPLETED
    queue_s, prefill_s = chance.expovariate(20), input_tokens / 9000 * chance.uniform(0.9, 1.2)
    stages, place_s = [], 0.0
    worker = f"prefill-{index % 2}" if is_split else "colocated-0"
    parts = (
        ("validate", 0.0002),
        ("tokenize", 0.0008),
        ("queue", queue_s),
        ("prefill", prefill_s),
        ("deliver", 0.0003),
    )
    for name, duration_s in parts:
        stages.append(Stage(name, place_s, duration_s, worker if name == "prefill" else ""))
        place_s += duration_s
    chunks, now_s = [], sent_at_s + place_s + 0.0008
    num_chunks = {Ending.COMPLETED: wanted, Ending.FAILED: 7}.get(ending, 0)
    for _ in range(num_chunks):
        chunks.append(Chunk(now_s, 1))
        now_s += chance.lognormvariate(-4.0, 0.15) + (
            0.12 if not is_split and chance.random() < 0.04 else 0.0
        )
    ended_at_s = chunks[-1].at_s + 0.0005 if chunks else sent_at_s + 0.003
    decode = Stage(
        "decode",
        place_s + 0.004,
        ended_at_s - sent_at_s - place_s - 0.004,
        "decode-0" if is_split else worker,
    )
    beside = (Stage("transfer", place_s, 0.004, worker), decode) if is_split else (decode,)
    timeline = ServerTimeline(
        ttft_s=place_s, e2e_s=ended_at_s - sent_at_s, stages=tuple(stages), beside=beside
    )
    return RequestRecord(
        index=index,
        request_id=f"req-{index}",
        group="B" if is_long else "A",
        intended_at_s=at_s,
        sent_at_s=sent_at_s,
        ended_at_s=ended_at_s,
        ending=ending,
        input_tokens=input_tokens,
        wanted_output_tokens=wanted,
        output_tokens=num_chunks,
        chunks=tuple(chunks),
        token_count=TokenCount.IDS,
        finish_reason="length" if ending is Ending.COMPLETED else None,
        status=429 if ending is Ending.REJECTED else 200,
        error={Ending.REJECTED: "429: queue is full", Ending.FAILED: "stream ended early"}.get(ending, ""),
        timeline=timeline if with_timelines and chunks else None,
    )


def made_up_report(num_requests: int = 40, num_runs: int = 2) -> Report:
    """Two arms with everything that a report can hold."""
    arms = tuple(
        ArmReport(
            name=name,
            description=description,
            command=f"twinpool serve {flags}",
            runs=tuple(
                made_up_run(seed=seed, num_requests=num_requests, is_split=is_split)
                for seed in range(num_runs)
            ),
            figures=tuple(
                Figure(measure, Interval(value * factor, value * factor * 0.9, value * factor * 1.1))
                for measure, value in ((P99_TTFT, 0.45), (P99_ITL, 0.08), (GOODPUT, 3.1))
            ),
            settings={"block_size": 16, "dtype": "bfloat16"},
        )
        for name, description, flags, is_split, factor in (
            (
                "colocated-chunked-128",
                "one worker on both cores",
                "--colocated 1 --token-budget 128",
                False,
                1.0,
            ),
            ("1p1d", "one prefill and one decode worker, a core each", "--prefill 1 --decode 1", True, 0.8),
        )
    )
    baseline, other = arms[0].name, arms[1].name
    return Report(
        title="Long prompts beside chats",
        created_at="2026-01-02T04:00:00+00:00",
        arms=arms,
        comparisons=tuple(
            Comparison(
                measure=measure,
                baseline=baseline,
                other=other,
                baseline_value=Interval(value),
                other_value=Interval(value * (1 + change)),
                difference=Interval(value * change, value * low, value * high),
                change=Interval(change, low, high),
                num_pairs=num_requests * num_runs,
                num_repetitions=num_runs,
            )
            for measure, value, change, low, high in (
                (P99_ITL, 0.08, -0.42, -0.45, -0.38),
                (P99_TTFT, 0.45, 0.18, 0.09, 0.27),
                (GOODPUT, 3.1, 0.02, -0.03, 0.07),
            )
        ),
        output_checks=(OutputCheck(baseline=baseline, other=other, num_compared=76, num_different=0),),
        curves=tuple(_curve(arm.name, knee) for arm, knee in zip(arms, (4.0, 5.5), strict=True)),
        maps=(_map(baseline, other),),
        tables=(
            Table(
                title="Three customers",
                columns=("request", "queue", "prefill", "whose wait grew"),
                rows=(
                    ("A", "2 ms", "22 ms", "no"),
                    ("B", "3 ms", "1,310 ms", "no"),
                    ("C", "1,290 ms", "31 ms", "yes"),
                ),
                note="All three come within 50 ms.",
            ),
        ),
        findings=("C waits for B's whole prompt on the colocated server only.",),
        slo="TTFT 500 ms, TPOT 50 ms",
        hardware=(Fact("processor", "a processor of two cores"), Fact("memory", "16 GiB")),
        settings=(Fact("model", "a model"), Fact("seed", "0")),
        commands=("twinpool compare --arms colocated-chunked,1p1d",),
    )


def _curve(arm: str, knee: float) -> RateCurve:
    points = []
    for rate in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0):
        attainment = 0.99 if rate < knee else max(0.05, 0.99 - 0.3 * (rate - knee))
        goodput = rate * attainment
        points.append(
            RatePoint(
                rate=rate,
                goodput=Interval(goodput, goodput * 0.95, goodput * 1.03),
                attainment=attainment,
                holds=attainment >= 0.9,
            )
        )
    return RateCurve(
        arm=arm, points=tuple(points), highest_rate=Interval(knee, knee - 0.3, knee + 0.2), workload="chat"
    )


def _map(baseline: str, other: str) -> WinLoseMap:
    cells = []
    for slo, lean in (
        ("tight TTFT, tight ITL", 0.2),
        ("tight TTFT, loose ITL", -0.4),
        ("loose TTFT, tight ITL", 0.7),
        ("loose TTFT, loose ITL", -0.1),
    ):
        for column, input_tokens in enumerate((128, 512, 2048)):
            for row, output_tokens in enumerate((32, 128, 512)):
                gain = 1 + lean + 0.15 * column - 0.1 * row
                rate = 8.0 / (1 + column) / (1 + row)
                holds_nowhere = slo.startswith("tight TTFT, tight") and column == 2
                found = Found.HOLDS
                if holds_nowhere:
                    found = Found.NOT_KNOWN if row == 2 else Found.AT_NO_RATE
                cells.append(
                    MapCell(
                        input_tokens=input_tokens,
                        output_tokens=output_tokens,
                        reuse=0.0,
                        slo=slo,
                        baseline_rate=Interval(0.0 if holds_nowhere else rate),
                        other_rate=Interval(0.0 if holds_nowhere else rate * gain),
                        baseline_found=found,
                        other_found=found,
                        gain=None if holds_nowhere else Interval(gain, gain - 0.12, gain + 0.12),
                    )
                )
    slos = {"tight TTFT, tight ITL": "TTFT 200 ms, ITL 40 ms"}
    return WinLoseMap(baseline=baseline, other=other, cells=tuple(cells), slos=slos)
