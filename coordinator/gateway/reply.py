"""Carries one request to its client: submits it, writes what comes, notices at once when the client leaves.

It is written against ASGI directly: what one output adds to a stream is one `send`. A watcher listens for the
disconnect, so a client that leaves costs nothing more, in whatever state its request is. A request that asks for many
answers has a strand for each, which run at once; the first that fails ends them all.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import ClassVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.answer import Piece
from twinpool.coordinator.gateway.prompts import total_tokens
from twinpool.coordinator.gateway.request_ids import Claim
from twinpool.coordinator.gateway.shapes import Heading, Shape
from twinpool.coordinator.gateway.strand import Strand
from twinpool.coordinator.gateway.usage import Usage
from twinpool.coordinator.service import Output
from twinpool.errors import ClientTooSlow, RequestError, RequestFailed

SUBMITTED_AT_ONCE = 8
"""Strands that are submitted before others get their turn on the event loop."""


class Reply(Response):
    """The response to one generation request, as a `StreamedReply` or a `WholeReply`.

    The strands are submitted when the response runs, unless its client has left by then. If the response ends before
    they do, for whatever reason, each is abandoned or cut, exactly once. `held` is closed at the end: it releases the
    request's id.
    """

    fixed_headers: ClassVar[dict[str, str]]

    def __init__(
        self,
        strands: Sequence[Strand],
        shape: Shape,
        heading: Heading,
        limits: GatewayConfig,
        claim: Claim,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"x-request-id": claim.shown_id} | self.fixed_headers | (headers or {}))
        self._strands = strands
        self._shape = shape
        self._heading = heading
        self._limits = limits
        self._claim = claim
        self.held = contextlib.ExitStack()
        self._connection = claim.connection
        self._writing = asyncio.Lock()
        self._started = False
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
        connection = self._connection
        watcher: asyncio.Task[None] | None = None
        try:
            outputs = await self._submit()
            watcher = asyncio.create_task(self._watch(receive, task))
            connection.on_stall = lambda: self._interrupt(task, too_slow("has taken nothing for too long"))
            await self._deliver(outputs)
        except RequestError as error:
            self._failure = error
        except asyncio.CancelledError:
            if not self._interrupted:
                raise
            task.uncancel()
        finally:
            if watcher is not None:
                watcher.cancel()
            connection.on_stall = None
            connection.backlog_bytes = 0
            self._let_go()
        if self._failure is not None:
            if not self._started:
                raise self._failure
            if isinstance(self._failure, ClientTooSlow):
                connection.give_up()
            await self._write_at_most(self._shape.error_event(self._failure), more=False)

    async def _submit(self) -> list[AsyncIterator[Output]]:
        """Submits every strand. Raises what the first refused one does: then none is to run."""
        outputs = []
        for number, strand in enumerate(self._strands):
            if number and not number % SUBMITTED_AT_ONCE:
                await asyncio.sleep(0)
            self._claim.check()
            outputs.append(strand.submit(partial(self._take_at_once, strand)))
        return outputs

    @abstractmethod
    def _take_at_once(self, strand: Strand, output: Output) -> bool:
        """Deals with an output without `finish` that nothing waits before; false leaves it to `_deliver`."""

    @abstractmethod
    async def _deliver(self, outputs: Sequence[AsyncIterator[Output]]) -> None:
        """Writes the answer. Returns when all of it is handed over; raises RequestError."""

    @abstractmethod
    async def _reassure(self) -> None:
        """Called when nothing has been sent for `keep_alive_s`. Takes no longer than that."""

    @abstractmethod
    async def _follow(self, strand: Strand, outputs: AsyncIterator[Output]) -> None:
        """Takes the outputs of one strand to its end; raises RequestError."""

    async def _follow_all(self, outputs: Sequence[AsyncIterator[Output]]) -> None:
        """Follows every strand to its end. Raises what the first that fails does."""
        pairs = list(zip(self._strands, outputs, strict=True))
        if len(pairs) == 1:
            await self._follow(*pairs[0])
            return
        tasks = [asyncio.create_task(self._follow(*pair)) for pair in pairs]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, strand: Strand, output: Output) -> Piece:
        self._last_output = self._last_sign = self._now()
        return strand.take(output)

    def _usage(self) -> Usage:
        """Of the answer as far as it has come; of all of it once every strand has ended."""
        every = [facts for strand in self._strands if (facts := strand.facts()) is not None]
        is_known = len(every) == len(self._strands)
        return Usage(
            num_prompt=total_tokens(self._heading.prompts),
            num_output=sum(strand.num_tokens for strand in self._strands),
            firsts=every[:: self._heading.wanted.n] if is_known else (),
            all_facts=every if is_known else (),
        )

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

    def _let_go(self) -> None:
        for strand in self._strands:
            strand.let_go(self._failure)

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


def too_slow(what: str) -> ClientTooSlow:
    """The client is cut for that reason."""
    return ClientTooSlow(f"the client {what}; read faster, or ask for a shorter answer")
