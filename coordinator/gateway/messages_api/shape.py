"""How an answer of `/v1/messages` is written: between pieces of text and the message's events."""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.coordinator.gateway.answer import Piece
from twinpool.coordinator.gateway.deltas import read
from twinpool.coordinator.gateway.messages_api.events import MessageEnd, MessageWriter, PromptUsage
from twinpool.coordinator.gateway.shapes import Heading, OneChoiceShape
from twinpool.coordinator.gateway.usage import Usage
from twinpool.errors import RequestError
from twinpool.request import FinishReason


class MessagesShape(OneChoiceShape):
    """One message, in one choice."""

    id_prefix = "msg"

    def __init__(self, heading: Heading) -> None:
        self._wanted = heading.wanted
        self._message = MessageWriter(heading.request_id, heading.model)
        self._parser = heading.wanted.parser()
        self._last = Piece("", (), 0)

    def opening(self, usage: Usage) -> bytes:
        """The events before the first block."""
        return self._message.opening(self._prompt_usage(usage))

    def add(self, piece: Piece) -> bytes:
        """The events of the next piece, the last one among them."""
        deltas = read(self._parser, piece.text, is_last=piece.finish is not None)
        if piece.finish is not None:
            self._last = piece
        return self._message.add(deltas)

    def closing(self, usage: Usage) -> bytes:
        """The end of the last block, and of the message."""
        return self._message.closing(self._prompt_usage(usage), self._end(usage))

    def whole(self, answers: Sequence[Piece], usage: Usage) -> bytes:
        """The message as one JSON object."""
        self.add(answers[0])
        return self._message.whole(self._prompt_usage(usage), self._end(usage))

    def error_event(self, error: RequestError) -> bytes:
        """The error, in Anthropic's shape."""
        return self._message.failed(error)

    def _end(self, usage: Usage) -> MessageEnd:
        stopped_by = self._last.stop_reason
        return MessageEnd(
            finish=self._last.finish or FinishReason.STOP,
            stop_sequence=stopped_by if isinstance(stopped_by, str) else None,
            num_output=usage.num_output,
        )

    def _prompt_usage(self, usage: Usage) -> PromptUsage:
        facts = usage.facts_as_json() if self._wanted.wants_facts else None
        return PromptUsage(usage.num_prompt, usage.num_cached or 0, facts)
