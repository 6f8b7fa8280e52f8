"""Wrong text: bytes of another request, of half a transfer, or of a block that was not ready. Ids as in `README.md`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.fleet import Fleet, frozen_in_transfer
from support.server import Server, wait_for
from support.visitors import Answer, Visit, ask, stream

TRANSFER = {"prompt": list(range(20, 240)) * 2, "max_tokens": 300, "ignore_eos": True}
PROMPTS = [[(n * 37 + i * (n + 3)) % 300 + 10 for i in range(8 * n + 5)] for n in range(1, 13)]
"""Twelve prompts of 13 to 101 tokens, unlike each other."""


@pytest.fixture(scope="module")
def alone(fleet: Fleet) -> list[Answer]:
    """What each of `PROMPTS` gives by itself, on one worker: no transfer, no company."""
    server = fleet.server("--colocated=1")
    return [ask(server, prompt=prompt, max_tokens=40, ignore_eos=True) for prompt in PROMPTS]


def test_a_late_writer_overwrites_the_next_owner_of_its_blocks(
    split: Server, visit: Visit, alone: list[Answer]
) -> None:
    """W1: the writer stands still in mid-transfer, its client leaves, and at once others fill decode's pool. Then the
    writer goes on, with all that it still has to write. Nobody's text suffers: either the blocks were kept out of use
    until then, or the transport drops what comes too late."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        with frozen_in_transfer(split, visit, **TRANSFER) as victim:
            victim.leave()
            wait_for(
                "decode lends the writer nothing any more",
                lambda: split.metric("twinpool_kv_blocks", role="decode", state="leased") == 0,
            )
            before = split.metric("twinpool_delivered_tokens_total")
            running = [
                pool.submit(ask, split, cache_salt="next", prompt=prompt, max_tokens=40, ignore_eos=True)
                for prompt in PROMPTS
            ]
            wait_for("others run", lambda: split.metric("twinpool_delivered_tokens_total") > before + 20)
        answers = [future.result() for future in running]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]


def test_a_block_changes_hands_before_its_late_push_has_read_it(split: Server, alone: list[Answer]) -> None:
    """P4, W2: more prompts at once than prefill's pool holds, each push late by itself: what travels is what was
    computed, because a push pins its blocks until it has read them."""
    mismatches = split.metric("twinpool_kv_digest_mismatches_total")
    with ThreadPoolExecutor(3 * len(PROMPTS)) as pool:
        running = [
            pool.submit(stream, split, cache_salt=f"round {r}", prompt=prompt, max_tokens=40, ignore_eos=True)
            for r in range(3)
            for prompt in PROMPTS
        ]
        answers = [future.result().token_ids for future in running]
    assert answers == [answer.token_ids for answer in alone] * 3
    assert split.metric("twinpool_kv_digest_mismatches_total") == mismatches


def test_answers_of_one_prompt_differ(anywhere: Server) -> None:
    """W5, W6: the same prompt a hundred times at once, and then ten times in a row."""
    fields = {"prompt": "The same, please", "max_tokens": 16, "ignore_eos": True}
    with ThreadPoolExecutor(25) as pool:
        answers = list(pool.map(lambda _: ask(anywhere, **fields), range(100)))
    answers += [ask(anywhere, **fields) for _ in range(10)]
    assert len({answer.outcome for answer in answers}) == 1


def test_everything_is_healthy_and_only_the_split_text_is_wrong(split: Server, alone: list[Answer]) -> None:
    """W8, C5: streamed or whole, over two pools, each answer is that of one worker: text, tokens, finish reason and
    what is billed."""
    for way in (ask, stream):
        for prompt, wanted in zip(PROMPTS, alone, strict=True):
            assert way(split, prompt=prompt, max_tokens=40, ignore_eos=True).outcome == wanted.outcome
