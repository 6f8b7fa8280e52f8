"""Prompts and requests of many lengths, from a seed. Words are common ones: about one token each."""

from __future__ import annotations

import math
import random

from twinpool.bench.client import Generation

_STORY = """
the old house by the river had a small green door and a wide stone step where the children of the town would sit
in the evening to hear about ships and storms while their mother made bread for the next day and their father
wrote letters to people far away who had never seen snow or heard the long call of the winter birds over empty
fields before the first light came up behind the hill and turned every window into gold
"""
_WORDS = _STORY.split()
_PLAIN_TOKENS = range(100, 300)
"""Token ids that every vocabulary has."""
_SHARED = "You are a patient teacher. Explain what the words below have in common, one after another, in plain words. "
_STOPS = ((), (), (), (" and",), (".", "\n\n"))


def text(rng: random.Random, num_words: int) -> str:
    """So many words in a random order. Two texts share no prefix worth caching."""
    return " ".join(rng.choices(_WORDS, k=num_words))


def varied(rng: random.Random, longest_words: int = 700, longest_output: int = 96) -> Generation:
    """A request of any kind: of less than a block, of many blocks, longer than a chunk, or behind a prefix that others
    share; greedy or with seeded noise; some with stop strings. Lengths are log-uniform. Its answer is always the same.
    """
    num_words = _log_uniform(rng, 4, longest_words)
    shared = _SHARED * 3 if rng.random() < 0.3 else ""
    is_greedy = rng.random() < 0.5
    return Generation(
        prompt=shared + text(rng, num_words),
        max_tokens=_log_uniform(rng, 8, longest_output),
        temperature=0.0 if is_greedy else 0.9,
        top_p=1.0 if is_greedy else 0.95,
        seed=rng.randrange(2**31),
        ignore_eos=rng.random() < 0.8,
        stop=rng.choice(_STOPS),
    )


def uniform(rng: random.Random, words: int, output_tokens: int) -> Generation:
    """A greedy request of that size, give or take a quarter of the prompt; no other has its prefix."""
    return Generation(text(rng, rng.randint(words - words // 4, words + words // 4)), output_tokens)


def exact(rng: random.Random, prompt_tokens: int, output_tokens: int) -> Generation:
    """A greedy request of exactly so many tokens in and out; no other has its prefix."""
    return Generation(exact_ids(rng, prompt_tokens), output_tokens)


def exact_ids(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    """So many token ids; no other has its prefix."""
    return tuple(rng.choices(_PLAIN_TOKENS, k=num_tokens))


def canaries() -> dict[str, Generation]:
    """Prompts whose answers must never change, by the way they take through the server.

    `cached` and `cached again` share their prefix: whichever comes second finds it in the cache, unless it was evicted.
    """
    rng = random.Random(20)
    long_prefix = text(rng, 300)
    return {
        "short": Generation("The capital of France is", 24),
        "several blocks": Generation(text(rng, 120), 32),
        "several chunks": Generation(text(rng, 900), 24),
        "cached": Generation(long_prefix + " The next word is", 24),
        "cached again": Generation(long_prefix + " And so the story ends:", 24),
        "sampled": Generation(text(rng, 40), 48, temperature=0.9, top_p=0.9, seed=7),
        "one token": Generation(text(rng, 30), 1),
    }


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))
