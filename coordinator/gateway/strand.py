"""One choice of a request: a request of its own to the coordinator, and an answer of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

from twinpool.coordinator.gateway.answer import Answer, Piece
from twinpool.coordinator.gateway.backlog import Backlog
from twinpool.coordinator.service import Output, RequestFacts, Service, Submission, Take
from twinpool.errors import ClientTooSlow, RequestError, UnknownRequest


class Strand:
    """Submits its choice, counts its tokens, and sees that it comes to one end.

    `backlog` is what the client has not been given yet.
    """

    def __init__(self, service: Service, submission: Submission, answer: Answer) -> None:
        self.backlog = Backlog()
        self.num_tokens = 0
        self._service = service
        self._submission = submission
        self._request_id = submission.request_id
        self._answer = answer
        self._is_unfinished = False
        self._is_delivered = False

    def submit(self, take: Take) -> AsyncIterator[Output]:
        """Submits it; see `Service.submit`."""
        outputs = self._service.submit(self._submission, take)
        self._is_unfinished = True
        return outputs

    def take(self, output: Output) -> Piece:
        """The piece that the next output adds. Raises RequestError if it says that the request was lost."""
        if output.finish is not None:
            self._is_unfinished = False
        piece = self._answer.add(output)
        self.num_tokens = piece.num_tokens
        if piece.finish is not None and piece.at_stop_string:
            self._is_unfinished = False
            self._service.complete(self._request_id, piece.num_tokens)
        return piece

    def mark_delivered(self) -> None:
        """Some of its answer has been handed to the connection."""
        if not self._is_delivered:
            self._is_delivered = True
            self._service.delivered(self._request_id)

    def let_go(self, failure: RequestError | None) -> None:
        """Tells the service to stop work for it, unless its outcome is known already."""
        if not self._is_unfinished:
            return
        self._is_unfinished = False
        if isinstance(failure, ClientTooSlow):
            self._service.cut(self._request_id, failure)
        else:
            self._service.abandon(self._request_id)

    def facts(self) -> RequestFacts | None:
        """What became of it; None if that is forgotten already."""
        try:
            return self._service.facts(self._request_id)
        except UnknownRequest:
            return None
