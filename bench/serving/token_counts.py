"""How many tokens each piece of an answer had: said by the server, or found out afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from twinpool.bench.serving.answer import StreamedAnswer
from twinpool.bench.serving.record import TokenCount

if TYPE_CHECKING:
    import tokenizers


class TokenEnds(Protocol):
    """Finds out where the tokens of a text end."""

    def __call__(self, text: str) -> Sequence[int]:
        """The number of characters up to the end of each token, rising."""


def token_ends_by(tokenizer_file: str | Path) -> TokenEnds:
    """By the tokenizer in a tokenizer.json."""
    import tokenizers  # not while the load runs

    backend: tokenizers.Tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))

    def ends(text: str) -> Sequence[int]:
        return [end for _, end in backend.encode(text, add_special_tokens=False).offsets]

    return ends


def chunk_tokens(answer: StreamedAnswer, ends: TokenEnds | None) -> tuple[list[int], TokenCount]:
    """The tokens of each piece, and where that is from: the surest that the answer allows.

    A stream whose pieces are as many as its tokens has one in each, so nothing need be found out. What is found out
    by the tokenizer or counted in chunks is scaled to the usage's total.
    """
    if not answer.times:
        return [], TokenCount.CHUNK
    by_ids = [count for count in answer.id_counts if count is not None]
    if len(by_ids) == len(answer.times):
        return by_ids, TokenCount.IDS
    by_usage = [count for count in answer.usage_counts if count is not None]
    if len(by_usage) == len(answer.times):
        return [now - before for before, now in pairwise([0, *by_usage])], TokenCount.USAGE
    total = None if answer.usage is None else answer.usage.completion_tokens
    if total == len(answer.times) or ends is None:
        return scaled([1] * len(answer.times), total), TokenCount.CHUNK
    return scaled(_tokens_ending_in(answer.texts, ends), total), TokenCount.TOKENIZER


def scaled(counts: Sequence[int], total: int | None) -> list[int]:
    """The counts stretched to sum to `total`, in whole tokens; as they are if it is None or they are all 0."""
    so_far = list(accumulate(counts))
    if total is None or not so_far or so_far[-1] in (0, total):
        return list(counts)
    edges = [0, *(round(count * total / so_far[-1]) for count in so_far)]
    return [upper - lower for lower, upper in pairwise(edges)]


def _tokens_ending_in(texts: Sequence[str], ends: TokenEnds) -> list[int]:
    """A token counts to the piece that its last character came in."""
    token_ends = ends("".join(texts))
    counts: list[int] = []
    num_before = 0
    for upto in accumulate(len(text) for text in texts):
        num_so_far = num_before
        while num_so_far < len(token_ends) and token_ends[num_so_far] <= upto:
            num_so_far += 1
        counts.append(num_so_far - num_before)
        num_before = num_so_far
    return counts
