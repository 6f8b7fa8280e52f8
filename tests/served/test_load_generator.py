"""The load generator against a server that answers as scripted, and that notes when it sent what."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from support.scripted import WAIT_S, Scripted, asking_for, scripted_server, steady, word_tokenizer

from twinpool.bench.scripted_answer import Piece, Script, Then
from twinpool.bench.scripted_server import Sent
from twinpool.bench.serving.generator import run_load
from twinpool.bench.serving.record import Chunk, Ending, RequestRecord, Run, TokenCount, decode_run
from twinpool.bench.serving.server_facts import NoServer, ask_server
from twinpool.bench.serving.settings import Endpoint, ServerKind
from twinpool.bench.serving.slo import Slo
from twinpool.bench.serving.summary import Cohort, summarize
from twinpool.errors import ConfigError

CONSTANT = Script(steady(20, 0.005))
BURSTY = Script(tuple(Piece(0.03 if number % 5 == 0 else 0.0) for number in range(20)))
STALLING = Script((*steady(10, 0.003), Piece(0.15), *steady(9, 0.003, first_s=0.003)))
SEVERAL = Script(steady(8, 0.006, num_tokens=3))
CUT = Script(steady(5, 0.01), cut_bytes=11, has_comments=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with scripted_server() as running:
        yield running


def as_the_server_saw(run: Run, log: dict[str, Sent]) -> Run:
    """The same run by the server's clock: what it sent when, from when it had received the request."""

    def seen(record: RequestRecord) -> RequestRecord:
        sent = log[record.request_id]
        chunks = tuple(
            Chunk(at - sent.received_at + record.sent_at_s, chunk.num_tokens)
            for at, chunk in zip(sent.pieces_at, record.chunks, strict=True)
        )
        return msgspec.structs.replace(record, chunks=chunks)

    return msgspec.structs.replace(run, requests=tuple(seen(record) for record in run.requests))


@pytest.mark.parametrize("endpoint", Endpoint)
def test_every_metric_is_what_the_server_did(server: Scripted, endpoint: Endpoint) -> None:
    scripts = [CONSTANT, BURSTY, STALLING, SEVERAL, CUT] * 6
    run = run_load(
        asking_for(scripts, at_s=[0.02 * number for number in range(len(scripts))]),
        server.settings(endpoint=endpoint),
    )
    assert [record.ending for record in run.requests] == [Ending.COMPLETED] * len(scripts)
    assert [record.output_tokens for record in run.requests] == [20, 20, 20, 24, 5] * 6
    assert [len(record.chunks) for record in run.requests] == [20, 20, 20, 8, 5] * 6
    assert {record.token_count for record in run.requests} == {TokenCount.IDS}
    slo = Slo(ttft_s=0.5, itl_p99_s=0.1)
    seen, done = (summarize(each, slo).cohort for each in (run, as_the_server_saw(run, server.log())))
    assert (seen.num_good, seen.output_tokens) == (done.num_good, done.output_tokens) == (24, 534)
    assert seen.num_shared_tokens == 6 * 24
    for measured, wanted in zip(medians_s(seen), medians_s(done), strict=True):
        assert measured == pytest.approx(wanted, abs=0.001)


def medians_s(cohort: Cohort) -> list[float]:
    distributions = (cohort.ttft, cohort.itl, cohort.chunk_gap, cohort.tpot, cohort.e2e)
    return [each.p50 for each in distributions if each is not None]


def test_no_piece_is_seen_before_it_was_sent_and_the_middle_one_within_a_millisecond(
    server: Scripted,
) -> None:
    before = time.monotonic()
    run = run_load(
        asking_for([CONSTANT, STALLING] * 5, at_s=[0.03 * n for n in range(10)]), server.settings()
    )
    log = server.log()
    # The run's zero on the shared clock: no request reached the server before it was sent.
    delays_s = []
    starts = [log[r.request_id].received_at - r.sent_at_s for r in run.requests]
    zero = min(starts)
    assert zero > before
    for record in run.requests:
        sent_at = log[record.request_id].pieces_at
        delays_s += [chunk.at_s + zero - at for chunk, at in zip(record.chunks, sent_at, strict=True)]
    assert min(delays_s) > -0.001, "zero is late by no more than the quickest request's way"
    assert median(delays_s) < 0.001


def test_each_way_to_end_is_told_apart_and_only_success_counts(server: Scripted) -> None:
    some = steady(3, 0.002)
    scripts = {
        "fine": Script(some),
        "busy": Script(status=429, retry_after_s=3),
        "down": Script(status=503),
        "lost": Script(status=500),
        "late": Script(status=504),
        "error": Script(some, then=Then.ERROR, error="the worker died"),
        "broken": Script(some, then=Then.BREAK),
        "silent": Script(some, then=Then.NOTHING),
        "gave up": Script(some, finish_reason="abort"),
        "nothing": Script(then=Then.BREAK),
    }
    run = run_load(asking_for(list(scripts.values())), server.settings(limit_s=0.5))
    ended = dict(zip(scripts, run.requests, strict=True))
    assert {name: record.ending for name, record in ended.items()} == {
        "fine": Ending.COMPLETED,
        "busy": Ending.REJECTED,
        "down": Ending.REJECTED,
        "lost": Ending.FAILED,
        "late": Ending.TIMED_OUT,
        "error": Ending.FAILED,
        "broken": Ending.FAILED,
        "silent": Ending.TIMED_OUT,
        "gave up": Ending.FAILED,
        "nothing": Ending.FAILED,
    }
    assert (ended["busy"].status, ended["busy"].error) == (429, "as scripted")
    assert ended["error"].error == "the worker died"
    assert len(ended["silent"].chunks) == 3
    cohort = summarize(run, Slo(ttft_s=60.0)).cohort
    assert (cohort.num_good, cohort.output_tokens) == (1, 3)


def test_a_slow_server_delays_no_arrival(server: Scripted) -> None:
    slow = Script((Piece(0.4),))
    run = run_load(asking_for([slow] * 12, at_s=[0.02 * n for n in range(12)]), server.settings())
    log = server.log()
    entries = [log[record.request_id] for record in run.requests]
    assert max(entry.received_at for entry in entries) < min(entry.pieces_at[0] for entry in entries)


def most_at_once(entries: list[Sent]) -> int:
    moves = [(entry.received_at, 1) for entry in entries]
    moves += [(entry.ended_at, -1) for entry in entries if entry.ended_at is not None]
    running = most = 0
    for _, change in sorted(moves):
        running += change
        most = max(most, running)
    return most


def test_arrivals_beyond_the_concurrency_wait_and_their_time_goes_on(server: Scripted) -> None:
    run = run_load(asking_for([Script((Piece(0.05),))] * 6), server.settings(max_concurrency=2))
    log = server.log()
    assert most_at_once([log[record.request_id] for record in run.requests]) == 2
    assert all(record.intended_at_s == pytest.approx(0.0, abs=1e-9) for record in run.requests)
    cohort = summarize(run).cohort
    assert cohort.ttft is not None
    assert cohort.ttft_from_intended is not None
    assert cohort.ttft_from_intended.max > cohort.ttft.max + 0.05, "two rounds of others came first"
    assert len(run.senders[0].send_lags_s) == 6


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_closed_loop_has_as_many_requests_as_clients_and_sends_each_once(
    server: Scripted, num_processes: int
) -> None:
    requests = asking_for([Script(steady(2, 0.01))] * 20)
    run = run_load(requests, server.settings(num_clients=4, num_processes=num_processes))
    log = server.log()
    entries = [log[record.request_id] for record in run.requests]
    assert [record.index for record in run.requests] == list(range(20))
    assert {record.ending for record in run.requests} == {Ending.COMPLETED}
    assert most_at_once(entries) == 4
    assert len(run.senders) == num_processes
    assert all(not sender.send_lags_s for sender in run.senders)


def test_tokens_are_counted_by_the_surest_means_that_the_server_offers(
    server: Scripted, tmp_path: Path
) -> None:
    pieces = tuple(Piece(0.002, len(text), text) for text in ("abc", "d", "ef"))
    plain = Script(pieces, has_ids=False, has_role=True)
    running, silent = (
        msgspec.structs.replace(plain, **change)
        for change in ({"has_running_usage": True}, {"has_usage": False})
    )
    requests = asking_for([plain, running, silent])
    by_text = server.settings(ServerKind.OPENAI, tokenizer_file=str(word_tokenizer(tmp_path)))
    with_tokenizer = run_load(requests, by_text).requests
    assert [r.token_count for r in with_tokenizer] == [
        TokenCount.TOKENIZER,
        TokenCount.USAGE,
        TokenCount.TOKENIZER,
    ]
    for record in with_tokenizer:
        assert [chunk.num_tokens for chunk in record.chunks] == [3, 1, 2]
        assert record.output_tokens == 6
    without = run_load(requests, server.settings(ServerKind.OPENAI)).requests
    assert [record.token_count for record in without] == [
        TokenCount.CHUNK,
        TokenCount.USAGE,
        TokenCount.CHUNK,
    ]
    assert [[chunk.num_tokens for chunk in record.chunks] for record in without] == [
        [2, 2, 2],
        [3, 1, 2],
        [1, 1, 1],
    ]
    digests = {record.output_digest for record in with_tokenizer + without}
    assert len(digests) == 1, "the same text"


def test_requests_that_fit_no_endpoint_and_loads_without_times_are_refused(server: Scripted) -> None:
    ids = msgspec.structs.replace(asking_for([CONSTANT])[0], prompt=(1, 2, 3))
    with pytest.raises(ConfigError, match="token ids, which chats cannot be sent"):
        run_load([ids], server.settings(endpoint=Endpoint.CHAT))
    untimed = msgspec.structs.replace(ids, at_s=None)
    with pytest.raises(ConfigError, match="need their times"):
        run_load([untimed], server.settings())


def certificate(folder: Path) -> Path:
    """A self-signed one for 127.0.0.1, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file = folder / "server.pem"
    file.write_bytes(secret + made.public_bytes(pem))
    return file


async def test_https_is_spoken_and_a_strange_certificate_taken_only_if_told(tmp_path: Path) -> None:
    with scripted_server("--certificate", str(certificate(tmp_path)), scheme="https") as server:
        with pytest.raises(NoServer, match="certificate verify failed"):
            await ask_server(server.url, None, None)
        facts = await ask_server(server.url, None, None, verify_tls=False)
        assert facts.model == "scripted"
        run = run_load(asking_for([CONSTANT] * 3), server.settings(verify_tls=False))
    assert Counter(record.ending for record in run.requests) == {Ending.COMPLETED: 3}


def bench(server: Scripted, tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    tokenizer = word_tokenizer(tmp_path)
    data = tmp_path / "prompts.jsonl"
    lines = [msgspec.json.encode({"prompt": "abc", "output_tokens": 8}).decode()] * 2000
    data.write_text("\n".join(lines))
    command = [
        sys.executable,
        "-m",
        "twinpool",
        "bench",
        "--base-url",
        server.url,
        "--tokenizer",
        str(tokenizer),
    ]
    command += ["--dataset-name", "custom", "--dataset-path", str(data), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)


def test_the_command_prints_and_writes_a_result(server: Scripted, tmp_path: Path) -> None:
    flags = ("--num-prompts", "10", "--request-rate", "100", "--goodput", "ttft:5000", "--num-warmups", "1")
    out, said = bench(server, tmp_path, *flags, "--save-result", "--result-filename", "r.json").communicate()
    assert "Successful requests:                           10" in out, said
    result = msgspec.json.decode((tmp_path / "r.json").read_bytes())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (10, 0, 80)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["twinpool"]["settings"]["dataset_name"] == "custom"


def test_ctrl_c_stops_the_load_and_shows_what_was_seen(server: Scripted, tmp_path: Path) -> None:
    before = len(server.log())
    flags = ("--num-prompts", "2000", "--request-rate", "50", "--output-len", "100000")
    process = bench(server, tmp_path, *flags, "--warm-up", "20", "--save-records", "run.json")
    deadline = time.monotonic() + WAIT_S
    while len(server.log()) < before + 5:
        assert time.monotonic() < deadline, "no request came"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, said
    assert "interrupted: this is what was seen until then" in out
    assert "NOT A RESULT: --warm-up is 20.0" in out
    assert decode_run((tmp_path / "run.json").read_bytes()).was_interrupted
    assert "cancelled: the run was stopped" in out
    assert sum(entry.was_left for entry in server.log().values()) >= 5


def test_a_generator_that_cannot_keep_up_says_so_and_calls_it_no_result(
    server: Scripted, tmp_path: Path
) -> None:
    flags = ("--num-prompts", "1000", "--request-rate", "1e6", "--output-len", "1", "--arrivals", "constant")
    process = bench(server, tmp_path, *flags, "--save-result", "--result-filename", "r.json")
    out, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1, said
    assert (
        "NOT A RESULT, the load generator was the bottleneck: half of the requests were sent more than" in out
    )
    assert msgspec.json.decode((tmp_path / "r.json").read_bytes())["twinpool"]["is_valid"] is False


def test_a_missing_server_is_told_in_one_line(tmp_path: Path) -> None:
    process = bench(Scripted("http://127.0.0.1:9"), tmp_path)
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert said.startswith("twinpool: no server answers at http://127.0.0.1:9 (")
    assert said.count("\n") == 1


async def test_https_to_a_server_without_tls_is_told_as_what_it_is() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as plain:
        port = plain.sockets[0].getsockname()[1]
        with pytest.raises(NoServer, match=r"does not speak TLS .*; is it http://\?"):
            await ask_server(f"https://127.0.0.1:{port}", None, None)
