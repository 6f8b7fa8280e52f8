"""Carries one request to its client: submits it, writes what comes, notices at once when the client leaves.

Written against ASGI directly: what one output adds to a stream is one `send`, and a watcher listens for the
disconnect, so a client that leaves while queued, prefilling or streaming costs nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import ClassVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twinpool.coordinator.answer import Answer, Piece
from twinpool.coordinator.api_shapes import KEEP_ALIVE, Shape, error_event
from twinpool.coordinator.service import Output, Service, Submission
from twinpool.errors import RequestError, RequestFailed


@dataclass(frozen=True, slots=True)
class ReplyTiming:
    """How long silence may last.

    A stream that is silent for `keep_alive_s` carries a comment, so that proxies leave it open. A request
    that gets no output, or whose client takes none, for `max_silence_s` ends.
    """

    keep_alive_s: float = 10.0
    max_silence_s: float = 600.0


class Reply(Response):
    """The response to one generation request, as a `StreamedReply` or a `WholeReply`.

    The request is submitted when the response runs. If it does not come to its end here, for whatever reason,
    it is abandoned, exactly once.
    """

    fixed_headers: ClassVar[dict[str, str]]

    def __init__(
        self,
        service: Service,
        submission: Submission,
        answer: Answer,
        shape: Shape,
        timing: ReplyTiming,
        headers: dict[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(headers | self.fixed_headers)
        self._service = service
        self._request_id = submission.request_id
        self._submission = submission
        self._answer = answer
        self._shape = shape
        self._timing = timing
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
        self._send = send
        self._now = asyncio.get_running_loop().time
        self._last_output = self._last_sign = self._now()
        task = asyncio.current_task()
        assert task is not None, "an ASGI application runs in a task"
        outputs = self._service.submit(self._submission)
        self._unfinished = True
        watcher = asyncio.create_task(self._watch(receive, task))
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
            self._abandon()
        if self._failure is not None:
            if not self._started:
                raise self._failure
            await self._write_at_most(error_event(self._failure), more=False)

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
            if not self._started:
                await self._send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                self._started = True
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _write_at_most(self, body: bytes, *, more: bool) -> None:
        """Writes `body` unless the client does not take it within `keep_alive_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timing.keep_alive_s):
                await self._write(body, more=more)

    def _mark_delivered(self) -> None:
        if not self._delivered:
            self._delivered = True
            self._service.delivered(self._request_id)

    def _abandon(self) -> None:
        if self._unfinished:
            self._unfinished = False
            self._service.abandon(self._request_id)

    async def _watch(self, receive: Receive, task: asyncio.Task[None]) -> None:
        """Interrupts `task` when the client has left or nothing has moved for too long."""
        event = asyncio.ensure_future(receive())
        try:
            while not self._interrupted:
                quiet_s = self._now() - self._last_sign
                await asyncio.wait({event}, timeout=max(self._timing.keep_alive_s - quiet_s, 0.0))
                if event.done():
                    if event.result()["type"] == "http.disconnect":
                        self._interrupt(task, None)
                    else:
                        event = asyncio.ensure_future(receive())
                elif self._now() - self._last_output >= self._timing.max_silence_s:
                    silent = RequestFailed(
                        f"the request got no output for {self._timing.max_silence_s:g} s; try again"
                    )
                    # A client that does not read what is being written would not read an error either.
                    self._interrupt(task, None if self._writing.locked() else silent)
                elif self._now() - self._last_sign >= self._timing.keep_alive_s:
                    self._last_sign = self._now()
                    await self._reassure()
        finally:
            event.cancel()

    def _interrupt(self, task: asyncio.Task[None], failure: RequestError | None) -> None:
        self._abandon()
        self._interrupted = True
        self._failure = failure
        task.cancel()


class StreamedReply(Reply):
    """Server-sent events. Headers leave with the first of them: a request that fails earlier has its
    status."""

    fixed_headers: ClassVar[dict[str, str]] = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }

    async def _deliver(self, outputs: AsyncIterator[Output]) -> None:
        body = self._shape.opening()
        async for output in outputs:
            piece = self._take(output)
            body += self._shape.delta(piece)
            if piece.finish is not None:
                body += self._shape.closing(piece.finish, piece.num_tokens)
                await self._write(body, more=False)
                self._mark_delivered()
                return
            if body:
                await self._write(body, more=True)
                body = b""
            if piece.text:
                self._mark_delivered()
        raise RequestFailed("the answer broke off; try again")

    async def _reassure(self) -> None:
        await self._write_at_most(KEEP_ALIVE, more=True)


class WholeReply(Reply):
    """One JSON body, when the answer is complete."""

    fixed_headers: ClassVar[dict[str, str]] = {"content-type": "application/json"}

    async def _deliver(self, outputs: AsyncIterator[Output]) -> None:
        text = ""
        token_ids: list[int] = []
        async for output in outputs:
            piece = self._take(output)
            text += piece.text
            token_ids += piece.token_ids
            if piece.finish is not None:
                body = self._shape.whole(text, token_ids, piece.finish)
                self.headers["content-length"] = str(len(body))
                await self._write(body, more=False)
                self._mark_delivered()
                return
        raise RequestFailed("the answer broke off; try again")

    async def _reassure(self) -> None:
        """Nothing can be sent before the answer."""
