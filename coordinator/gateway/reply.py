"""Carries one request to its client: submits it, writes what comes, notices at once when the client leaves.

It is written against ASGI directly: what one output adds to a stream is one `send`. A watcher listens for the
disconnect, so a client that leaves costs nothing more, in whatever state its request is. What a client that is behind
has not taken is kept as one piece, which grows up to a bound. A client that is further behind, or takes nothing for too
long, is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from array import array
from collections.abc import AsyncIterator
from io import StringIO
from typing import Any, ClassVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.answer import Answer, Piece
from twinpool.coordinator.gateway.request_ids import Claim
from twinpool.coordinator.gateway.shapes import KEEP_ALIVE, Shape, error_event
from twinpool.coordinator.service import Output, Service, Submission
from twinpool.errors import ClientTooSlow, RequestError, RequestFailed
from twinpool.request import FinishReason


class Backlog:
    """What a stream has not written yet, as one piece in one buffer: not as thousands of little strings."""

    def __init__(self) -> None:
        self._text = StringIO()
        self._token_ids = array("q")
        self._num_tokens = 0
        self._finish: FinishReason | None = None
        self.num_bytes = 0

    @property
    def has_end(self) -> bool:
        """Whether its last piece is the answer's last."""
        return self._finish is not None

    def add(self, piece: Piece) -> None:
        """Appends the next piece."""
        self._text.write(piece.text)
        self._token_ids.extend(piece.token_ids)
        self._num_tokens, self._finish = piece.num_tokens, piece.finish
        self.num_bytes += len(piece.text.encode()) + self._token_ids.itemsize * len(piece.token_ids)

    def take(self) -> Piece:
        """All of it; nothing stays."""
        piece = Piece(self._text.getvalue(), tuple(self._token_ids), self._num_tokens, self._finish)
        self._text, self._token_ids, self.num_bytes = StringIO(), array("q"), 0
        return piece


class Reply(Response):
    """The response to one generation request, as a `StreamedReply` or a `WholeReply`.

    The request is submitted when the response runs, unless its client has left by then. If the response ends before the
    request does, for whatever reason, the request is abandoned or cut, exactly once. `held` is closed at the end: it
    releases the request's id.
    """

    fixed_headers: ClassVar[dict[str, str]]

    def __init__(
        self,
        service: Service,
        submission: Submission,
        answer: Answer,
        shape: Shape,
        limits: GatewayConfig,
        claim: Claim,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"x-request-id": claim.shown_id} | self.fixed_headers)
        self._service = service
        self._request_id = submission.request_id
        self._submission = submission
        self._answer = answer
        self._shape = shape
        self._limits = limits
        self._claim = claim
        self.held = contextlib.ExitStack()
        self._connection = claim.connection
        self._writing = asyncio.Lock()
        self._started = False
        self._delivered = False
        self._unfinished = False
        self._interrupted = False
        self._failure: RequestError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI's
        """Runs the request to its end, or until the client leaves.

        Raises:
            RequestError: the request failed before any of its answer was sent. Later ones are an error event.
        """
        with self.held:
            await self._run(receive, send)

    async def _run(self, receive: Receive, send: Send) -> None:
        self._send = send
        self._now = asyncio.get_running_loop().time
        self._last_output = self._last_sign = self._now()
        task = asyncio.current_task()
        assert task is not None, "an ASGI application runs in a task"
        self._heard: asyncio.Future[Message] = asyncio.ensure_future(receive())
        try:
            # Lets the news arrive that the client has left while its prompt was tokenized.
            await asyncio.sleep(0)
            if not self._client_has_left():
                await self._serve(receive, task)
        finally:
            self._heard.cancel()

    async def _serve(self, receive: Receive, task: asyncio.Task[None]) -> None:
        self._claim.check()
        outputs = self._service.submit(self._submission, self._take_at_once)
        self._unfinished = True
        connection = self._connection
        watcher = asyncio.create_task(self._watch(receive, task))
        connection.on_stall = lambda: self._interrupt(task, _too_slow("has taken nothing for too long"))
        try:
            await self._deliver(outputs)
        except RequestError as error:
            self._failure = error
        except asyncio.CancelledError:
            if not self._interrupted:
                raise
            task.uncancel()
        finally:
            watcher.cancel()
            connection.on_stall = None
            connection.backlog_bytes = 0
            self._let_go()
        if self._failure is not None:
            if not self._started:
                raise self._failure
            if isinstance(self._failure, ClientTooSlow):
                connection.give_up()
            await self._write_at_most(error_event(self._failure), more=False)

    @abstractmethod
    def _take_at_once(self, output: Output) -> bool:
        """Deals with an output without `finish` that nothing waits before; false leaves it to `_deliver`."""

    @abstractmethod
    async def _deliver(self, outputs: AsyncIterator[Output]) -> None:
        """Writes the answer. Returns when all of it is handed over; raises RequestError."""

    @abstractmethod
    async def _reassure(self) -> None:
        """Called when nothing has been sent for `keep_alive_s`. Takes no longer than that."""

    def _take(self, output: Output) -> Piece:
        self._last_output = self._last_sign = self._now()
        if output.finish is not None:
            self._unfinished = False
        piece = self._answer.add(output)
        if piece.at_stop_string:
            self._unfinished = False
            self._service.complete(self._request_id, piece.num_tokens)
        return piece

    async def _write(self, body: bytes, *, more: bool) -> None:
        async with self._writing:
            await self._write_next(body, more=more)

    async def _write_next(self, body: bytes, *, more: bool) -> None:
        """Writes `body`; `_writing` is held."""
        if not self._started:
            await self._send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._started = True
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _write_at_most(self, body: bytes, *, more: bool) -> None:
        """Writes `body` unless the client does not take it within `keep_alive_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.keep_alive_s):
                await self._write(body, more=more)

    def _mark_delivered(self) -> None:
        if not self._delivered:
            self._delivered = True
            self._service.delivered(self._request_id)

    def _let_go(self) -> None:
        """Tells the service to stop work for this request, unless its outcome is known already."""
        if not self._unfinished:
            return
        self._unfinished = False
        if isinstance(self._failure, ClientTooSlow):
            self._service.cut(self._request_id, self._failure)
        else:
            self._service.abandon(self._request_id)

    async def _watch(self, receive: Receive, task: asyncio.Task[None]) -> None:
        """Interrupts `task` when the client has left or nothing has moved for too long."""
        while not self._interrupted:
            quiet_s = self._now() - self._last_sign
            await asyncio.wait({self._heard}, timeout=max(self._limits.keep_alive_s - quiet_s, 0.0))
            if self._heard.done():
                if self._client_has_left():
                    self._interrupt(task, None)
                else:
                    self._heard = asyncio.ensure_future(receive())
            elif self._now() - self._last_output >= self._limits.max_silence_s:
                silent = RequestFailed(
                    f"the request got no output for {self._limits.max_silence_s:g} s; try again"
                )
                # A client that does not read what is being written would not read an error either.
                self._interrupt(task, None if self._writing.locked() else silent)
            elif self._now() - self._last_sign >= self._limits.keep_alive_s:
                self._last_sign = self._now()
                await self._reassure()

    def _client_has_left(self) -> bool:
        return self._heard.done() and self._heard.result()["type"] == "http.disconnect"

    def _interrupt(self, task: asyncio.Task[None], failure: RequestError | None) -> None:
        if self._interrupted:
            return
        self._interrupted = True
        self._failure = failure
        self._let_go()
        task.cancel()


class StreamedReply(Reply):
    """Server-sent events. Headers leave with the first of them: a request that fails earlier has its
    status."""

    fixed_headers: ClassVar[dict[str, str]] = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }
    _has_opened = False
    _has_closed = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backlog = Backlog()

    def _take_at_once(self, output: Output) -> bool:
        """Writes it, unless that is for the task to do: to begin the answer, or to go on once the client keeps up."""
        is_in_turn = self._has_opened and not self._backlog.num_bytes and not self._writing.locked()
        if not is_in_turn or self._connection.is_paused:
            return False
        piece = self._take(output)
        if piece.finish is not None:  # at a stop string: `outputs` ends, and the task writes the end
            self._backlog.add(piece)
        elif body := self._shape.delta(piece):
            self._connection.write_part(body)
            if piece.text:
                self._mark_delivered()
        return True

    async def _deliver(self, outputs: AsyncIterator[Output]) -> None:
        catching_up: asyncio.Task[None] | None = None
        try:
            async for output in outputs:
                piece = self._take(output)
                self._backlog.add(piece)
                if piece.finish is not None:
                    break
                if not self._connection.is_paused:
                    await self._flush()
                    continue
                self._hold_back()
                if catching_up is None or catching_up.done():
                    catching_up = asyncio.create_task(self._catch_up())
            else:
                if not self._backlog.has_end:
                    raise RequestFailed("the answer broke off; try again")
            if catching_up is not None:
                await catching_up
        finally:
            if catching_up is not None:
                catching_up.cancel()
        await self._flush()

    async def _catch_up(self) -> None:
        await self._connection.until_writable()
        await self._flush()

    def _hold_back(self) -> None:
        """Bounds what waits for the client, here and behind the connection."""
        self._connection.backlog_bytes = self._backlog.num_bytes
        if self._backlog.num_bytes + self._connection.buffered_bytes > self._limits.max_buffered_bytes:
            raise _too_slow(f"is more than {self._limits.max_buffered_bytes} bytes behind")

    async def _flush(self) -> None:
        """Writes the whole backlog in one part, and waits while the client is behind. Does nothing after the end."""
        async with self._writing:
            if self._has_closed:
                return
            piece = self._backlog.take()
            self._connection.backlog_bytes = 0
            body = b"" if self._has_opened else self._shape.opening()
            body += self._shape.delta(piece)
            if piece.finish is not None:
                body += self._shape.closing(piece.finish, piece.num_tokens)
            if body:
                await self._write_next(body, more=piece.finish is None)
                self._has_opened, self._has_closed = True, piece.finish is not None
            if piece.text or piece.finish is not None:
                self._mark_delivered()

    async def _reassure(self) -> None:
        if not self._connection.is_paused:
            await self._write_at_most(KEEP_ALIVE, more=True)


class WholeReply(Reply):
    """One JSON body, when the answer is complete."""

    fixed_headers: ClassVar[dict[str, str]] = {"content-type": "application/json"}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._finish: FinishReason | None = None

    def _take_at_once(self, output: Output) -> bool:
        self._keep(self._take(output))
        return True

    def _keep(self, piece: Piece) -> None:
        self._text.append(piece.text)
        self._token_ids += piece.token_ids
        self._finish = piece.finish

    async def _deliver(self, outputs: AsyncIterator[Output]) -> None:
        async for output in outputs:
            self._keep(self._take(output))
            if self._finish is not None:
                break
        if self._finish is None:
            raise RequestFailed("the answer broke off; try again")
        body = self._shape.whole("".join(self._text), self._token_ids, self._finish)
        self.headers["content-length"] = str(len(body))
        await self._write(body, more=False)
        self._mark_delivered()

    async def _reassure(self) -> None:
        """Nothing can be sent before the answer."""


def _too_slow(what: str) -> ClientTooSlow:
    return ClientTooSlow(f"the client {what}; read faster, or ask for a shorter answer")
