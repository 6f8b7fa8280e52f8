"""Layout, cache, capacity: what is cached is not sent, what does not fit is said, ports and names are one's own.

Ids as in `README.md`.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.fleet import BLOCK_SIZE, TRANSPORTS, Fleet, broken_server, split_server
from support.server import Server, server_environment, wait_for
from support.visitors import Answer, ask

NUM_PREFIX_BLOCKS = 6
PREFIX = list(range(50, 50 + NUM_PREFIX_BLOCKS * BLOCK_SIZE))
JUNK = (b"GET /metrics HTTP/1.1\r\n\r\n", b"\0" * 4096, bytes(range(256)) * 16, b"\xff" * 65536)


def handed_over(server: Server, salt: str, prompt: list[int]) -> tuple[Answer, dict[str, Any]]:
    """An answer, and what the transfer of its prompt was."""
    request_id = uuid.uuid4().hex
    headers = {"x-request-id": request_id}
    answer = ask(server, headers=headers, prompt=prompt, max_tokens=12, ignore_eos=True, cache_salt=salt)
    return answer, server.get(f"/v1/requests/{request_id}/timeline").json()["transfer"]


def test_a_full_hit_on_decode_leaves_nothing_to_send_and_prefill_waiting(split: Server) -> None:
    """L3, M12: the second time decode holds every block: no byte is sent, and prefill is released all the same. The
    hashes by which two processes agree on that do not depend on their seeds."""
    salt = uuid.uuid4().hex
    first, cold = handed_over(split, salt, PREFIX)
    second, warm = handed_over(split, salt, PREFIX)
    assert (cold["num_blocks_sent"], cold["num_blocks_cached"]) == (NUM_PREFIX_BLOCKS, 0)
    assert (warm["num_blocks_sent"], warm["num_blocks_cached"], warm["num_bytes"]) == (
        0,
        NUM_PREFIX_BLOCKS,
        0,
    )
    assert first.outcome == second.outcome


def test_a_partial_hit_sends_too_much_or_gives_the_wrong_text(split: Server, fleet: Fleet) -> None:
    """L4: prompts that leave a known one at every block's border, and in the midst of a block."""
    salt = uuid.uuid4().hex
    handed_over(split, salt, PREFIX)
    for common in range(0, len(PREFIX) + 1, BLOCK_SIZE // 2):
        prompt = PREFIX[:common] + [200 + common] * 19
        answer, transfer = handed_over(split, salt, prompt)
        assert transfer["num_blocks_cached"] == common // BLOCK_SIZE
        assert transfer["num_blocks_sent"] == -(-len(prompt) // BLOCK_SIZE) - common // BLOCK_SIZE
        wanted = ask(fleet.server("--colocated=1"), prompt=prompt, max_tokens=12, ignore_eos=True)
        assert answer.outcome == wanted.outcome


def test_decode_computes_the_prompt_again_behind_a_transfer_that_works(split: Server) -> None:
    """L5: whatever it was sent, decode computes no prompt token, and every block that it lacks is one that was sent.

    Every server here runs with `--strict`, where a prompt token on decode ends the worker.
    """
    salt = uuid.uuid4().hex
    computed = split.metric("twinpool_prompt_tokens_computed_total", role="prefill")
    _, transfer = handed_over(split, salt, list(range(60, 160)))
    wait_for(
        "prefill has computed the prompt, once",
        lambda: split.metric("twinpool_prompt_tokens_computed_total", role="prefill") == computed + 100,
    )
    assert split.metric("twinpool_prompt_tokens_computed_total", role="decode") == 0
    assert split.metric("twinpool_decode_pool_prompt_tokens_total") == 0
    assert transfer["num_blocks_sent"] == -(-100 // BLOCK_SIZE)


def test_a_slow_transport_is_chosen_and_nobody_sees_it(split: Server) -> None:
    """L10: which transport each link uses, and how fast its probe was, is in the log and on `/metrics`; a link below
    the rate that the operator expects is an error line and a count."""
    transport = next(a for a in split.process.args if str(a).startswith("--transport=")).partition("=")[2]  # type: ignore[union-attr,arg-type]
    for prefill in ("prefill-0", "prefill-1"):
        labels = {"prefill": prefill, "decode": "decode-0", "transport": str(transport)}
        assert split.metric("twinpool_link_gb_per_s", **labels) > 0
    assert split.log.count(f"KV to decode-0 by {transport}: ") >= 2


def test_two_deployments_on_one_host_share_a_name(fleet: Fleet) -> None:
    """L8: each has shared memory of its own, and the second one on a port says so and ends."""
    one, other = split_server(fleet, "shm"), broken_server(fleet, "shm")
    names = [set(pools_of(server.worker_pids()["decode-0"])) for server in (one, other)]
    assert all(names)
    assert names[0].isdisjoint(names[1])
    port = one.url.rpartition(":")[2]
    second = subprocess.run(
        [sys.executable, "-m", "twinpool", "serve", str(fleet.model), "--port", port],
        env=server_environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert second.returncode != 0
    assert f"--port is {port}" in second.stderr
    assert "Traceback" not in second.stderr


def pools_of(pid: int) -> list[str]:
    """The shared KV pools that a process maps, by inode."""
    maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [fields[4] for fields in maps if len(fields) > 5 and fields[5].startswith("/dev/shm/")]


@pytest.mark.parametrize("transport", [*TRANSPORTS, "colocated"])
def test_junk_on_any_port_ends_a_process(fleet: Fleet, transport: str) -> None:
    """L9: every port on which any of the server's processes listens: HTTP, control, peers, KV."""
    is_one = transport == "colocated"
    server = fleet.server("--colocated=1") if is_one else split_server(fleet, transport)
    pids = server.worker_pids()
    ports = {
        connection.laddr.port
        for pid in (server.process.pid, *pids.values())
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(ports) >= (2 if is_one else 3)
    for port in ports:
        for junk in JUNK:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
                stranger.sendall(junk)
    assert ask(server, prompt="Still there?", max_tokens=8, ignore_eos=True).finish == "length"
    assert server.worker_pids() == pids
