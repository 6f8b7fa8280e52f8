"""How an answer of `/v1/responses` is written: between pieces of text and the response's events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinpool.coordinator.gateway.answer import Piece
from twinpool.coordinator.gateway.deltas import read
from twinpool.coordinator.gateway.logprobs import LogprobsWriter
from twinpool.coordinator.gateway.responses.body import ResponsesBody
from twinpool.coordinator.gateway.responses.events import ResponseWriter
from twinpool.coordinator.gateway.responses.output import ResponseUsage
from twinpool.coordinator.gateway.shapes import Heading, OneChoiceShape
from twinpool.coordinator.gateway.usage import Usage
from twinpool.errors import RequestError
from twinpool.request import FinishReason


class ResponsesShape(OneChoiceShape):
    """One response: what `body` asks for, in one choice."""

    id_prefix = "resp"

    def __init__(self, body: ResponsesBody, heading: Heading) -> None:
        self._wanted = heading.wanted
        self._response = ResponseWriter(body, heading.request_id, heading.model, heading.created)
        self._logprobs = LogprobsWriter(heading.texts, as_ids=heading.wanted.names_tokens_by_id)
        self._parser = heading.wanted.parser()
        self._is_cut = False

    def opening(self, usage: Usage) -> bytes:  # noqa: ARG002  # it is told at the end
        """The events before the first item."""
        return self._response.opening()

    def add(self, piece: Piece) -> bytes:
        """The events of the next piece, the last one among them."""
        deltas = read(self._parser, piece.text, is_last=piece.finish is not None)
        if piece.finish is not None:
            self._is_cut = piece.finish is FinishReason.LENGTH
        return self._response.piece(deltas, self._logprob_entries(piece))

    def closing(self, usage: Usage) -> bytes:
        """The end of the last item, and of the response."""
        return self._response.closing(self._usage(usage), is_cut=self._is_cut)

    def whole(self, answers: Sequence[Piece], usage: Usage) -> bytes:
        """The response as one JSON object."""
        self.add(answers[0])
        return self._response.whole(self._usage(usage), is_cut=self._is_cut)

    def error_event(self, error: RequestError) -> bytes:
        """The response with what it has so far, failed."""
        return self._response.failed(error)

    def _logprob_entries(self, piece: Piece) -> list[Any]:
        if self._wanted.num_logprobs is None:
            return []
        entries: list[Any] = self._logprobs.chat(piece.token_ids, piece.logprobs)["content"]
        return entries

    def _usage(self, usage: Usage) -> ResponseUsage:
        return ResponseUsage(
            num_input=usage.num_prompt,
            num_cached=usage.num_cached or 0,
            num_output=usage.num_output,
            num_reasoning=self._response.num_reasoning(usage.num_output),
            facts=usage.facts_as_json() if self._wanted.wants_facts else None,
        )
