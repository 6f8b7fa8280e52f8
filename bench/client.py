"""A streaming client that measures: what came, when each token came, and how the stream ended.

It uses a connection per request, which it closes to leave.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from twinpool.bench.events import Choice, ErrorBody, EventSplitter, decode_event
from twinpool.bench.http1 import Address, Answer, Connection, connect

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
        recorder = _Recorder(departure or Departure())
        outcome = recorder.outcome
        outcome.request_id = request_id
        request = self._address.request("POST", "/v1/completions", headers, generation.body())
        outcome.sent_at = time.monotonic()
        leaving: asyncio.TimerHandle | None = None
        try:
            async with asyncio.timeout(limit_s):
                recorder.connection = await connect(self._address, self._tls)
                recorder.connection.ask(request, recorder)
                outcome.sent_at = time.monotonic()
                if departure is not None and departure.after_s is not None:
                    leaving = asyncio.get_running_loop().call_later(departure.after_s, recorder.leave)
                await recorder.is_over
        except TimeoutError:
            outcome.end = End.HUNG
        except OSError as exc:
            outcome.end, outcome.error = End.UNREACHABLE, str(exc)
        else:
            recorder.close()
        finally:
            if leaving is not None:
                leaving.cancel()
            if recorder.connection is not None:
                recorder.connection.abort()
        outcome.ended_at = time.monotonic()
        return outcome


class _AwaitedAnswer(Answer):
    """`is_over` is done when the answer is whole or the connection has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def over(self) -> None:
        if not self.is_over.done():
            self.is_over.set_result(None)


class _WholeAnswer(_AwaitedAnswer):
    """Keeps the body."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes] = []

    def take(self, data: bytes, at: float) -> None:  # noqa: ARG002  # an answer's
        self.parts.append(data)


class _Recorder(_AwaitedAnswer):
    """Turns the bytes of one answer into an `Outcome`."""

    def __init__(self, departure: Departure) -> None:
        super().__init__()
        self.outcome = Outcome()
        self.connection: Connection | None = None
        self._leave_at_tokens = departure.after_tokens
        self._events = EventSplitter()
        self._refusal = b""

    def leave(self) -> None:
        """The client goes away now, unless its answer is over."""
        if not self.is_over.done() and self.connection is not None:
            self.outcome.end = End.LEFT
            self.connection.abort()

    def close(self) -> None:
        """The exchange is over: says how."""
        outcome = self.outcome
        outcome.status = self.status
        outcome.request_id = self.headers.get("x-request-id", outcome.request_id)
        if outcome.end is End.LEFT or not self.is_whole:
            return
        if self.status == 200:
            if outcome.error:
                outcome.end = End.FAILED
            elif outcome.finish_reason is not None:
                outcome.end = End.COMPLETE
            return
        outcome.end = End.REFUSED
        if "retry-after" in self.headers:
            outcome.retry_after_s = float(self.headers["retry-after"])
        self._event(self._refusal, outcome.sent_at)

    def take(self, data: bytes, at: float) -> None:
        self.outcome.num_body_bytes += len(data)
        if self.status != 200:
            self._refusal += data
            return
        for event in self._events.feed(data):
            if event.startswith(b"{"):
                self._event(event, at)

    def _event(self, data: bytes, at: float) -> None:
        outcome = self.outcome
        try:
            event = decode_event(data)
        except msgspec.MsgspecError:
            outcome.error = f"not an event: {data[:200]!r}"
            return
        match event.error:
            case ErrorBody(message=message, code=code):
                outcome.error, outcome.error_code = message, str(code or "")
            case str(message):
                outcome.error = message
        if event.usage is not None:
            outcome.num_prompt_tokens = event.usage.prompt_tokens
            outcome.num_output_tokens = event.usage.completion_tokens
        for choice in event.choices or ():
            self._choice(choice, at)

    def _choice(self, choice: Choice, at: float) -> None:
        outcome = self.outcome
        outcome.finish_reason = choice.finish_reason or outcome.finish_reason
        text, token_ids = choice.output, choice.token_ids or ()
        if not (text or token_ids):
            return
        if outcome.first_output_at is None:
            outcome.first_output_at = at
        outcome.text += text
        outcome.token_ids += token_ids
        outcome.token_at += [at] * len(token_ids)
        if self._leave_at_tokens is not None and len(outcome.token_ids) >= self._leave_at_tokens:
            self.leave()
