"""The pools of a running server, changed while streams run: real processes, the operator's routes and command."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import httpx
import pytest
from support.fleet import SETTINGS, assert_returned, num_workers
from support.served_model import save_served_model
from support.server import Server, serving, wait_for
from support.visitors import ask, stream

from twinpool.cli import main
from twinpool.coordinator.gateway.key_ring import new_key

ADMIN = new_key()
NUM_STREAMS = 6
LONG, SHORT = 220, 12
PROMPTS = [
    f"stream {number} of a server whose pools change " * (1 + number % 3) for number in range(NUM_STREAMS)
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One prefill and two decode workers."""
    model = save_served_model(tmp_path_factory.mktemp("model"))
    arguments = (
        str(model),
        "--served-model-name=tiny",
        *SETTINGS,
        "--prefill=1",
        "--decode=2",
        "--max-attempts=1",
    )
    logs = tmp_path_factory.mktemp("logs")
    with serving(logs, *arguments, environment={"TWINPOOL_ADMIN_KEY": ADMIN}) as server:
        wait_for("every worker has joined", lambda: num_workers(server) == 3, 60)
        yield server


def admin(server: Server, path: str, **body: Any) -> httpx.Response:
    """The operator's GET, or a POST of `body`."""
    headers = {"authorization": f"Bearer {ADMIN}"}
    method, content = ("POST", body) if body else ("GET", None)
    return httpx.request(method, server.url + path, json=content, headers=headers, timeout=10, verify=False)


def workers(server: Server) -> dict[str, dict[str, Any]]:
    return {worker["worker"]: worker for worker in admin(server, "/admin/pools").json()["workers"]}


def serves_as(server: Server, worker_id: str, role: str) -> bool:
    """Whether the worker is in that pool, and linked."""
    worker = workers(server).get(worker_id, {})
    return (worker.get("role"), worker.get("state")) == (role, "serves") and bool(worker["links"])


def steps_of(server: Server, worker_id: str, role: str) -> float:
    """Steps that the worker has run in that role."""
    return server.metric("twinpool_steps_total", worker=worker_id, role=role)


def seconds_until_it_works(server: Server, worker_id: str, role: str) -> float:
    """Gives the worker another role, sends requests, and returns how long it took until it had run some of them."""
    started = time.monotonic()
    response = admin(server, f"/admin/workers/{worker_id}/role", role=role, wait_s=0)
    assert response.json()["changes"] == [{"change": "role", "worker": worker_id, "role": role}]
    wait_for(f"{worker_id} serves as {role}", lambda: serves_as(server, worker_id, role), 30)
    before = steps_of(server, worker_id, role)
    wait_for(f"{worker_id} works as {role}", lambda: steps_of(server, worker_id, role) > before, 30)
    return time.monotonic() - started


@contextmanager
def streaming(server: Server, wanted: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Streams that come one after the other on each of several connections, until the block ends; yields what differed
    from `wanted`."""
    wrong: list[str] = []
    is_over = Event()

    def visit(number: int) -> int:
        count = 0
        while not is_over.is_set():
            prompt = PROMPTS[number]
            answer = stream(server, prompt=prompt, max_tokens=LONG, ignore_eos=True)
            if (answer.finish, tuple(answer.token_ids)) != ("length", wanted[prompt]):
                wrong.append(f"{prompt!r}: {answer.finish} {answer.error} {len(answer.token_ids)} tokens")
            count += 1
        return count

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        visits = [pool.submit(visit, number) for number in range(NUM_STREAMS)]
        try:
            yield wrong
        finally:
            is_over.set()
        assert sum(visit.result() for visit in visits) >= NUM_STREAMS


@pytest.mark.timeout(120)
def test_a_role_changes_there_and_back_under_load_and_no_stream_is_disturbed(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {
        prompt: tuple(ask(server, prompt=prompt, max_tokens=LONG, ignore_eos=True).token_ids)
        for prompt in PROMPTS
    }
    assert all(len(tokens) == LONG for tokens in wanted.values())
    processes = server.worker_pids()
    with streaming(server, wanted) as wrong:
        wait_for("decode-1 has streams", lambda: workers(server)["decode-1"]["attempts"] > 1, 30)
        there_s = seconds_until_it_works(server, "decode-1", "prefill")
        back_s = seconds_until_it_works(server, "decode-1", "decode")
    assert not wrong, wrong
    assert server.worker_pids() == processes
    with capsys.disabled():
        print(f"\ncapacity moved in {there_s:.2f} s there and {back_s:.2f} s back")
    assert 'twinpool_attempts_lost_total{reason="handed on"}' in server.get("/metrics").text
    assert server.metric("twinpool_role_changes_total") == 2
    assert "twinpool_workers_lost_total{" not in server.get("/metrics").text
    assert_returned(server)


@pytest.mark.timeout(120)
def test_the_next_role_finds_the_prefixes_of_the_last(server: Server) -> None:
    prompt = "a prefix that decode has and prefill will find " * 4
    before = ask(server, prompt=prompt, max_tokens=SHORT, ignore_eos=True)

    def holders() -> dict[str, int]:
        """The decode workers with something in their prefix cache, and how many blocks."""
        found = workers(server).values()
        cached = {
            w["worker"]: w.get("kv_blocks", {}).get("cached", 0) for w in found if w["role"] == "decode"
        }
        return {name: count for name, count in cached.items() if count}

    wait_for("a heartbeat tells of the cache", lambda: bool(holders()), 10)
    name, count = min(holders().items())
    assert admin(server, f"/admin/workers/{name}/role", role="prefill", wait_s=0).status_code == 200
    wait_for("it has changed", lambda: serves_as(server, name, "prefill"), 30)
    wait_for("it was heard of", lambda: "cached" in workers(server)[name].get("kv_blocks", {}), 10)
    assert workers(server)[name]["kv_blocks"]["cached"] >= count
    assert ask(server, prompt=prompt, max_tokens=SHORT, ignore_eos=True).token_ids == before.token_ids
    assert admin(server, f"/admin/workers/{name}/role", role="decode").status_code == 200
    wait_for("it is back", lambda: serves_as(server, name, "decode"), 30)


@pytest.mark.timeout(180)
def test_the_command_shows_sets_and_drains_the_pools(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pools(*arguments: str) -> tuple[int, str]:
        status = main(["pools", "--url", server.url, *arguments])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    status, told = pools()
    assert status == 2
    assert "there is no admin key" in told
    assert pools("--admin-key", "x" * 32) == (
        1,
        "twinpool: the key is not this server's admin key; an API key of a tenant does not do here\n",
    )
    monkeypatch.setenv("TWINPOOL_ADMIN_KEY", ADMIN)
    status, told = pools()
    assert status == 0
    assert [line.split()[:3] for line in told.splitlines()[1:4]] == [
        ["decode-0", "decode", "serves"], ["decode-1", "decode", "serves"], ["prefill-0", "prefill", "serves"],
    ]  # fmt: skip
    for arguments, word in (
        (("role", "decode-9", "prefill"), "no worker 'decode-9' has joined"),
        (("drain", "prefill-0"), "prefill-0 is the last prefill worker"),
        (("set", "--prefill", "0"), "prefill is 0"),
    ):
        status, told = pools(*arguments)
        assert status == 1
        assert word in told
    status, told = pools("set", "--prefill", "2", "--decode", "1", "--wait", "0")
    assert status == 0
    (moved,) = [line.split()[0] for line in told.splitlines() if "becomes a prefill worker" in line]
    wait_for("two prefill workers", lambda: serves_as(server, moved, "prefill"), 30)
    status, told = pools("set", "--decode", "2")
    assert told.splitlines()[0] == "a decode worker starts"
    wait_for("it has joined", lambda: serves_as(server, "decode-2", "decode"), 60)
    status, told = pools("drain", moved)
    assert told.splitlines()[0] == f"{moved} is drained"
    wait_for("it has ended", lambda: moved not in workers(server) and moved not in server.worker_pids(), 30)
    assert json.loads(pools("--json")[1])["pools"] == {"prefill": 1, "decode": 2, "colocated": 0}
    assert ask(server, prompt="one more", max_tokens=SHORT, ignore_eos=True).finish == "length"
    assert server.metric("twinpool_workers_drained_total") == 1
    assert_returned(server)
