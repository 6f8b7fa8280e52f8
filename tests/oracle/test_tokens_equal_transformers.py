"""Greedy tokens over HTTP equal those of `transformers` in float32, whatever way the request takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.reference import Comparison, Expected, assert_equal, greedy, prompts
from support.server import Server, serving, token_ids

from twinpool.engine.model_files import resolve
from twinpool.kv_transfer import transports

NUM_TOKENS = 64
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return resolve(None).path


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[Expected]:
    return greedy(model_dir, prompts(model_dir), NUM_TOKENS)


def answers(
    server: Server, wanted: Sequence[Expected], at_once: int, num_tokens: int = NUM_TOKENS
) -> list[list[int]]:
    """The server's greedy tokens for each prompt, `at_once` requests at a time."""

    def ask(want: Expected) -> list[int]:
        body = {
            "prompt": list(want.prompt), "max_tokens": num_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        response = server.post("/v1/completions", body, timeout_s=300)
        assert response.status_code == 200, response.text
        return list(token_ids(response.json()["choices"][0]))

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, wanted))


def assert_nearly_all_compared(comparison: Comparison, wanted: Sequence[Expected]) -> None:
    """Near ties may hide a fault: at least 9 of 10 tokens must really have been compared."""
    total = sum(len(want.token_ids) for want in wanted)
    print(
        f"compared {comparison.num_compared} of {total} tokens, {comparison.num_near_ties} answers end at a near tie"
    )
    assert comparison.num_compared >= 0.9 * total


def disaggregated(transport: str, token_budget: int) -> tuple[str, ...]:
    return ("--transport", transport, "--token-budget", str(token_budget))


LAYOUTS = {
    "colocated": ("--colocated", "1"),
    "colocated, awkward chunks": ("--colocated", "1", "--token-budget", "61"),
    "shm": disaggregated("shm", 512),
    "tcp, awkward chunks": disaggregated("tcp", 37),
    "ucx, awkward chunks": disaggregated("ucx", 100),
}


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda name: name.replace(", ", "-").replace(" ", "-"))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    name: str = request.param
    if name.startswith("ucx") and (missing := transports.available()["ucx"]):
        pytest.skip(f"ucx: {missing}; `pip install twinpool[ucx]` makes this run")
    with serving(tmp_path_factory.mktemp("server"), "--dtype", "float32", *LAYOUTS[name]) as server:
        yield server
        server.wait_until_empty()


def test_cold_then_from_the_prefix_cache(server: Server, expected: list[Expected]) -> None:
    """All prompts of lengths 1 to 1,500 at once; then the same again, whose blocks are cached."""
    assert_nearly_all_compared(assert_equal(expected, answers(server, expected, at_once=16)), expected)
    server.wait_until_empty()
    before = server.metric("twinpool_prompt_tokens_cached_total")
    assert_nearly_all_compared(assert_equal(expected, answers(server, expected, at_once=16)), expected)
    cached = server.metric("twinpool_prompt_tokens_cached_total") - before
    assert cached > 0.8 * sum(len(want.prompt) for want in expected)


def test_64_streams_at_once_equal_each_alone(server: Server, expected: list[Expected]) -> None:
    """Every short prompt alone and then 64 requests together: the company in the batch changes no token."""
    short = [want for want in expected if len(want.prompt) <= 130]
    crowd = (short * 4)[:64]
    alone = answers(server, short, at_once=1, num_tokens=16)
    together = answers(server, crowd, at_once=64, num_tokens=16)
    for want, got in zip(crowd, together, strict=True):
        ends = want.near_tie if want.near_tie is not None else 16
        assert got[:ends] == alone[short.index(want)][:ends] == list(want.token_ids[:16][:ends])


def test_decode_computes_no_prompt_token(server: Server) -> None:
    """The counter that would show a silent recomputation stays at zero on decode workers."""
    if "--colocated" in server.log:
        pytest.skip("colocated: there is no decode pool")
    assert server.metric("twinpool_decode_pool_prompt_tokens_total") == 0
