"""Hand-over is right in the numbers: what decode says of its tokens is what scoring them as a prompt says.

A wrong, missing or shifted block of KV can leave the text as it is, and still moves every log probability behind it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.layouts import over
from support.reference import Reference, prompts
from support.server import Server

pytestmark = pytest.mark.timeout(300)

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 80, 81, 127, 128, 129)
"""20 lengths around the borders of blocks of 16 tokens."""
NUM_TOKENS = 16
BLOCK = 16
ROUNDING = 2e-4
"""Both sides compute in float32. Their logits are about 20, where one unit in the last place is 2e-6, and come out of
30 layers of sums in other orders (a batch of one token against a prompt): some ten to fifty such units."""
FAULT = 50 * ROUNDING
"""What one other token in the prompt moves at least somewhere in the answer: so much would show."""


@dataclass(frozen=True)
class Answer:
    """An answer in token ids and their log probabilities, and how much of its prompt was found in a cache."""

    token_ids: list[int]
    logprobs: list[float]
    num_cached: int


def decoded(server: Server, prompt: Sequence[int], salt: str) -> Answer:
    """The greedy answer. Each of its tokens is the likeliest, and says so in the same bits."""
    body = {
        "prompt": list(prompt), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
        "logprobs": 1, "return_token_ids": True, "cache_salt": salt,
    }  # fmt: skip
    response = server.post("/v1/completions", body, timeout_s=200)
    assert response.status_code == 200, response.text
    answer = response.json()
    (choice,) = answer["choices"]
    told = choice["logprobs"]
    assert [max(top.values()) for top in told["top_logprobs"]] == told["token_logprobs"]
    assert len(told["token_logprobs"]) == NUM_TOKENS
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Answer(choice["token_ids"], told["token_logprobs"], cached)


def scored(server: Server, asked: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
    """For each prompt and answer, the log probabilities of the answer as the end of a prompt: computed cold, with
    nothing generated, all in one request."""
    body = {
        "prompt": [[*prompt, *answer] for prompt, answer in asked], "max_tokens": 0, "echo": True, "logprobs": 1,
        "cache_salt": uuid.uuid4().hex,
    }  # fmt: skip
    response = server.post("/v1/completions", body, timeout_s=200)
    assert response.status_code == 200, response.text
    found = []
    for (prompt, answer), choice in zip(asked, response.json()["choices"], strict=True):
        told: list[float | None] = choice["logprobs"]["token_logprobs"]
        assert len(told) == len(prompt) + len(answer)
        assert told[0] is None
        found.append([value for value in told[len(prompt) :] if value is not None])
    return found


def off(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def ask_all(server: Server, asked: Sequence[Sequence[int]], salt: str) -> list[Answer]:
    """All at once."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda prompt: decoded(server, prompt, salt), asked))


@over("split-shm", "colocated")
def test_what_decode_says_is_what_scoring_and_transformers_say(
    server: Server, model_dir: Path, reference: Reference
) -> None:
    """20 lengths, cold and all at once; again with their prompts in the cache: the same tokens, the same numbers."""
    asked, salt = prompts(model_dir, LENGTHS), uuid.uuid4().hex
    cold = ask_all(server, asked, salt)
    server.wait_until_empty()
    warm = ask_all(server, asked, salt)
    assert [answer.num_cached for answer in cold] == [0] * len(asked)
    assert [answer.num_cached for answer in warm] == [(n - 1) // BLOCK * BLOCK for n in LENGTHS]
    assert [answer.token_ids for answer in warm] == [answer.token_ids for answer in cold]
    truths = scored(server, [(prompt, answer.token_ids) for prompt, answer in zip(asked, cold, strict=True)])
    for prompt, first, again, truth in zip(asked, cold, warm, truths, strict=True):
        assert off(first.logprobs, truth) < ROUNDING, f"prompt of {len(prompt)} tokens"
        assert off(again.logprobs, truth) < ROUNDING, f"prompt of {len(prompt)} tokens, from the cache"
        assert off(truth, reference.logprobs(prompt, first.token_ids)) < ROUNDING


@over("split-shm", "colocated")
def test_prompts_that_share_a_beginning_keep_their_own_numbers(server: Server, model_dir: Path) -> None:
    """Eight prompts that begin alike and part before, at and behind a block's border, all at once, behind a first."""
    first, *others = prompts(model_dir, (100,) * 9)
    parting = (60, 63, 64, 65, 79, 80, 81, 96)
    asked = [(*first[:at], *other[at:]) for at, other in zip(parting, others, strict=True)]
    salt = uuid.uuid4().hex
    decoded(server, first, salt)
    server.wait_until_empty()
    given = ask_all(server, asked, salt)
    truths = scored(server, [(prompt, answer.token_ids) for prompt, answer in zip(asked, given, strict=True)])
    for at, answer, truth in zip(parting, given, truths, strict=True):
        assert answer.num_cached >= at // BLOCK * BLOCK
        assert off(answer.logprobs, truth) < ROUNDING, f"parting at {at}"


@over("split-shm")
def test_one_other_token_in_the_prompt_would_show(server: Server, model_dir: Path) -> None:
    """The comparison's own test: KV of one token that is not the prompt's moves the numbers far beyond rounding."""
    asked = prompts(model_dir, (16, 17, 33, 64, 129))
    for prompt, answer in zip(asked, ask_all(server, asked, uuid.uuid4().hex), strict=True):
        last = len(prompt) - 1
        others = [
            ([*prompt[:at], (prompt[at] + 1000) % 40_000, *prompt[at + 1 :]], answer.token_ids)
            for at in (last, last - last % BLOCK, last // 2)
        ]
        assert all(off(answer.logprobs, moved) > FAULT for moved in scored(server, others)), len(prompt)
