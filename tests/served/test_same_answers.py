"""Any valid request has one answer: whole or streamed, in one pool or two, undisturbed or resumed after a loss."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.any_requests import assert_same, requests, streamed, whole
from support.served_model import save_served_model
from support.server import Server, serving, wait_for

pytestmark = pytest.mark.timeout(240)
SETTINGS = (
    "--dtype",
    "float32",
    "--num-blocks",
    "400",
    "--max-model-len",
    "1024",
    "--no-pin",
    "--threads",
    "1",
)
ROUNDING = 1e-3
"""Of log probabilities in float32: logits of this model of random weights go to some hundreds."""
DECODE_WORKERS = ("decode-0", "decode-1")


class Servers(NamedTuple):
    """The same model, in one pool and in two."""

    colocated: Server
    split: Server


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    model = str(save_served_model(tmp_path_factory.mktemp("model")))
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        colocated = stack.enter_context(serving(logs, model, *SETTINGS, "--colocated", "1"))
        split = stack.enter_context(serving(logs, model, *SETTINGS, "--prefill", "1", "--decode", "2"))
        yield Servers(colocated, split)
        for server in (colocated, split):
            server.wait_until_empty()


@settings(max_examples=30, deadline=None)
@given(body=requests())
def test_streamed_and_whole_in_one_pool_and_in_two(servers: Servers, body: dict[str, Any]) -> None:
    wanted = whole(servers.colocated, body)
    assert wanted.error == "", body
    for server in servers:
        assert_same(streamed(server, body), wanted, ROUNDING)
    assert_same(whole(servers.split, body), wanted, ROUNDING)


def test_resumed_after_a_decode_worker_was_killed(servers: Servers) -> None:
    """At any token of six streams: the other worker goes on with them, and no client can tell."""
    server = servers.split

    @settings(max_examples=4, deadline=None, phases=(Phase.generate,), database=None)
    @given(
        asked=st.lists(requests(st.integers(150, 300)), min_size=6, max_size=6),
        at_token=st.integers(1, 200),
        victim=st.sampled_from(DECODE_WORKERS),
    )
    def survives(asked: list[dict[str, Any]], at_token: int, victim: str) -> None:
        wanted = [whole(servers.colocated, body) for body in asked]
        wait_for("every worker has joined", lambda: server.metric("twinpool_workers") == 3, 60)
        pid = server.worker_pids()[victim]
        before = server.metric("twinpool_delivered_tokens_total")
        with ThreadPoolExecutor(len(asked)) as pool:
            running = [pool.submit(streamed, server, body) for body in asked]
            wait_for(
                "so many tokens are delivered, or all",
                lambda: (
                    server.metric("twinpool_delivered_tokens_total") >= before + at_token
                    or all(future.done() for future in running)
                ),
            )
            os.kill(pid, signal.SIGKILL)
            resumed = [future.result() for future in running]
        for one, undisturbed in zip(resumed, wanted, strict=True):
            assert_same(one, undisturbed, ROUNDING)

    survives()
    assert server.metric("twinpool_attempts_lost_total") > 0, "nothing was resumed, so nothing was shown"
