"""Greedy tokens over HTTP are those of `transformers` in float32, whatever way the request takes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.layouts import LAYOUTS, over
from support.reference import Reference, prompts
from support.server import Server, token_ids, wait_for

NUM_TOKENS = 32
"""Decode fills two blocks and more, from every place in a block."""
MAX_NEAR_TIES = 0.02
pytestmark = pytest.mark.timeout(300)

Prompts = Sequence[tuple[int, ...]]


def answers(server: Server, asked: Prompts, at_once: int, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """The server's greedy tokens for each prompt, `at_once` requests at a time."""

    def ask(prompt: tuple[int, ...]) -> list[int]:
        body = {
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = server.post("/v1/completions", body, timeout_s=200)
        assert response.status_code == 200, response.text
        return list(token_ids(response.json()["choices"][0]))

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, asked))


def assert_right(
    reference: Reference, asked: Prompts, given: Sequence[Sequence[int]], num_tokens: int
) -> None:
    """Every answer is complete and the reference's own. Near ties are named and must be few: they may hide a fault."""
    near_ties = 0
    for prompt, answer in zip(asked, given, strict=True):
        assert len(answer) == num_tokens
        judgement = reference.judge(prompt, answer)
        assert not judgement.fault
        if judgement.near_ties:
            print(f"prompt of {len(prompt)} tokens: near tie at output tokens {judgement.near_ties}")
        near_ties += len(judgement.near_ties)
    print(f"{len(asked) * num_tokens} tokens compared, {near_ties} near ties")
    assert near_ties <= MAX_NEAR_TIES * len(asked) * num_tokens


@over("split-shm")
def test_forty_prompts_of_1_to_900_tokens(server: Server, model_dir: Path, reference: Reference) -> None:
    """Cold, all at once: lengths around block borders, prompts that share steps."""
    asked = prompts(model_dir)
    assert_right(reference, asked, answers(server, asked, at_once=len(asked)), NUM_TOKENS)


@over(*(name for name in LAYOUTS if name != "split-shm"))
def test_twenty_of_them_on_every_layout(server: Server, model_dir: Path, reference: Reference) -> None:
    """Chunks end at odd places, and KV goes over each transport."""
    asked = prompts(model_dir)[::2]
    assert_right(reference, asked, answers(server, asked, at_once=len(asked)), NUM_TOKENS)


@over("colocated-chunks-of-61", "split-shm")
def test_prompts_from_the_prefix_cache(server: Server, model_dir: Path, reference: Reference) -> None:
    """The same prompts again: nearly all of their tokens come from the cache, and the answers are as before."""
    asked = prompts(model_dir)[::2]
    answers(server, asked, at_once=len(asked), num_tokens=1)
    server.wait_until_empty()
    before = server.metric("twinpool_prompt_tokens_cached_total")
    assert_right(reference, asked, answers(server, asked, at_once=len(asked)), NUM_TOKENS)
    cached = server.metric("twinpool_prompt_tokens_cached_total") - before
    assert cached > 0.8 * sum(len(prompt) for prompt in asked)


@over("colocated", "split-shm")
def test_64_streams_at_once_equal_each_alone(server: Server, model_dir: Path, reference: Reference) -> None:
    """Short prompts one by one, and then 64 requests together: the company in the batch changes no token."""
    short = [prompt for prompt in prompts(model_dir) if len(prompt) <= 100][::3][:8]
    crowd = short * 8
    alone = answers(server, short, at_once=1, num_tokens=16)
    together = answers(server, crowd, at_once=64, num_tokens=16)
    assert_right(reference, crowd, together, 16)
    for i, answer in enumerate(together):
        ties = reference.judge(crowd[i], answer).near_ties
        until = ties[0] if ties else len(answer)
        assert answer[:until] == alone[i % len(short)][:until]


@over(*(name for name in LAYOUTS if name.startswith("split")))
def test_decode_computes_no_prompt_token(server: Server) -> None:
    """The counter that would show a silent recomputation stays at zero on decode workers."""
    assert server.metric("twinpool_output_tokens_total", role="decode") > 0
    assert server.metric("twinpool_decode_pool_prompt_tokens_total", role="decode") == 0


@over("hybrid")
def test_whole_on_either_worker_or_split_the_tokens_are_the_same(
    server: Server, model_dir: Path, reference: Reference
) -> None:
    """Half of the forty prompts at once: more than either worker does alone soonest, so all ways are taken."""
    asked = prompts(model_dir)[::2]
    assert_right(reference, asked, answers(server, asked, at_once=len(asked)), NUM_TOKENS)
    for way in ("split", "local_prefill", "local_decode"):
        assert server.metric("twinpool_hybrid_choices_total", way=way) > 0
    wait_for("heartbeats", lambda: server.metric("twinpool_hybrid_prompt_tokens_total", role="decode") > 0)
    wait_for("heartbeats", lambda: server.metric("twinpool_hybrid_output_tokens_total", role="prefill") > 0)
    assert server.metric("twinpool_decode_pool_prompt_tokens_total", role="decode") == 0
