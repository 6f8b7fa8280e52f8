"""An answer as server-sent events, chunk by chunk as its tokens come.

What a client that is behind has not taken is kept as one piece per choice, which grows up to a bound. A client that is
further behind, or takes nothing for too long, is cut. What an answer begins with comes all at once, however fast its
client reads: a prompt that is repeated with its log probabilities may be a megabyte, and is not counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.answer import Piece
from twinpool.coordinator.gateway.reply import Reply, too_slow
from twinpool.coordinator.gateway.request_ids import Claim
from twinpool.coordinator.gateway.shapes import KEEP_ALIVE, ChoiceShape, Heading, Shape
from twinpool.coordinator.gateway.strand import Strand
from twinpool.coordinator.service import Output
from twinpool.errors import RequestFailed


class _Writer:
    """How far one choice of the stream has been written."""

    __slots__ = ("has_opened", "shape")

    def __init__(self, shape: ChoiceShape) -> None:
        self.shape = shape
        self.has_opened = False


class StreamedReply(Reply):
    """Server-sent events. Headers leave with the first of them: a request that fails earlier has its
    status."""

    fixed_headers: ClassVar[dict[str, str]] = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }

    def __init__(
        self,
        strands: Sequence[Strand],
        shape: Shape,
        heading: Heading,
        limits: GatewayConfig,
        claim: Claim,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(strands, shape, heading, limits, claim, headers)
        self._writers = {strand: _Writer(shape.choice(index)) for index, strand in enumerate(strands)}
        self._behind: dict[Strand, None] = {}  # those with a backlog, in order
        self._num_open = len(strands)
        self._num_opening_bytes = 0
        self._catching_up: asyncio.Task[None] | None = None

    def _take_at_once(self, strand: Strand, output: Output) -> bool:
        """Writes it, unless that is for the task to do: to begin the choice, or to go on once the client keeps up."""
        writer = self._writers[strand]
        if not writer.has_opened or self._behind or self._writing.locked() or self._connection.is_paused:
            return False
        piece = self._take(strand, output)
        if piece.finish is not None:  # at a stop string: `outputs` ends, and the task writes the end
            strand.backlog.add(piece)
            self._behind[strand] = None
        elif body := writer.shape.delta(piece):
            self._connection.write_part(body)
            if piece.text:
                strand.mark_delivered()
        return True

    async def _deliver(self, outputs: Sequence[AsyncIterator[Output]]) -> None:
        try:
            await self._follow_all(outputs)
            if self._catching_up is not None:
                await self._catching_up
        finally:
            if self._catching_up is not None:
                self._catching_up.cancel()
        await self._flush()

    async def _follow(self, strand: Strand, outputs: AsyncIterator[Output]) -> None:
        async for output in outputs:
            piece = self._take(strand, output)
            strand.backlog.add(piece)
            self._behind[strand] = None
            if not self._connection.is_paused:
                await self._flush()
            elif piece.finish is None:
                self._hold_back()
            if piece.finish is not None:
                break
        if not strand.backlog.has_end:
            raise RequestFailed("the answer broke off; try again")
        if not self._connection.is_paused:
            await self._flush()

    def _hold_back(self) -> None:
        """Bounds what waits for the client, here and behind the connection, and has it written when the client keeps
        up again."""
        num_bytes = sum(strand.backlog.num_bytes for strand in self._behind)
        self._connection.backlog_bytes = num_bytes
        uncounted = self._num_opening_bytes + sum(strand.backlog.num_prompt_bytes for strand in self._behind)
        if num_bytes + self._connection.buffered_bytes - uncounted > self._limits.max_buffered_bytes:
            raise too_slow(f"is more than {self._limits.max_buffered_bytes} bytes behind")
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.create_task(self._catch_up())

    async def _catch_up(self) -> None:
        await self._connection.until_writable()
        await self._flush()

    async def _flush(self) -> None:
        """Writes the whole backlog in one part, and waits while the client is behind."""
        async with self._writing:
            if not self._behind:
                return
            behind, self._behind = self._behind, {}
            self._connection.backlog_bytes = 0
            pieces = [(strand, strand.backlog.take()) for strand in behind]
            parts = [self._part(self._writers[strand], piece) for strand, piece in pieces]
            is_last = self._num_open == 0
            if is_last:
                parts.append(self._shape.closing(self._usage()))
            if body := b"".join(parts):
                await self._write_next(body, more=not is_last)
            for strand, piece in pieces:
                if piece.text or piece.finish is not None:
                    strand.mark_delivered()

    def _part(self, writer: _Writer, piece: Piece) -> bytes:
        """The chunks of one choice's next piece."""
        part = b"" if writer.has_opened else writer.shape.opening(piece, self._usage)
        self._num_opening_bytes += len(part)
        part += writer.shape.delta(piece)
        writer.has_opened = writer.has_opened or bool(part)
        if piece.finish is not None:
            part += writer.shape.ending(piece)
            self._num_open -= 1
        return part

    async def _reassure(self) -> None:
        if not self._connection.is_paused:
            await self._write_at_most(KEEP_ALIVE, more=True)
