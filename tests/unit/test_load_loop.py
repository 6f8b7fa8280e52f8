"""What a sender does with its connections, what it says of itself, and what is made of that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from twinpool.bench.serving.alarm import Alarm
from twinpool.bench.serving.load_loop import LoadLoop
from twinpool.bench.serving.progress import Progress, Progressing, ProgressLine
from twinpool.bench.serving.record import NO_CONNECTION, Chunk, Ending, RequestRecord, Run, Sender, TokenCount
from twinpool.bench.serving.sender_messages import Plan, Tick
from twinpool.bench.serving.settings import LoadSettings
from twinpool.bench.serving.timelines import agreement, read_timeline, with_timeline
from twinpool.bench.serving.verdict import generator_faults, load_warnings
from twinpool.bench.serving.workload import PlannedRequest

ANSWER = b'data: {"choices":[{"text":"x","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)


@asynccontextmanager
async def counting_server(answers_per_connection: int) -> AsyncIterator[tuple[str, list[int]]]:
    """Closes each connection, without a word, at the request after so many; counts requests by connection."""
    counts: list[int] = []

    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        number = len(counts)
        counts.append(0)
        try:
            while counts[number] <= answers_per_connection:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(
                    int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                )
                counts[number] += 1
                if counts[number] <= answers_per_connection:
                    writer.write(HEAD + ANSWER)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            pass  # the client has all that it wants
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", counts
    await asyncio.gather(*(task for task in serving if task is not None))


async def loaded(url: str, num_requests: int, num_clients: int = 1) -> LoadLoop:
    settings = LoadSettings(base_url=url, model="m", limit_s=10.0)
    planned = tuple(
        PlannedRequest(index=n, prompt="hi", input_tokens=1, output_tokens=1) for n in range(num_requests)
    )
    plan = Plan(settings=settings, requests=planned, max_concurrency=None, num_clients=num_clients, core=None)
    load = LoadLoop(plan, "test", lambda _: None)
    await load.run(time.monotonic())
    return load


async def test_a_connection_is_used_again_and_one_that_died_meanwhile_is_replaced() -> None:
    async with counting_server(answers_per_connection=3) as (url, counts):
        load = await loaded(url, num_requests=7)
    assert [ask.ending for ask in load.asks] == [Ending.COMPLETED] * 7
    assert counts == [4, 4, 1], "each fourth request was closed upon, and sent again on a new connection"


async def test_a_server_that_closes_new_connections_too_is_a_failure_not_an_endless_retry() -> None:
    async with counting_server(answers_per_connection=0) as (url, counts):
        load = await loaded(url, num_requests=1)
    assert (load.asks[0].ending, load.asks[0].error) == (
        Ending.FAILED,
        "the connection ended without an answer",
    )
    assert sum(counts) <= 2


async def test_an_alarm_rings_at_its_time_not_before_and_again_when_set_anew() -> None:
    rung: list[float] = []
    heard = asyncio.Event()

    def ring() -> None:
        rung.append(time.monotonic())
        heard.set()

    alarm = Alarm(ring)
    start = time.monotonic()
    for number in range(1, 4):
        heard.clear()
        alarm.set(start + 0.01 * number)
        await asyncio.wait_for(heard.wait(), 10)
    alarm.set(start)
    heard.clear()
    await asyncio.wait_for(heard.wait(), 10)
    alarm.close()
    assert [at >= start + 0.01 * number for number, at in enumerate(rung[:3], start=1)] == [True] * 3
    assert len(rung) == 4, "a time that has passed rings at once"


def tick(**changes: object) -> Tick:
    nothing = Tick(num_sent=0, num_running=0, num_waiting=0, num_pieces=0, endings={}, ttfts_s=(), tpots_s=())
    return msgspec.structs.replace(nothing, **changes)


def test_progress_adds_up_all_senders_and_remembers_latencies() -> None:
    progressing = Progressing(num_planned=10)
    progressing.add(0, tick(num_sent=2, num_running=1, endings={"completed": 1}, ttfts_s=(0.1,)))
    progressing.add(
        0, tick(num_sent=4, num_running=2, num_pieces=1200, endings={"completed": 2}, ttfts_s=(0.3,))
    )
    progressing.add(
        1,
        tick(
            num_sent=3, num_running=1, num_waiting=1, num_pieces=34, endings={"rejected": 2}, ttfts_s=(0.2,)
        ),
    )
    now = progressing.now(elapsed_s=4.0)
    assert (now.num_sent, now.num_running, now.num_waiting, now.num_done) == (7, 3, 1, 4)
    assert (now.ttft_p50_s, now.ttft_p99_s, now.rate_per_s) == (0.2, 0.3, 0.5)
    assert now.line() == (
        "4/10 done, 3 running, 1 waiting, 2 rejected, 1,234 pieces of output, 0.50 requests/s, "
        "TTFT p50 200 ms p99 300 ms, TPOT p50 - p99 -"
    )


def record(index: int, first_s: float, timeline: bytes | None = None) -> RequestRecord:
    return RequestRecord(
        index=index,
        request_id=f"r-{index}",
        group="",
        intended_at_s=1.0,
        sent_at_s=1.0,
        ended_at_s=5.0,
        ending=Ending.COMPLETED,
        input_tokens=1,
        wanted_output_tokens=1,
        output_tokens=1,
        chunks=(Chunk(1.0 + first_s, 1),),
        token_count=TokenCount.IDS,
        timeline=None if timeline is None else read_timeline(timeline),
    )


def run(*senders: Sender, records: tuple[RequestRecord, ...] = ()) -> Run:
    return Run(started_at="", duration_s=5.0, requests=records, senders=senders, settings={})


def sender(lags_s: tuple[float, ...] = (0.0001,) * 100, cpu: float = 0.3, stalled: float = 0.0) -> Sender:
    return Sender(
        num_requests=len(lags_s),
        cpu_share=cpu,
        send_lags_s=lags_s,
        loop_stalls_s=(0.004,),
        stalled_share=stalled,
    )


@pytest.mark.parametrize(
    ("senders", "ttft_s", "words"),
    [
        ([sender()], 0.1, []),
        ([sender((0.002,) * 100)], 0.1, ["half of the requests were sent more than 2.00 ms late"]),
        (
            [sender((0.0001,) * 97 + (0.05,) * 3)],
            0.1,
            ["one request in a hundred was sent more than 50.0 ms late"],
        ),
        ([sender((0.0001,) * 97 + (0.05,) * 3)], 0.6, []),
        ([sender(cpu=0.95)], 0.1, ["the sender was busy for 95% of the time"]),
        (
            [sender(), sender(stalled=0.05)],
            0.1,
            ["sender 1's event loop was late for 5.0% of the time, for up to 4 ms"],
        ),
    ],
)
def test_the_generator_knows_when_it_was_the_bottleneck(
    senders: list[Sender], ttft_s: float, words: list[str]
) -> None:
    measured = run(*senders, records=(record(0, ttft_s),))
    assert list(generator_faults(measured, is_paced=True)) == words


def test_a_burst_has_no_lag() -> None:
    assert generator_faults(run(sender((0.05,) * 100)), is_paced=False) == ()


TIMELINE = {
    "request_id": "r-0",
    "ttft_s": 0.22,
    "e2e_s": 3.4,
    "stages_s": {"validate": 0.0, "tokenize": 0.04, "queue": 0.008, "prefill": 0.16, "transfer": 0.01, "decode": 3.0,
                 "deliver": 0.012},
    "attempts": [{"attempt": 1, "prefill_worker": "prefill-0", "decode_worker": "decode-1", "ended": ""}],
    "states": [{"state": "received", "at_s": 0.0}, {"state": "transferring", "at_s": 0.208},
               {"state": "decoding", "at_s": 0.218}],
}  # fmt: skip


def test_a_timeline_says_which_stages_sum_to_the_ttft_and_which_run_beside() -> None:
    timeline = read_timeline(msgspec.json.encode(TIMELINE))
    assert [stage.name for stage in timeline.stages] == [
        "validate",
        "tokenize",
        "queue",
        "prefill",
        "deliver",
    ]
    assert sum(stage.duration_s for stage in timeline.stages) == pytest.approx(0.22)
    assert timeline.stages[3].start_s == pytest.approx(0.048)
    assert [(stage.name, stage.start_s, stage.worker) for stage in timeline.beside] == [
        ("transfer", 0.208, "decode-1"),
        ("decode", 0.218, "decode-1"),
    ]
    assert (timeline.workers, timeline.num_attempts) == (("prefill-0", "decode-1"), 1)


def test_stages_agree_with_the_client_or_it_is_said_by_how_much_not() -> None:
    timeline = msgspec.json.encode(TIMELINE)
    records = (record(0, 0.221, timeline), record(1, 0.25, timeline), record(2, 0.3))
    found = agreement(run(records=records))
    assert found is not None
    assert (found.num_joined, found.num_missing, found.num_within) == (2, 1, 1)
    assert found.words() == (
        "stages sum to the client's TTFT within 2 ms for 1 of 2 requests: median 15.50 ms, furthest 30.00 ms (r-1); "
        "the server had no timeline of 1"
    )
    assert agreement(run(records=(record(2, 0.3),))) is None


def lost(index: int, at_s: float, error: str = f"{NO_CONNECTION}: refused") -> RequestRecord:
    changes = {
        "intended_at_s": at_s,
        "sent_at_s": at_s,
        "chunks": (),
        "ending": Ending.FAILED,
        "error": error,
    }
    return msgspec.structs.replace(record(index, 0.1), **changes)


def test_a_load_of_which_next_to_all_completed_has_no_warnings() -> None:
    records = tuple(record(number, 0.1) for number in range(99))
    assert load_warnings(run(records=(*records, lost(99, 2.0, "the worker died")))) == ()


def test_a_server_that_was_lost_is_told_with_when_and_how_much_it_cost() -> None:
    records = (record(0, 0.1), record(1, 0.1), lost(2, 1.5, "broken"), lost(3, 2.5), lost(4, 3.0))
    assert load_warnings(run(records=records)) == (
        "3 of 5 requests (60%) did not complete; all latencies are of the others, which may have been served better "
        "for it",
        "the server went away: none of the last 2 requests, due from 2.5 s on, reached it",
    )
    assert load_warnings(run(records=records[2:])) == (
        "none of 3 requests completed",
        "the server went away: none of the last 2 requests, due from 2.5 s on, reached it",
    )
    assert load_warnings(run(records=records[3:])) == (
        "none of 2 requests completed",
        "the server is not there: no connection: refused",
    )


def test_what_an_interruption_cut_off_is_no_warning() -> None:
    cut = msgspec.structs.replace(record(1, 0.1), ending=Ending.CANCELLED)
    interrupted = msgspec.structs.replace(run(records=(record(0, 0.1), cut)), was_interrupted=True)
    assert load_warnings(interrupted) == ()


def test_prompt_tokens_in_the_cache_are_the_timelines_where_the_usage_says_nothing() -> None:
    timeline = read_timeline(msgspec.json.encode(TIMELINE | {"prefill": {"num_cached_tokens": 48}}))
    assert timeline.cached_tokens == 48
    assert read_timeline(msgspec.json.encode(TIMELINE | {"prefill": None})).cached_tokens is None
    asked = msgspec.structs.replace(record(0, 0.1), input_tokens=64)
    assert with_timeline(asked, timeline).cached_tokens == 48
    said = msgspec.structs.replace(asked, cached_tokens=0)
    assert with_timeline(said, timeline).cached_tokens == 0
    assert with_timeline(asked, None).cached_tokens is None
    resumed = msgspec.structs.replace(asked, input_tokens=40)
    assert with_timeline(resumed, timeline).cached_tokens == 40


def test_where_there_is_no_terminal_a_line_without_news_comes_rarely(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def progress(elapsed_s: float, num_pieces: int) -> Progress:
        ticked = Progressing(num_planned=1)
        ticked.add(0, tick(num_sent=1, num_running=1, num_pieces=num_pieces))
        return ticked.now(elapsed_s)

    with ProgressLine(1) as line:
        for elapsed_s, num_pieces in ((10.0, 5), (20.0, 5), (30.0, 6), (40.0, 6), (90.0, 6)):
            line.show(progress(elapsed_s, num_pieces))
    assert [each.split(":")[0] for each in capsys.readouterr().err.splitlines()] == ["10 s", "30 s", "90 s"]
