"""`twinpool bench serve`: what is refused before a load, and what is never written."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import pytest
import tokenizers

from twinpool.bench.serving.arrivals import Pacing, Process
from twinpool.bench.serving.record import Chunk, Ending, RequestRecord, Run, TokenCount
from twinpool.bench.serving.server_facts import ServerFacts
from twinpool.bench.serving.settings import ServerKind
from twinpool.bench.serving.summary import WindowKind, window_of
from twinpool.bench.serving.workload import PlannedRequest
from twinpool.commands.bench_serve import (
    _check_clients,
    _check_flags,
    _check_window,
    _load_settings,
    add_part,
    command_shown,
)
from twinpool.commands.results import accelerators
from twinpool.errors import ConfigError


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_part(parser.add_subparsers())
    return parser.parse_args(["serve", *flags])


def record(at_s: float) -> RequestRecord:
    return RequestRecord(
        index=0, request_id="", group="", intended_at_s=at_s, sent_at_s=at_s, ended_at_s=at_s + 1.0,
        ending=Ending.COMPLETED, input_tokens=1, wanted_output_tokens=1, output_tokens=1,
        chunks=(Chunk(at_s + 0.5, 1),), token_count=TokenCount.IDS,
    )  # fmt: skip


def run_of(*times_s: float) -> Run:
    records = tuple(map(record, times_s))
    return Run(started_at="", duration_s=times_s[-1] + 1.0, requests=records, senders=(), settings={})


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["bench", "--api-key", "sk-1", "--port", "8"], "twinpool bench --api-key '***' --port 8"),
        (["bench", "--api-key=sk-1", "--port", "8"], "twinpool bench '--api-key=***' --port 8"),
        (["bench", "--api-k", "sk-1"], "twinpool bench --api-k '***'"),
        (
            ["bench", "--header", "a=sk-1", "b=sk-1", "--port=8"],
            "twinpool bench --header '***' '***' --port=8",
        ),
    ],
)
def test_the_command_in_a_result_has_no_secrets(typed: list[str], shown: str) -> None:
    assert command_shown(typed) == shown


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--metric-percentiles", "50,101"),
            "--metric-percentiles is '50,101'; allowed: numbers from 0 to 100",
        ),
        (("--metric-percentiles", "x"), "--metric-percentiles is 'x'"),
        (("--percentile-metrics", "ttft,x"), "--percentile-metrics is 'ttft,x'"),
        (("--num-warmups", "-1"), "--num-warmups is -1"),
        (("--result-dir", "no/such"), "--result-dir is 'no/such'"),
        (("--result-filename", "no/such.json"), "--result-filename is 'no/such.json'"),
        (("--save-records", "no/such.json"), "--save-records is 'no/such.json'"),
    ],
)
def test_flags_that_cannot_be_are_refused_before_a_load(
    flags: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _check_flags(parsed())
    with pytest.raises(ConfigError, match=words):
        _check_flags(parsed(*flags))


@pytest.mark.parametrize("value", ["decode=0", "decode=x", "total=2", "decode"])
def test_accelerators_are_counted_by_pool(value: str) -> None:
    assert accelerators(["prefill=1", "decode=2"]) == {"prefill": 1, "decode": 2}
    with pytest.raises(ConfigError, match="--accelerators is"):
        accelerators([value])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--warm-up", "-1"), "--warm-up is -1.0; allowed: 0 seconds or more"),
        (("--warm-up", "2"), "less than the 2 s after which the last request arrives"),
        (("--warm-up", "2", "--window", "steady_state"), "less than the 2 s"),
    ],
)
def test_a_warm_up_that_leaves_no_arrival_is_refused_before_the_load(
    flags: tuple[str, ...], words: str
) -> None:
    requests = [
        PlannedRequest(index=n, prompt="", input_tokens=1, output_tokens=1, at_s=float(n)) for n in range(3)
    ]
    _check_window(parsed("--warm-up", "1.5"), requests, Pacing(Process.POISSON, 1.0))
    with pytest.raises(ConfigError, match=words):
        _check_window(parsed(*flags), requests, Pacing(Process.POISSON, 1.0))


def test_a_burst_has_no_steady_state_and_a_closed_loop_is_not_known_before() -> None:
    burst = [PlannedRequest(index=0, prompt="", input_tokens=1, output_tokens=1, at_s=0.0)]
    with pytest.raises(ConfigError, match="closed_cohort, as all requests arrive at once"):
        _check_window(parsed("--window", "steady_state"), burst, Pacing())
    _check_window(parsed("--warm-up", "60"), burst, Pacing(Process.CLOSED))


@pytest.mark.parametrize("kind", WindowKind)
@pytest.mark.parametrize("warm_up_s", [2.5, 60.0])
def test_a_load_that_was_over_too_early_is_told_whole_with_the_reason(
    kind: WindowKind, warm_up_s: float
) -> None:
    window, fault = window_of(run_of(0.0, 1.0, 2.0), kind, warm_up_s)
    assert (window.kind, window.from_s, window.to_s) == (WindowKind.CLOSED_COHORT, 0.0, 3.0)
    assert "--warm-up" in fault


@pytest.mark.parametrize("kind", WindowKind)
def test_the_window_that_was_asked_for_has_no_fault(kind: WindowKind) -> None:
    window, fault = window_of(run_of(0.0, 1.0, 2.0), kind, 0.5)
    assert (window.kind, window.from_s, fault) == (kind, 0.5, "")


def test_a_closed_loop_with_more_clients_than_requests_is_refused() -> None:
    requests = [PlannedRequest(index=n, prompt="", input_tokens=1, output_tokens=1) for n in range(3)]
    _check_clients(parsed("--num-clients", "3"), requests, Pacing(Process.CLOSED))
    with pytest.raises(
        ConfigError, match="--num-clients is 8; allowed: as many as there are requests at most, 3"
    ):
        _check_clients(parsed("--num-clients", "8"), requests, Pacing(Process.CLOSED))


@pytest.mark.parametrize(("flags", "is_told"), [((), True), (("--max-concurrency", "8"), False)])
def test_a_burst_beyond_what_servers_let_wait_is_told_before(
    flags: tuple[str, ...], is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [
        PlannedRequest(index=n, prompt="", input_tokens=1, output_tokens=1, at_s=0.0) for n in range(200)
    ]
    _check_clients(parsed(*flags), requests[:50], Pacing(Process.BURST))
    assert capsys.readouterr().err == ""
    _check_clients(parsed(*flags), requests, Pacing(Process.BURST))
    assert ("all 200 requests are sent at once" in capsys.readouterr().err) is is_told


def salt_of(kind: ServerKind, *flags: str) -> object:
    """What a run with these flags sends that server as `cache_salt`."""
    facts = ServerFacts(kind, model="m", root="m", max_model_len=None)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with tempfile.TemporaryDirectory() as folder:
        return _load_settings(parsed(*flags), facts, words, Path(folder)).extra_body.get("cache_salt")


def test_each_run_has_a_cache_salt_of_its_own_where_the_server_takes_one() -> None:
    salts = [salt_of(kind) for kind in (ServerKind.TWINPOOL, ServerKind.TWINPOOL, ServerKind.VLLM)]
    assert len(set(salts)) == 3
    assert all(salts)
    assert salt_of(ServerKind.TWINPOOL, "--keep-caches") is None
    assert salt_of(ServerKind.TWINPOOL, "--extra-body", '{"cache_salt": "mine"}') == "mine"
    assert salt_of(ServerKind.OPENAI) is None
