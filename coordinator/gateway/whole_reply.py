"""An answer as one JSON body, when it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

from twinpool.coordinator.gateway.answer import Piece
from twinpool.coordinator.gateway.reply import Reply
from twinpool.coordinator.gateway.strand import Strand
from twinpool.coordinator.service import Output
from twinpool.errors import RequestFailed

INLINE_LOGPROBS = 64
"""Tokens whose log probabilities are written on the event loop, in a few milliseconds at most; more in a thread."""


class WholeReply(Reply):
    """The backlog of each strand is its whole answer."""

    fixed_headers: ClassVar[dict[str, str]] = {"content-type": "application/json"}

    def _take_at_once(self, strand: Strand, output: Output) -> bool:
        strand.backlog.add(self._take(strand, output))
        return True

    async def _follow(self, strand: Strand, outputs: AsyncIterator[Output]) -> None:
        async for output in outputs:
            strand.backlog.add(self._take(strand, output))
            if strand.backlog.has_end:
                break
        if not strand.backlog.has_end:
            raise RequestFailed("the answer broke off; try again")

    async def _deliver(self, outputs: Sequence[AsyncIterator[Output]]) -> None:
        await self._follow_all(outputs)
        answers = [strand.backlog.take() for strand in self._strands]
        usage = self._usage()
        if sum(map(_num_logprobs, answers)) <= INLINE_LOGPROBS:
            body = self._shape.whole(answers, usage)
        else:
            body = await asyncio.to_thread(self._shape.whole, answers, usage)
        self.headers["content-length"] = str(len(body))
        await self._write(body, more=False)
        for strand in self._strands:
            strand.mark_delivered()

    async def _reassure(self) -> None:
        """Nothing can be sent before the answer."""


def _num_logprobs(answer: Piece) -> int:
    return len(answer.logprobs) + len(answer.prompt_logprobs or ())
