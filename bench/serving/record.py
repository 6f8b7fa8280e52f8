"""What the client of a request saw, and all clients of a run together.

Times are seconds of the client's monotonic clock since the run's start, so records of several sender processes share
one axis. Everything that is computed from records is in `metrics.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, cast, overload

import msgspec

SIMULATION = "simulation"
"""The backend, in a run's settings, of one that no server has seen."""
NO_CONNECTION = "no connection"
"""How the error of a request begins that did not reach the server."""


class Ending(StrEnum):
    """How a request ended, for its client. Only COMPLETED is a success."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    """A status that says that the server did not take it in: 4xx, 503."""
    FAILED = "failed"
    """An error event, a broken or malformed stream, no connection, or a status 500 or 502."""
    TIMED_OUT = "timed_out"
    """The client's limit passed, or the server said that its own did (408, 504, an error's code)."""
    CANCELLED = "cancelled"
    """The client left, or the run was stopped."""


class TokenCount(StrEnum):
    """Where the number of tokens in a chunk comes from, the surest first."""

    IDS = "ids"
    """Token ids in the chunk."""
    USAGE = "usage"
    """The usage that the chunk carries (`continuous_usage_stats`)."""
    TOKENIZER = "tokenizer"
    """The text so far, tokenized by the client."""
    CHUNK = "chunk"
    """Nothing said so: one token per chunk, scaled to the total of the usage in the end if that differs."""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Output that arrived in one piece: when, and how many tokens. Pieces without output are not recorded."""

    at_s: float
    num_tokens: int


class TokenTimes(Sequence[Chunk]):
    """Chunks of one token each, by their times alone: how runs of very many tokens fit into memory. The array is shared
    with whoever gave it."""

    __slots__ = ("at_s",)

    def __init__(self, at_s: array[float]) -> None:
        self.at_s = at_s

    def as_chunks(self) -> tuple[Chunk, ...]:
        """Itself, as what a record has: it does all that is done with that."""
        return cast("tuple[Chunk, ...]", self)

    def __len__(self) -> int:
        return len(self.at_s)

    def __iter__(self) -> Iterator[Chunk]:
        return (Chunk(at_s, 1) for at_s in self.at_s)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> TokenTimes: ...
    def __getitem__(self, index: int | slice) -> Chunk | TokenTimes:
        found = self.at_s[index]
        return TokenTimes(found) if isinstance(found, array) else Chunk(found, 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """A stage of the server's timeline: its name, when it began on the server's clock since it received the request,
    and how long it took. `worker` is the one that it ran on, or empty."""

    name: str
    start_s: float
    duration_s: float
    worker: str = ""


class ServerTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says of a request (`GET /v1/requests/{id}/timeline`). `stages` sum to its TTFT; `beside` are
    those that run while tokens are delivered (transfer, decode) and any that overlap."""

    ttft_s: float | None
    e2e_s: float | None
    stages: tuple[Stage, ...]
    beside: tuple[Stage, ...] = ()
    num_attempts: int = 1
    workers: tuple[str, ...] = ()
    cached_tokens: int | None = None
    """Prompt tokens that the last attempt found in the prefix cache of its worker."""
    prefill_s: float | None = None
    """How long the last attempt's prompt was at its worker, on that worker's clock: the rest of the stage `prefill` are
    the ways there and back."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a run. `intended_at_s` is when the arrival process wanted it sent, `sent_at_s` when its bytes were
    handed to the operating system; latencies are counted from either. `chunks` rise in time."""

    index: int
    request_id: str
    group: str
    intended_at_s: float
    sent_at_s: float
    ended_at_s: float
    ending: Ending
    input_tokens: int
    """As the server counted them (usage) or, if it did not say, as the workload planned them."""
    wanted_output_tokens: int
    output_tokens: int
    """As the server counted them, or else the sum of the chunks."""
    chunks: tuple[Chunk, ...]
    token_count: TokenCount
    finish_reason: str | None = None
    status: int = 0
    error: str = ""
    cached_tokens: int | None = None
    """Prompt tokens that were found in a prefix cache, by the usage or the timeline; None if neither says."""
    output_digest: str = ""
    """Of the token ids, or else of the text: equal output has equal digests. Empty without output."""
    output: str | None = None
    """The text, if it was to be kept."""
    timeline: ServerTimeline | None = None


class Sender(msgspec.Struct, frozen=True, kw_only=True):
    """One sender process's own work: if it was late, the run measured the client, not the server."""

    num_requests: int
    cpu_share: float
    """Of one core, while the load ran."""
    send_lags_s: tuple[float, ...]
    """How late the sender turned to each open-loop request: after its intended time or, if it waited for
    `--max-concurrency`, after its turn came. A new connection's opening comes on top, which is the server's doing."""
    loop_stalls_s: tuple[float, ...] = ()
    """The longest times its event loop was late, at least one if it ran."""
    stalled_share: float = 0.0
    """Of the load's duration: in which its event loop was late by more than 5 ms."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One load from its first to its last request. `settings` are the flags that led to it, JSON values by name."""

    started_at: str
    """Wall clock, ISO 8601 with its zone."""
    duration_s: float
    """From the start to the end of the last request."""
    requests: tuple[RequestRecord, ...]
    """By index."""
    senders: tuple[Sender, ...]
    settings: dict[str, Any]
    was_interrupted: bool = False


def token_times(record: RequestRecord) -> array[float] | None:
    """When each token came, of a record that has nothing else of its chunks (`TokenTimes`); None of others."""
    chunks: object = record.chunks
    return chunks.at_s if isinstance(chunks, TokenTimes) else None


def encode_run(run: Run) -> bytes:
    """As JSON."""
    return msgspec.json.encode(run, enc_hook=plain)


def decode_run(data: bytes) -> Run:
    """From JSON. Raises msgspec.ValidationError or msgspec.DecodeError."""
    return msgspec.json.decode(data, type=Run)


def plain(value: object) -> object:
    """In JSON's words what msgspec has none for: the hook with which records are encoded."""
    if isinstance(value, TokenTimes):
        return tuple(value)
    raise NotImplementedError(f"a run holds a {type(value).__name__}, which JSON has no word for")
