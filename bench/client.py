"""The client of the programs that hold the server to its promises: it asks, and leaves as it likes.

It uses a connection per request, which it closes to leave. Loads at set times are sent by `serving/load_loop.py`, which
reads its streams by the same `StreamedAnswer`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from twinpool.bench.http1 import Address, Answer, Connection, connect
from twinpool.bench.serving.answer import StreamedAnswer

GET_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Generation:
    """What is asked of `POST /v1/completions`: a text, or token ids. With `seed` None the server draws one."""

    prompt: str | Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = True
    stop: tuple[str, ...] = ()

    def body(self) -> bytes:
        """The JSON body of a streamed request that gives token ids and usage back."""
        values: dict[str, Any] = {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "ignore_eos": self.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self.seed is not None:
            values["seed"] = self.seed
        if self.stop:
            values["stop"] = self.stop
        return msgspec.json.encode(values)


@dataclass(frozen=True, slots=True)
class Departure:
    """When a client leaves: so long after sending, or at so many tokens of the answer, whichever is first."""

    after_s: float | None = None
    after_tokens: int | None = None


class End(StrEnum):
    """How a request ended, for its client."""

    COMPLETE = "complete"
    FAILED = "failed"
    """An error event ended the stream."""
    REFUSED = "refused"
    """A status other than 200."""
    LEFT = "left"
    BROKEN = "broken"
    """The connection ended without a terminal event."""
    HUNG = "hung"
    """The time limit passed without an end."""
    UNREACHABLE = "unreachable"


@dataclass(slots=True)
class Outcome:
    """All that one request's client saw. Times are its monotonic clock's, in seconds.

    `token_ids[i]` arrived at `token_at[i]`; tokens that came in one piece have one time. `first_output_at` is when the
    first token or text came.
    """

    request_id: str = ""
    end: End = End.BROKEN
    sent_at: float = 0.0
    ended_at: float = 0.0
    first_output_at: float | None = None
    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    token_at: list[float] = field(default_factory=list)
    text: str = ""
    num_body_bytes: int = 0
    finish_reason: str | None = None
    error: str = ""
    error_code: str = ""
    retry_after_s: float | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    """The server's counts (usage), which come behind the answer."""


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Client:
    """Talks to one server. Each call uses a connection of its own."""

    def __init__(self, url: str, api_key: str | None = None, *, verify_tls: bool = True) -> None:
        self._address = Address.parse("--url", url)
        self._tls = self._address.tls_context(is_verified=verify_tls)
        self.host, self.port = self._address.host, self._address.port
        self._headers = ["Connection: close"]
        if api_key is not None:
            self._headers.append(f"Authorization: Bearer {api_key}")

    async def get(self, path: str, limit_s: float = GET_LIMIT_S) -> Response:
        """Fetches `path`. Raises OSError (not reachable, broken off) and TimeoutError."""
        answer = _WholeAnswer()
        async with asyncio.timeout(limit_s):
            connection = await connect(self._address, self._tls)
            try:
                connection.ask(self._address.request("GET", path, self._headers), answer)
                await answer.is_over
            finally:
                connection.abort()
        if not answer.is_whole:
            raise ConnectionResetError(f"the answer to GET {path} broke off")
        return Response(answer.status, answer.headers, b"".join(answer.parts))

    async def generate(
        self, generation: Generation, limit_s: float, departure: Departure | None = None, request_id: str = ""
    ) -> Outcome:
        """Sends the request and follows its stream, at most `limit_s`. What a server does is an outcome, no error."""
        headers = [*self._headers, "Content-Type: application/json"]
        if request_id:
            headers.append(f"X-Request-Id: {request_id}")
        stream = _Stream(departure or Departure())
        outcome = Outcome(request_id)
        request = self._address.request("POST", "/v1/completions", headers, generation.body())
        outcome.sent_at = time.monotonic()
        leaving: asyncio.TimerHandle | None = None
        try:
            async with asyncio.timeout(limit_s):
                stream.connection = await connect(self._address, self._tls)
                stream.connection.ask(request, stream)
                outcome.sent_at = time.monotonic()
                if departure is not None and departure.after_s is not None:
                    leaving = asyncio.get_running_loop().call_later(departure.after_s, stream.leave)
                await stream.is_over
        except TimeoutError:
            outcome.end = End.HUNG
        except OSError as exc:
            outcome.end, outcome.error = End.UNREACHABLE, str(exc)
        else:
            outcome.end = stream.end()
        finally:
            if leaving is not None:
                leaving.cancel()
            if stream.connection is not None:
                stream.connection.abort()
        outcome.ended_at = time.monotonic()
        stream.fill(outcome)
        return outcome


class _WholeAnswer(Answer):
    """Keeps the body. `is_over` is done when it is whole or the connection has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes] = []
        self.is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, data: bytes, at: float) -> None:  # noqa: ARG002  # an answer's
        self.parts.append(data)

    def over(self) -> None:
        if not self.is_over.done():
            self.is_over.set_result(None)


class _Stream(StreamedAnswer):
    """A streamed answer whose client may leave. `is_over` as above."""

    def __init__(self, departure: Departure) -> None:
        super().__init__()
        self.is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.connection: Connection | None = None
        self.was_left = False
        self.num_body_bytes = 0
        self._leave_at_tokens = departure.after_tokens

    def over(self) -> None:
        if not self.is_over.done():
            self.is_over.set_result(None)

    def leave(self) -> None:
        """The client goes away now, unless its answer is over."""
        if not self.is_over.done() and self.connection is not None:
            self.was_left = True
            self.connection.abort()

    def take(self, data: bytes, at: float) -> None:
        self.num_body_bytes += len(data)
        super().take(data, at)
        if self._leave_at_tokens is not None and len(self.token_ids) >= self._leave_at_tokens:
            self.leave()

    def end(self) -> End:
        """How it ended, by what came."""
        if self.was_left:
            return End.LEFT
        if not self.is_whole:
            return End.BROKEN
        if self.status != 200:
            return End.REFUSED
        if self.error:
            return End.FAILED
        return End.BROKEN if self.finish_reason is None else End.COMPLETE

    def fill(self, outcome: Outcome) -> None:
        """Says what came."""
        self.read_refusal()
        outcome.request_id = self.headers.get("x-request-id", outcome.request_id)
        outcome.status = self.status
        outcome.first_output_at = self.times[0] if self.times else None
        outcome.token_ids = self.token_ids
        outcome.token_at = [
            at for at, count in zip(self.times, self.id_counts, strict=True) for _ in range(count or 0)
        ]
        outcome.text = "".join(self.texts)
        outcome.num_body_bytes = self.num_body_bytes
        outcome.finish_reason = self.finish_reason
        outcome.error, outcome.error_code = outcome.error or self.error, self.error_code
        outcome.retry_after_s = self.retry_after_s
        if self.usage is not None:
            outcome.num_prompt_tokens = self.usage.prompt_tokens
            outcome.num_output_tokens = self.usage.completion_tokens
