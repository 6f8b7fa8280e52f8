"""One request's events as CSV: reads them, and refuses what cannot have happened.

    event,time_ms,tokens
    sent,0
    first_token,190
    token,215
    end,215
    declared_tpot_ms,25

The column of times is `time_s` or `time_ms`; `tokens` (how many came at once, 1 if empty) may be left out; lines that
are empty or begin with # are passed over. A row `declared_…` states a metric, in the unit of its own name, that must be
what the events give, rounded to as many decimals as it has.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from twinpool.bench.serving.record import Chunk, Ending, RequestRecord, Stage, TokenCount
from twinpool.errors import ConfigError

_MOST_TOKENS = 1_000_000
_SECONDS = {"time_s": 1.0, "time_ms": 1e-3}
DECLARED = "declared_"
"""Begins the names of rows that state a metric."""


class Event(StrEnum):
    """What can happen to a request, in the order in which it can."""

    INTENDED = "intended"
    SENT = "sent"
    RECEIVED = "received"
    TOKENIZED = "tokenized"
    QUEUED = "queued"
    PREFILL_START = "prefill_start"
    PREFILL_END = "prefill_end"
    TRANSFER_START = "transfer_start"
    TRANSFER_END = "transfer_end"
    DECODE_START = "decode_start"
    FIRST_TOKEN = "first_token"
    TOKEN = "token"
    END = "end"
    REJECTED = "rejected"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


_OUTPUT = {Event.FIRST_TOKEN, Event.TOKEN}
_BEGINNINGS = {Event.INTENDED, Event.SENT, Event.RECEIVED}
_ENDINGS = {
    Event.END: Ending.COMPLETED, Event.REJECTED: Ending.REJECTED, Event.FAILED: Ending.FAILED,
    Event.TIMED_OUT: Ending.TIMED_OUT, Event.CANCELLED: Ending.CANCELLED,
}  # fmt: skip
_NEEDS = {
    Event.PREFILL_END: Event.PREFILL_START,
    Event.TRANSFER_END: Event.TRANSFER_START,
}
"""What must have come before."""
_TOO_LATE_AFTER = {
    Event.INTENDED: frozenset(Event),
    Event.SENT: frozenset(Event) - {Event.INTENDED},
    **dict.fromkeys(
        (Event.RECEIVED, Event.TOKENIZED, Event.QUEUED, Event.PREFILL_START, Event.PREFILL_END),
        frozenset(_OUTPUT),
    ),
    Event.FIRST_TOKEN: frozenset({Event.TOKEN}),
}
"""What cannot have come before. Transfer and decode may begin before prefill ends: KV leaves layer by layer."""


@dataclass(frozen=True, slots=True)
class EventRow:
    """One event, in seconds; `line` of the file tells it in errors."""

    line: int
    event: Event
    at_s: float
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Declared:
    """A metric that the file states, as it is written there."""

    line: int
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class RequestEvents:
    """A request's events in order, and what is declared of it."""

    rows: tuple[EventRow, ...]
    declared: tuple[Declared, ...]

    def at_s(self, event: Event) -> float | None:
        """When it happened (first); None if it did not."""
        return next((row.at_s for row in self.rows if row.event is event), None)


def parse_events(text: str) -> RequestEvents:
    """Reads a file and checks that it could have happened. Raises ConfigError naming the line."""
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    table = [(number, [cell.strip() for cell in next(csv.reader([line]))]) for number, line in lines]
    if not table:
        raise ConfigError("the file has no lines; its first is to be event,time_ms,tokens")
    scale, (_, header), *body = _scale(*table[0]), *table
    rows: list[EventRow] = []
    declared: list[Declared] = []
    for number, cells in body:
        if not 2 <= len(cells) <= len(header):
            raise ConfigError(f"line {number} has {len(cells)} cells; it is to have {','.join(header)}")
        name, value, tokens = (*cells, "")[:3]
        if name.startswith(DECLARED):
            if tokens:
                raise ConfigError(
                    f"line {number} has {tokens!r} behind {value!r}; a declared number has no commas"
                )
            declared.append(Declared(number, name.removeprefix(DECLARED), value))
        else:
            event = _event(number, name)
            rows.append(
                EventRow(number, event, scale * number_in(number, value), _tokens(number, event, tokens))
            )
    _check(rows)
    return RequestEvents(tuple(rows), tuple(declared))


def record_of(events: RequestEvents) -> RequestRecord:
    """The events as a client's record: sent is when it was received, if only the server's side is known."""
    rows = events.rows
    sent = events.at_s(Event.SENT)
    start = sent if sent is not None else events.at_s(Event.RECEIVED)
    assert start is not None, "checked when it was read"
    intended = events.at_s(Event.INTENDED)
    chunks = tuple(Chunk(row.at_s, row.num_tokens) for row in rows if row.event in _OUTPUT)
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    return RequestRecord(
        index=0, request_id="", group="", intended_at_s=start if intended is None else intended, sent_at_s=start,
        ended_at_s=rows[-1].at_s, ending=_ENDINGS[rows[-1].event], input_tokens=0, wanted_output_tokens=num_tokens,
        output_tokens=num_tokens, chunks=chunks, token_count=TokenCount.IDS,
    )  # fmt: skip


def stages_of(events: RequestEvents) -> tuple[Stage, ...]:
    """From each event to the next until the first output, named by both: they sum to the TTFT."""
    steps = []
    for row in events.rows:
        if row.event is not Event.INTENDED:
            steps.append(row)
        if row.event in _OUTPUT:
            return tuple(
                Stage(f"{here.event} → {there.event}", here.at_s - steps[0].at_s, there.at_s - here.at_s)
                for here, there in pairwise(steps)
            )
    return ()


def _scale(number: int, header: Sequence[str]) -> float:
    """Seconds per unit of the times."""
    is_known = 2 <= len(header) <= 3 and header[0] == "event" and header[1] in _SECONDS
    if not is_known or header[2:] not in ([], ["tokens"]):
        raise ConfigError(
            f"line {number} is {','.join(header)!r}; it is to name the columns: "
            "event,time_ms or event,time_s, and tokens if any"
        )
    return _SECONDS[header[1]]


def _event(number: int, name: str) -> Event:
    try:
        return Event(name)
    except ValueError:
        known = ", ".join(Event)
        raise ConfigError(f"line {number} has the event {name!r}; known are {known}") from None


def number_in(line: int, text: str) -> float:
    """The number that a cell holds. Raises ConfigError naming the line."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"line {line} has {text!r} where a number is to be")
    return value


def _tokens(number: int, event: Event, text: str) -> int:
    """How many tokens came with an event: of output 1 unless it says otherwise, of others 0."""
    if event not in _OUTPUT:
        if text:
            raise ConfigError(
                f"line {number} gives {text} tokens to {event}; only first_token and token have some"
            )
        return 0
    if not text:
        return 1
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(_MOST_TOKENS))
    if not is_number or not 1 <= int(text) <= _MOST_TOKENS:
        raise ConfigError(
            f"line {number} has {text!r} tokens; allowed is a whole number, 1 to {_MOST_TOKENS:,}"
        )
    return int(text)


def _check(rows: Sequence[EventRow]) -> None:
    """Raises ConfigError for the first row that cannot follow those before it, or for an end that is missing."""
    seen: dict[Event, EventRow] = {}
    last: EventRow | None = None
    for row in rows:
        _check_row(row, seen, last)
        seen.setdefault(row.event, row)
        last = row
    if last is None:
        raise ConfigError("the file has no events; it is to begin with sent or received")
    if last.event not in _ENDINGS:
        raise ConfigError(
            f"the last event is {last.event} (line {last.line}), so how the request ended is missing; "
            f"add a row with one of {', '.join(_ENDINGS)}"
        )


def _check_row(row: EventRow, seen: Mapping[Event, EventRow], last: EventRow | None) -> None:
    where = f"line {row.line}: {row.event}"
    if last is not None and last.event in _ENDINGS:
        raise ConfigError(f"{where} comes after the request had ended (line {last.line}: {last.event})")
    if row.event not in _BEGINNINGS and not seen.keys() & _BEGINNINGS - {Event.INTENDED}:
        raise ConfigError(f"{where} comes before the request was sent; put sent or received first")
    if last is not None and row.at_s < last.at_s:
        raise ConfigError(
            f"{where} is at {row.at_s:g} s, before line {last.line} ({last.event}) at {last.at_s:g} s; "
            "time goes back, order the rows by one clock"
        )
    if row.event in seen and row.event is not Event.TOKEN:
        raise ConfigError(f"{where} is there already (line {seen[row.event].line}); it can happen once")
    if (needed := _NEEDS.get(row.event)) is not None and needed not in seen:
        raise ConfigError(f"{where} comes without {needed}")
    if row.event in _OUTPUT and Event.PREFILL_START in seen and Event.PREFILL_END not in seen:
        raise ConfigError(f"{where} comes before prefill_end; prefill gives the first token")
    if late := _TOO_LATE_AFTER.get(row.event, frozenset()) & seen.keys():
        other = seen[min(late, key=lambda event: seen[event].line)]
        raise ConfigError(f"{where} comes after {other.event} (line {other.line}), which can only follow it")
