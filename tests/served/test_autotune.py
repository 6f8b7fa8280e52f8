"""Live tuning beside a real server: a recommendation by a process that predicts, and later what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import msgspec
import pytest
from support.fleet import SETTINGS, assert_returned
from support.made_profiles import TRUE_FIT, made_profile
from support.served_model import save_served_model
from support.server import Server, serving, wait_for
from support.visitors import ask, stream

from twinpool.cli import main
from twinpool.coordinator.gateway.key_ring import new_key
from twinpool.planner.autotune.window import LEAST_REQUESTS
from twinpool.planner.profile.saved import save_profile

WINDOW_S = 4
AT_ONCE = 8


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_recommendation_is_made_logged_and_held_against_what_came(tmp_path: Path, capsys: Any) -> None:
    """The made-up profile is not this machine's, so only that there is an error is looked at, not how large."""
    (tmp_path / "model").mkdir()
    model, log, key = save_served_model(tmp_path / "model"), tmp_path / "tune.jsonl", new_key()
    profile = tmp_path / "profile.json"
    save_profile(msgspec.structs.replace(made_profile(), model="tiny"), profile)
    arguments = (
        str(model), "--served-model-name=tiny", *SETTINGS, "--prefill=1", "--decode=1",
        "--autotune=advise", f"--profile={profile}", "--slo=ttft=2s", "--slo=itl=200ms",
        f"--autotune-window={WINDOW_S}", f"--autotune-log={log}",
    )  # fmt: skip

    def one(number: int) -> int:
        body = {"model": "tiny", "prompt": f"question {number}", "max_tokens": 8, "ignore_eos": True}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30, verify=False).status_code

    with (
        serving(tmp_path, *arguments, environment={"TWINPOOL_ADMIN_KEY": key}) as server,
        ThreadPoolExecutor(AT_ONCE) as clients,
    ):
        num_told = -1

        def is_measured() -> bool:
            """Traffic comes at first and after each recommendation: then processors are left to predictions."""
            nonlocal num_told
            found = lines(log)
            if (now_told := sum(line["kind"] == "recommendation" for line in found)) > num_told:
                num_told = now_told
                assert set(clients.map(one, range(LEAST_REQUESTS + 4))) == {200}
            return any(line["kind"] == "measured" and line["figures"] for line in found)

        wait_for("a recommendation is made and measured", is_measured, 150)
        assert server.metric("twinpool_autotune_recommendations_measured_total") >= 1
        assert server.metric("twinpool_autotune_median_error", figure="ttft_p50_s") >= 0
        assert server.metric("twinpool_autotune_changes_total") == 0
        assert main(["pools", "--url", server.url, "--admin-key", key]) == 0
        shown = capsys.readouterr().out
        assert "autotune advise: 1P1D serves" in shown
        assert "median error" in shown
    measured = next(line for line in lines(log) if line["kind"] == "measured" and line["figures"])
    told = next(line for line in lines(log) if line["number"] == measured["number"])
    assert told["kind"] == "recommendation"
    assert told["action"] == "stayed"
    assert told["stay"]["figures"]["ttft_p50_s"] > 0
    assert told["stay"]["capacity_per_s"] > 0
    assert measured["layout"] == "1P1D"
    assert "ttft_p50_s" in measured["errors"]


NUM_STREAMS, ANSWER = 2, 120
STREAMED = [f"stream {number} of a server that tunes itself" for number in range(NUM_STREAMS)]


@contextmanager
def streaming(server: Server) -> Iterator[list[str]]:
    """Long answers to short prompts, one after the other on each of several connections, until the block ends; yields
    what differed from the same answers before."""
    wanted = [ask(server, prompt=each, max_tokens=ANSWER, ignore_eos=True) for each in STREAMED]
    assert all(len(answer.token_ids) == ANSWER for answer in wanted)
    wrong: list[str] = []
    is_over = Event()

    def visit(number: int) -> int:
        count = 0
        while not is_over.is_set():
            answer = stream(server, prompt=STREAMED[number], max_tokens=ANSWER, ignore_eos=True)
            if (answer.finish, answer.token_ids) != ("length", wanted[number].token_ids):
                wrong.append(f"{number}: {answer.finish} {answer.error} {len(answer.token_ids)} tokens")
            count += 1
        return count

    with ThreadPoolExecutor(NUM_STREAMS) as clients:
        visits = [clients.submit(visit, number) for number in range(NUM_STREAMS)]
        try:
            yield wrong
        finally:
            is_over.set()
        assert sum(visit.result() for visit in visits) >= NUM_STREAMS


@pytest.mark.timeout(240)
def test_act_follows_traffic_that_turns_once_and_no_stream_is_disturbed(tmp_path: Path) -> None:
    """By the made-up profile, twice as slow, a prefill worker reads two of the long prompts in a second, and a decode
    worker writes three of the long answers: two prefill workers serve more at first, and two decode workers then."""
    (tmp_path / "model").mkdir()
    model, log, key = save_served_model(tmp_path / "model"), tmp_path / "tune.jsonl", new_key()
    steps = msgspec.structs.replace(TRUE_FIT, rows_s=tuple(2 * seconds for seconds in TRUE_FIT.rows_s))
    profile = tmp_path / "profile.json"
    save_profile(msgspec.structs.replace(made_profile(steps), model="tiny"), profile)
    arguments = (
        str(model), "--served-model-name=tiny", *SETTINGS, "--prefill=2", "--decode=1", "--max-attempts=1",
        "--autotune=act", f"--profile={profile}", "--slo=ttft=2s", "--slo=itl=500ms", "--autotune-window=3",
        "--autotune-cool-down=3", f"--autotune-log={log}",
    )  # fmt: skip

    def found(kind: str) -> list[dict[str, Any]]:
        return [line for line in lines(log) if line["kind"] == kind]

    def changed() -> list[dict[str, Any]]:
        return [line for line in found("recommendation") if line["action"] == "changed"]

    def is_measured() -> bool:
        """And that another recommendation has come since."""
        numbers = {line["number"] for line in found("measured")}
        latest = max(line["number"] for line in found("recommendation"))
        return any(line["number"] in numbers and line["number"] < latest for line in changed())

    with serving(tmp_path, *arguments, environment={"TWINPOOL_ADMIN_KEY": key}) as server:
        with ThreadPoolExecutor(AT_ONCE) as clients:
            prompts = [
                f"question {number} " + "about a long text " * 12 for number in range(LEAST_REQUESTS + 4)
            ]
            answers = clients.map(
                lambda prompt: ask(server, prompt=prompt, max_tokens=4, ignore_eos=True), prompts
            )
            assert {answer.finish for answer in answers} == {"length"}
        wait_for("a recommendation for long prompts", lambda: bool(found("recommendation")), 60)
        (first,) = found("recommendation")
        assert (first["action"], first["stay"]["prefill"], first["change"]) == ("stayed", 2, None)
        with streaming(server) as wrong:
            wait_for("the change is made and measured", lambda: bool(changed()) and is_measured(), 150)
        assert not wrong, wrong
        assert server.metric("twinpool_autotune_changes_total") == 1
        assert server.metric("twinpool_role_changes_total") == 1
        assert server.metric("twinpool_workers", role="decode") == 2
        assert_returned(server)
    (change,) = changed()
    (measured,) = (line for line in found("measured") if line["number"] == change["number"])
    assert (change["change"]["prefill"], change["change"]["decode"]) == (1, 2)
    assert change["gain"] > 0.1 + (change["own_error"] or 0.0)
    assert change["change"]["figures"]["ttft_p50_s"] > 0
    assert measured["layout"] == "1P2D"
    assert measured["figures"]["ttft_p50_s"] > 0
    assert measured["figures"]["itl_p99_s"] > 0
