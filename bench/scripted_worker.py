"""A colocated worker that computes nothing: it takes every request, and says a token of a stream when it is told to."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from typing import NamedTuple

from twinpool.channel import DealerChannel
from twinpool.config import Role
from twinpool.errors import ProtocolError
from twinpool.join_token import JoinToken
from twinpool.layout import Dtype, KVLayout
from twinpool.messages import (
    Cancel,
    Dropped,
    DropReason,
    Generate,
    Heartbeat,
    Left,
    Message,
    PrefillReport,
    Register,
    StepTokens,
    Stop,
    Token,
    Welcome,
    WorkerStats,
)
from twinpool.request import FinishReason, RequestKey

TOKEN_ID = 70
"""A printable character in vocabularies of bytes: text that nothing holds back."""
MAX_MODEL_LEN = 4096
_LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype=Dtype.FLOAT32)
_ID, _LIFE = "scripted-0", "life-1"
_STATS = WorkerStats(
    free_blocks=1, owned_blocks=0, cached_blocks=0, quarantined_blocks=0, leased_blocks=0,
    waiting=0, running=0, waiting_tokens=0, counters={},
)  # fmt: skip


class Said(NamedTuple):
    """One token that was said: when (monotonic clock, seconds), and how many others were in its message."""

    at: float
    num_beside: int


class ScriptedWorker:
    """One such worker on the running event loop, connected to a coordinator at `endpoint`.

    Each request gets its first token as soon as it comes; it then is one of `streams`, until `end`.
    `said[request id][i]` is of output token i. `failures` are messages that came and do not decode.
    """

    def __init__(self, endpoint: str, token: JoinToken, max_num_seqs: int) -> None:
        self.streams: dict[RequestKey, int] = {}
        """How many tokens each has had."""
        self.said: dict[str, list[Said]] = {}
        self.failures: list[ProtocolError] = []
        self._changed = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None
        self._channel = DealerChannel(endpoint, f"{_ID}/{_LIFE}", token, self._on_message, self._on_junk)
        self._channel.send(
            Register(
                worker_id=_ID,
                incarnation=_LIFE,
                role=Role.COLOCATED,
                pid=os.getpid(),
                endpoint="tcp://nowhere",
                fingerprint="scripted",
                layout=_LAYOUT,
                num_blocks=max_num_seqs * MAX_MODEL_LEN // _LAYOUT.block_size,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=max_num_seqs,
            )
        )

    async def until_streams(self, num_streams: int, limit_s: float) -> None:
        """Returns once it has so many streams. Raises TimeoutError."""
        async with asyncio.timeout(limit_s):
            while len(self.streams) < num_streams:
                self._changed.clear()
                await self._changed.wait()

    def say(self, keys: Iterable[RequestKey], finish: FinishReason | None = None) -> None:
        """The next token of each of these streams, all in one message, as from one step."""
        tokens = tuple(Token(key, self.streams[key], TOKEN_ID, finish) for key in keys)
        for token in tokens:
            self.streams[token.key] += 1
        now = time.monotonic()
        self._channel.send(StepTokens(tokens))
        for token in tokens:
            self.said[token.key.request_id].append(Said(now, len(tokens) - 1))

    def end(self) -> None:
        """The last token of every stream."""
        self.say(list(self.streams), FinishReason.STOP)
        self.streams.clear()

    def close(self) -> None:
        """Leaves the coordinator."""
        if self._beating is not None:
            self._beating.cancel()
        self._channel.send(Left("the measurement is over"))
        self._channel.close()

    def _on_message(self, _: str, message: Message) -> None:
        match message:
            case Welcome(heartbeat_s=heartbeat_s):
                if self._beating is None:
                    self._beating = asyncio.create_task(self._beat(heartbeat_s))
            case Generate(job=job):
                self.streams[job.key] = job.num_emitted
                self.said.setdefault(job.key.request_id, [])
                self._channel.send(PrefillReport(job.key, 0.0, 0.0, 0, len(job.token_ids), 1))
                self.say((job.key,))
            case Cancel(key=key):
                self.streams.pop(key, None)
                self._channel.send(Dropped(key, DropReason.CANCELLED))
            case Stop():
                self._channel.send(Left("stopped"))
        self._changed.set()

    def _on_junk(self, _: str, error: ProtocolError) -> None:
        self.failures.append(error)

    async def _beat(self, heartbeat_s: float) -> None:
        while True:
            self._channel.send(Heartbeat(_STATS))
            await asyncio.sleep(heartbeat_s)
