"""An answer as one JSON body, when it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

from twinpool.coordinator.gateway.answer import Piece
from twinpool.coordinator.gateway.reply import Reply
from twinpool.coordinator.gateway.strand import Strand
from twinpool.coordinator.service import Output
from twinpool.errors import InvalidRequest, RequestFailed

INLINE_LOGPROBS = 64
"""Tokens whose log probabilities are written on the event loop, in a few milliseconds at most; more in a thread."""
MAX_LOGPROBS = 1 << 20
"""Log probabilities, of chosen and of likeliest tokens, that one body may have: about 100 MB while it is collected."""


class WholeReply(Reply):
    """The backlog of each strand is its whole answer."""

    fixed_headers: ClassVar[dict[str, str]] = {"content-type": "application/json"}
    _num_logprobs = 0

    def _take_at_once(self, strand: Strand, output: Output) -> bool:
        self._keep(strand, self._take(strand, output))
        return True

    def _keep(self, strand: Strand, piece: Piece) -> None:
        """Raises InvalidRequest if the answer grows beyond what one body may have."""
        strand.backlog.add(piece)
        for entries in (piece.logprobs, piece.prompt_logprobs):
            if entries:
                self._num_logprobs += len(entries) * (1 + len(entries[-1].top))
        if self._num_logprobs > MAX_LOGPROBS:
            raise InvalidRequest(
                f"the answer has more than {MAX_LOGPROBS} log probabilities, which is too much for one body; stream "
                "it, or ask for fewer choices, fewer tokens or fewer of the likeliest",
                param="logprobs",
            )

    async def _follow(self, strand: Strand, outputs: AsyncIterator[Output]) -> None:
        async for output in outputs:
            self._keep(strand, self._take(strand, output))
            if strand.backlog.has_end:
                break
        if not strand.backlog.has_end:
            raise RequestFailed("the answer broke off; try again")

    async def _deliver(self, outputs: Sequence[AsyncIterator[Output]]) -> None:
        await self._follow_all(outputs)
        answers = [strand.backlog.take() for strand in self._strands]
        usage = self._usage()
        if sum(map(_num_scored_tokens, answers)) <= INLINE_LOGPROBS:
            body = self._shape.whole(answers, usage)
        else:
            body = await asyncio.to_thread(self._shape.whole, answers, usage)
        self.headers["content-length"] = str(len(body))
        await self._write(body, more=False)
        for strand in self._strands:
            strand.mark_delivered()

    async def _reassure(self) -> None:
        """Nothing can be sent before the answer."""


def _num_scored_tokens(answer: Piece) -> int:
    return len(answer.logprobs) + len(answer.prompt_logprobs or ())
