"""What one request's client sees of its stream, piece by piece, and how it ended."""

from __future__ import annotations

import msgspec

from twinpool.bench.events import DONE, Choice, ErrorBody, Event, EventSplitter, Usage, decode_event
from twinpool.bench.http1 import Answer
from twinpool.bench.serving.record import Ending

_JSON = ord("{")
_FAILED_REASONS = frozenset({"abort", "error", "cancelled", "timeout"})
"""Finish reasons of answers that are none; where a server says so in an ordinary chunk."""
_TIMEOUT_CODES = frozenset({"deadline_exceeded", "timeout", "request_timeout"})
_TIMEOUT_STATUSES = frozenset({408, 504})
_LOST_STATUSES = frozenset({500, 502})
_CANCELLED_STATUS = 499


class StreamedAnswer(Answer):
    """Collects the stream of one request. While a load runs only this is done; the rest comes after it.

    Output i arrived at `times[i]` with `texts[i]`, and with `id_counts[i]` token ids (None: it had none);
    `usage_counts[i]` is the number of tokens so far by the usage in its chunk (None: it had none).
    """

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.texts: list[str] = []
        self.id_counts: list[int | None] = []
        self.usage_counts: list[int | None] = []
        self.token_ids: list[int] = []
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.error = ""
        self.error_code = ""
        self.last_at = 0.0
        """When the last bytes came."""
        self._events = EventSplitter()
        self._refusal = b""

    def take(self, data: bytes, at: float) -> None:
        self.last_at = at
        if self.status != 200:
            self._refusal += data
            return
        for data_of_event in self._events.feed(data):
            if data_of_event[0] == _JSON:
                try:
                    event = decode_event(data_of_event)
                except msgspec.MsgspecError:
                    self.error = self.error or f"malformed event: {data_of_event[:200]!r}"
                else:
                    self._take_event(event, at)
            elif data_of_event != DONE:
                self.error = self.error or f"malformed event: {data_of_event[:200]!r}"

    def _take_event(self, event: Event, at: float) -> None:
        usage = event.usage
        if usage is not None:
            self.usage = usage
        if event.error is not None:
            self._take_error(event.error)
        for choice in event.choices or ():
            self._take_choice(choice, usage, at)

    def _take_choice(self, choice: Choice, usage: Usage | None, at: float) -> None:
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
        text, token_ids = choice.output, choice.token_ids
        if not (text or token_ids):
            return
        self.times.append(at)
        self.texts.append(text)
        self.usage_counts.append(None if usage is None else usage.completion_tokens)
        if token_ids is None:
            self.id_counts.append(None)
        else:
            self.id_counts.append(len(token_ids))
            self.token_ids += token_ids

    def _take_error(self, error: ErrorBody | str) -> None:
        if isinstance(error, str):
            self.error = error
        else:
            self.error, self.error_code = error.message or "an error without words", str(error.code or "")

    def read_refusal(self) -> None:
        """Reads why the request was refused, once its answer is over."""
        if self.status in (0, 200) or self.error:
            return
        try:
            event = decode_event(self._refusal)
        except msgspec.MsgspecError:
            event = Event()
        if event.error is not None:
            self._take_error(event.error)
        else:
            self.error = self._refusal[:200].decode(errors="replace") or f"status {self.status}"

    @property
    def retry_after_s(self) -> float | None:
        """When a refused client may come back."""
        try:
            return float(self.headers["retry-after"])
        except (KeyError, ValueError):
            return None

    def ending(self) -> tuple[Ending, str]:
        """How it ended by what came, and in a failure's words why. Not for those that were cut by the client."""
        if self.status == 0:
            return Ending.FAILED, self.error or "the connection ended without an answer"
        if self.status != 200:
            self.read_refusal()
            return self._refused(), self.error
        if self.error:
            if self.error_code == "cancelled":
                return Ending.CANCELLED, self.error
            is_late = self.error_code in _TIMEOUT_CODES
            return (Ending.TIMED_OUT if is_late else Ending.FAILED), self.error
        if not self.is_whole:
            return Ending.FAILED, "the stream broke off"
        if self.finish_reason is None:
            return Ending.FAILED, "the stream ended without a finish reason"
        if self.finish_reason in _FAILED_REASONS:
            return Ending.FAILED, f"the server gave up: {self.finish_reason}"
        return Ending.COMPLETED, ""

    def _refused(self) -> Ending:
        if self.status in _TIMEOUT_STATUSES:
            return Ending.TIMED_OUT
        if self.status == _CANCELLED_STATUS:
            return Ending.CANCELLED
        return Ending.FAILED if self.status in _LOST_STATUSES else Ending.REJECTED
