"""`twinpool serve` with API keys: tenants apart, keys read again, nothing private logged, a client that never reads."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.served_model import save_served_model
from support.server import Server, serving, wait_for

from twinpool.coordinator.gateway.key_ring import append_key, new_key

KEYS = {name: new_key() for name in ("acme", "zeta", "open-a", "open-b", "watch")}
LATE_KEY = new_key()
SECRET = "swordfish"
PROMPT = f"the quick brown {SECRET} jumps over the lazy dog " * 10


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    for tenant, key in KEYS.items():
        append_key(path, tenant, key)
    with path.open("a") as file:
        file.write("[tenant.open-a]\nshares_cache = true\n[tenant.open-b]\nshares_cache = true\n")
        file.write("[tenant.watch]\nread_metrics = true\n")
    return path


@pytest.fixture(scope="module")
def server(key_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    model = save_served_model(tmp_path_factory.mktemp("model"))
    arguments = ("--api-keys", str(key_file), "--num-blocks", "600", "--max-buffered-bytes", "1024")
    with serving(folder, str(model), *arguments) as server:
        server.headers = {"authorization": f"Bearer {KEYS['watch']}"}
        yield server
        server.wait_until_empty()


def ask(server: Server, key: str, request_id: str, **body: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", "x-request-id": request_id}
    wanted = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **body}
    return httpx.post(
        f"{server.url}/v1/completions", json=wanted, headers=headers, timeout=60.0, verify=False
    )


def cached(server: Server, tenant: str, request_id: str, **body: object) -> int:
    """Prompt tokens that prefill found in its cache for such a request."""
    assert ask(server, KEYS[tenant], request_id, **body).status_code == 200
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    timeline = httpx.get(
        f"{server.url}/v1/requests/{request_id}/timeline", headers=headers, verify=False
    ).json()
    assert timeline["request_id"] == request_id
    num_cached: int = timeline["prefill"]["num_cached_tokens"]
    return num_cached


def test_tenants_find_their_own_prompts_in_the_cache_and_nobody_elses(server: Server) -> None:
    assert cached(server, "acme", "a-1") == 0
    assert cached(server, "acme", "a-2") > 0
    assert cached(server, "zeta", "z-1") == 0
    assert cached(server, "open-a", "o-1") == 0
    assert cached(server, "open-b", "o-2") > 0
    assert cached(server, "acme", "a-3", cache_salt="mine") == 0


def test_a_running_request_is_cancelled_by_its_tenant_alone(server: Server) -> None:
    wanted = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {KEYS['acme']}", "x-request-id": "long"}
    stream = httpx.stream(
        "POST", f"{server.url}/v1/completions", json=wanted, headers=headers, timeout=60.0, verify=False
    )
    with stream as answer:
        lines = answer.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        cancel = f"{server.url}/v1/requests/{first['id']}/cancel"
        assert (
            httpx.post(cancel, headers={"authorization": f"Bearer {KEYS['zeta']}"}, verify=False).status_code
            == 404
        )
        assert ask(server, KEYS["acme"], "long").status_code == 409
        assert httpx.post(cancel, headers={"authorization": f"Bearer {KEYS['acme']}"}, verify=False).json()[
            "was_running"
        ]
        *_, last = (line for line in lines if line)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "cancelled"


def test_a_client_that_never_reads_is_cut_while_others_are_served(server: Server) -> None:
    wanted = {
        "prompt": "the",
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    data = json.dumps(wanted).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS['acme']}\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        client.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        answers = []

        def is_cut() -> bool:
            answers.append(ask(server, KEYS["zeta"], f"other-{len(answers)}").json()["choices"][0]["text"])
            return server.metric("twinpool_slow_clients_cut_total") == 1

        wait_for("the client is cut", is_cut, 60.0)
    assert len(set(answers)) == 1


def test_a_hangup_reads_the_keys_again(server: Server, key_file: Path) -> None:
    assert ask(server, LATE_KEY, "late").status_code == 401
    append_key(key_file, "late", LATE_KEY)
    server.process.send_signal(signal.SIGHUP)
    wait_for("the new key is known", lambda: ask(server, LATE_KEY, "late").status_code == 200)
    key_file.chmod(0o644)
    server.process.send_signal(signal.SIGHUP)
    wait_for("the refusal is logged", lambda: "the API keys stay as they were" in server.log)
    assert ask(server, LATE_KEY, "later").status_code == 200


def test_no_log_line_has_a_prompt_or_a_key(server: Server) -> None:
    for body in ({"prompt": {"a": SECRET}}, {"max_tokens": 10**6}, {"suffix": SECRET}):
        answer = ask(server, KEYS["acme"], "wrong", **body)
        assert answer.status_code == 400
        assert SECRET not in answer.text
    assert SECRET not in server.log
    for key in (*KEYS.values(), LATE_KEY):
        assert key not in server.log
