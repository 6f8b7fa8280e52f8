"""What a client has not been given yet of one choice, as one piece."""

from __future__ import annotations

from array import array
from io import StringIO

from twinpool.coordinator.gateway.answer import Piece
from twinpool.request import FinishReason, TokenLogprobs

LOGPROB_BYTES = 100
"""About what one log probability takes as Python objects."""


class Backlog:
    """Pieces in one buffer: not as thousands of little strings.

    They take about `num_bytes`, of which `num_prompt_bytes` are what the model thinks of the prompt.
    """

    def __init__(self) -> None:
        self._finish: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._num_tokens = 0
        self.num_bytes = 0
        self.num_prompt_bytes = 0
        self._text = StringIO()
        self._token_ids = array("q")
        self._text_offsets = array("q")
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def has_end(self) -> bool:
        """Whether the answer's last piece has been added."""
        return self._finish is not None

    def add(self, piece: Piece) -> None:
        """Appends the next piece."""
        self._text.write(piece.text)
        self._token_ids.extend(piece.token_ids)
        self._num_tokens, self._finish, self._stop_reason = piece.num_tokens, piece.finish, piece.stop_reason
        self.num_bytes += len(piece.text.encode()) + self._token_ids.itemsize * len(piece.token_ids)
        if piece.logprobs:
            self._logprobs += piece.logprobs
            self._text_offsets.extend(piece.text_offsets)
            self.num_bytes += _num_bytes(piece.logprobs)
        if piece.prompt_logprobs is not None:
            self._prompt_logprobs = piece.prompt_logprobs
            self.num_prompt_bytes = _num_bytes(piece.prompt_logprobs)
            self.num_bytes += self.num_prompt_bytes

    def take(self) -> Piece:
        """All of it; nothing stays."""
        piece = Piece(
            self._text.getvalue(),
            tuple(self._token_ids),
            self._num_tokens,
            self._finish,
            self._stop_reason,
            tuple(self._logprobs),
            tuple(self._text_offsets),
            self._prompt_logprobs,
        )
        self._text, self._token_ids, self._text_offsets = StringIO(), array("q"), array("q")
        self._logprobs, self._prompt_logprobs = [], None
        self.num_bytes = self.num_prompt_bytes = 0
        return piece


def _num_bytes(logprobs: tuple[TokenLogprobs, ...]) -> int:
    return LOGPROB_BYTES * sum(1 + len(entry.top) for entry in logprobs)
