"""What clients of a load saw, written by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from twinpool.bench.serving.record import Chunk, Ending, RequestRecord, Run, TokenCount


def record(*chunks: tuple[float, int], sent_at_s: float = 0.0, **changes: Any) -> RequestRecord:
    """A request whose chunks (time, tokens) came; it was sent when intended and ended with its last chunk."""
    num_tokens = sum(tokens for _, tokens in chunks)
    values: dict[str, Any] = {
        "index": 0, "request_id": "", "group": "", "intended_at_s": sent_at_s, "sent_at_s": sent_at_s,
        "ended_at_s": chunks[-1][0] if chunks else sent_at_s, "ending": Ending.COMPLETED, "input_tokens": 10,
        "wanted_output_tokens": num_tokens, "output_tokens": num_tokens,
        "chunks": tuple(Chunk(at_s, tokens) for at_s, tokens in chunks), "token_count": TokenCount.IDS,
    }  # fmt: skip
    return RequestRecord(**(values | changes))


def stream(
    num_tokens: int, ttft_s: float, gap_s: float, sent_at_s: float = 0.0, **changes: Any
) -> RequestRecord:
    """A request whose tokens came one by one at even gaps."""
    first = sent_at_s + ttft_s
    return record(*((first + n * gap_s, 1) for n in range(num_tokens)), sent_at_s=sent_at_s, **changes)


def refused(ending: Ending = Ending.REJECTED, at_s: float = 0.0, **changes: Any) -> RequestRecord:
    """A request that ended this way at once, without output."""
    return record(sent_at_s=at_s, ending=ending, **({"wanted_output_tokens": 5} | changes))


def run_of(requests: Iterable[RequestRecord], duration_s: float, **settings: Any) -> Run:
    """A run of these requests."""
    return Run(
        started_at="2026-01-02T03:04:05+00:00", duration_s=duration_s, requests=tuple(requests), senders=(),
        settings=settings,
    )  # fmt: skip
