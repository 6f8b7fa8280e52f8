"""Live tuning beside a real server: a recommendation by a process that predicts, and later what was measured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import msgspec
import pytest
from support import slow_device
from support.fleet import SETTINGS, assert_returned
from support.made_profiles import TRUE_FIT, made_profile
from support.served_model import save_served_model
from support.server import Server, server_environment, serving, wait_for
from support.visitors import ask, stream

from twinpool.cli import main
from twinpool.coordinator.gateway.key_ring import new_key
from twinpool.planner.autotune.window import ENOUGH_REQUESTS, LEAST_REQUESTS
from twinpool.planner.profile.saved import SlowDown, save_profile

WINDOW_S = 4
AT_ONCE = 8


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def traffic(
    server: Server, key: str, send: Callable[[int], bool], num_requests: int
) -> Iterator[Callable[[], None]]:
    """Yields what sends so many requests, a number each, if live tuning waits for any: so processors are left to
    predictions otherwise."""
    headers = {"authorization": f"Bearer {key}"}
    with (
        httpx.Client(base_url=server.url, headers=headers, timeout=30, verify=False) as operator,
        ThreadPoolExecutor(AT_ONCE) as clients,
    ):

        def if_awaited() -> None:
            why = operator.get("/admin/pools").json()["autotune"]["why_nothing"]
            if why.startswith("it waits for traffic"):
                assert all(clients.map(send, range(num_requests)))

        yield if_awaited


@pytest.mark.timeout(240)
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

    def one(number: int) -> bool:
        return ask(server, prompt=f"question {number}", max_tokens=8, ignore_eos=True).finish == "length"

    with (
        serving(tmp_path, *arguments, environment={"TWINPOOL_ADMIN_KEY": key}) as server,
        traffic(server, key, one, ENOUGH_REQUESTS) as send_if_awaited,
    ):

        def is_measured() -> bool:
            send_if_awaited()
            return any(line["kind"] == "measured" and line["errors"] for line in lines(log))

        wait_for("a recommendation is made and measured", is_measured, 150)
        assert server.metric("twinpool_autotune_recommendations_measured_total") >= 1
        assert server.metric("twinpool_autotune_median_error", figure="ttft_p50_s") >= 0
        assert server.metric("twinpool_autotune_changes_total") == 0
        assert main(["pools", "--url", server.url, "--admin-key", key]) == 0
        shown = capsys.readouterr().out
        assert "autotune advise: 1P1D serves" in shown
        assert "median error" in shown
    measured = next(line for line in lines(log) if line["kind"] == "measured" and line["errors"])
    told = next(line for line in lines(log) if line["number"] == measured["number"])
    assert told["kind"] == "recommendation"
    assert told["action"] == "stayed"
    assert told["stay"]["figures"]["ttft_p50_s"] > 0
    assert told["stay"]["capacity_per_s"] > 0
    assert measured["layout"] == "1P1D"
    assert "ttft_p50_s" in measured["errors"]


NUM_STREAMS, ANSWER = 8, 40
SLOW_S, STEP_S = 0.01, 0.012
"""What the device takes of each step, and what the profile says of a whole one."""
PATHS = os.pathsep.join((str(Path(slow_device.__path__[0])), server_environment()["PYTHONPATH"]))
STREAMED = [f"stream {number} of a server that tunes itself" for number in range(NUM_STREAMS)]


@contextmanager
def streaming(server: Server) -> Iterator[list[str]]:
    """Long answers to short prompts, one after the other on each of several connections, until the block ends; yields
    what differed from the same answers before."""
    with ThreadPoolExecutor(NUM_STREAMS) as clients:
        asked = clients.map(
            lambda each: ask(server, prompt=each, max_tokens=ANSWER, ignore_eos=True), STREAMED
        )
        wanted = list(asked)
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
    """On a slow device, whose steps the profile knows: a prefill worker reads six of the long prompts in a second, a
    decode worker writes 17 of the long answers. Two prefill workers serve more at first, two decode workers then."""
    (tmp_path / "model").mkdir()
    model, log, key = save_served_model(tmp_path / "model"), tmp_path / "tune.jsonl", new_key()
    steps = msgspec.structs.replace(TRUE_FIT, rows_s=(STEP_S,) * len(TRUE_FIT.rows_s))
    profile = tmp_path / "profile.json"
    save_profile(
        msgspec.structs.replace(made_profile(steps), model="tiny", slow_down=SlowDown(0.0, 0.0)), profile
    )
    environment = {"TWINPOOL_ADMIN_KEY": key, "SLOW_STEP_S": str(SLOW_S), "PYTHONPATH": PATHS}
    arguments = (
        str(model), "--served-model-name=tiny", *SETTINGS, "--prefill=2", "--decode=1", "--max-attempts=1",
        "--autotune=act", f"--profile={profile}", "--slo=ttft=2s", "--slo=itl=500ms", "--autotune-window=3",
        "--autotune-cool-down=3", f"--autotune-log={log}",
    )  # fmt: skip

    def one(number: int) -> bool:
        prompt = f"question {number} " + "about a long text " * 12
        return ask(server, prompt=prompt, max_tokens=4, ignore_eos=True).finish == "length"

    def found(kind: str) -> list[dict[str, Any]]:
        return [line for line in lines(log) if line["kind"] == kind]

    def changed() -> list[dict[str, Any]]:
        return [line for line in found("recommendation") if line["action"] == "changed"]

    def is_measured() -> bool:
        """And that another recommendation has come since."""
        numbers = {line["number"] for line in found("measured")}
        latest = max(line["number"] for line in found("recommendation"))
        return any(line["number"] in numbers and line["number"] < latest for line in changed())

    with serving(tmp_path, *arguments, environment=environment) as server:
        with traffic(server, key, one, LEAST_REQUESTS) as send_if_awaited:

            def is_told() -> bool:
                send_if_awaited()
                return bool(found("recommendation"))

            wait_for("a recommendation for long prompts", is_told, 60)
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
