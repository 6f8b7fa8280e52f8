"""The metrics of one request, each defined here and nowhere else (`docs/metrics.md` says the same in words).

O is the number of output tokens. Output that arrived in one piece (a chunk) arrived at one time.

- TTFT = first output − sent. Counted from the intended time too: a client that is late must not make a server look
  fast (coordinated omission).
- E2E = last output − sent. That the stream ends a little later is in no metric.
- ITL: each gap between consecutive output tokens, O − 1 of them. A chunk of k tokens gives its gap once and k − 1
  zeros.
- chunk gap: each gap between consecutive chunks, whatever they hold.
- TPOT = (E2E − TTFT) / (O − 1), which is the mean of the request's ITLs.
- decode rate = (O − 1) / (E2E − TTFT); whole-request rate = O / E2E.

All times are in seconds. What does not exist (the TTFT of a request without output, the TPOT of one token) is None.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinpool.bench.serving.distributions import Values, percentile
from twinpool.bench.serving.record import Ending, RequestRecord, token_times


def ttft_s(record: RequestRecord) -> float | None:
    """First output − sent, on the client's clock."""
    return record.chunks[0].at_s - record.sent_at_s if record.chunks else None


def e2e_s(record: RequestRecord) -> float | None:
    """Last output − sent, on the client's clock."""
    return record.chunks[-1].at_s - record.sent_at_s if record.chunks else None


def wait_before_send_s(record: RequestRecord) -> float:
    """Sent − intended: what counting from the intended time adds to TTFT and E2E. It has the wait for
    `--max-concurrency` and for a connection in it, and how late the generator itself was (`Sender.send_lags_s`)."""
    return record.sent_at_s - record.intended_at_s


def itls_s(record: RequestRecord) -> Values:
    """Each gap between consecutive output tokens, in order; zeros between those of one chunk."""
    if token_times(record) is not None:
        return chunk_gaps_s(record)
    at, counts = _chunks(record)
    return np.diff(np.repeat(at, counts))


def chunk_gaps_s(record: RequestRecord) -> Values:
    """Each gap between consecutive chunks, in order."""
    return np.diff(_chunks(record)[0])


def decode_s(record: RequestRecord) -> float | None:
    """E2E − TTFT: from the first output to the last."""
    return record.chunks[-1].at_s - record.chunks[0].at_s if record.chunks else None


def tpot_s(record: RequestRecord) -> float | None:
    """(E2E − TTFT) / (O − 1); None with fewer than two tokens."""
    decode = decode_s(record)
    return None if decode is None or record.output_tokens < 2 else decode / (record.output_tokens - 1)


def decode_rate_per_s(record: RequestRecord) -> float | None:
    """(O − 1) / (E2E − TTFT), tokens/s; None with fewer than two tokens, or if all came at once."""
    tpot = tpot_s(record)
    return 1 / tpot if tpot else None


def request_rate_per_s(record: RequestRecord) -> float | None:
    """The whole-request rate O / E2E, tokens/s."""
    e2e = e2e_s(record)
    return record.output_tokens / e2e if e2e else None


def num_shared_tokens(record: RequestRecord) -> int:
    """Tokens that came in a chunk with others: how much of the ITLs is zeros by the way of delivery."""
    if token_times(record) is not None:
        return 0
    return sum(chunk.num_tokens for chunk in record.chunks if chunk.num_tokens > 1)


def num_chunk_tokens(record: RequestRecord) -> int:
    """Tokens of all chunks together."""
    if (times := token_times(record)) is not None:
        return len(times)
    return sum(chunk.num_tokens for chunk in record.chunks)


def unexplained_s(record: RequestRecord) -> float | None:
    """The client's TTFT − the sum of the server's stages: the way to and fro, and what neither side accounts for.
    None without a timeline or output."""
    first = ttft_s(record)
    if record.timeline is None or first is None:
        return None
    return first - sum(stage.duration_s for stage in record.timeline.stages)


@dataclass(frozen=True, slots=True, eq=False)
class RequestMetrics:
    """All metrics of one request, computed once. None is what does not exist."""

    record: RequestRecord
    ttft_s: float | None
    ttft_from_intended_s: float | None
    e2e_s: float | None
    e2e_from_intended_s: float | None
    tpot_s: float | None
    decode_rate_per_s: float | None
    request_rate_per_s: float | None
    itls_s: Values
    itl_p99_s: float | None
    """The smallest gap that at least 99 % of this request's ITLs do not exceed."""
    chunk_gaps_s: Values

    @property
    def is_completed(self) -> bool:
        """Whether the request succeeded. Rejected, failed, timed out and cancelled ones did not."""
        return self.record.ending is Ending.COMPLETED


def request_metrics(record: RequestRecord) -> RequestMetrics:
    """Computes them."""
    first, whole, wait, gaps = ttft_s(record), e2e_s(record), wait_before_send_s(record), itls_s(record)
    return RequestMetrics(
        record=record,
        ttft_s=first,
        ttft_from_intended_s=None if first is None else first + wait,
        e2e_s=whole,
        e2e_from_intended_s=None if whole is None else whole + wait,
        tpot_s=tpot_s(record),
        decode_rate_per_s=decode_rate_per_s(record),
        request_rate_per_s=request_rate_per_s(record),
        itls_s=gaps,
        itl_p99_s=percentile(gaps, 99) if len(gaps) else None,
        chunk_gaps_s=gaps if token_times(record) is not None else chunk_gaps_s(record),
    )


def _chunks(record: RequestRecord) -> tuple[Values, NDArray[np.int64]]:
    """Times and numbers of tokens of the chunks, [chunks] each."""
    if (times := token_times(record)) is not None:
        return np.asarray(times, dtype=np.float64), np.ones(len(times), dtype=np.int64)
    at = np.array([chunk.at_s for chunk in record.chunks], dtype=np.float64)
    return at, np.array([chunk.num_tokens for chunk in record.chunks], dtype=np.int64)
