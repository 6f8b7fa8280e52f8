"""What a request spent its time on, as spans on the run's own axis: what the timeline and the trace draw.

With a server's timeline the spans are its stages, which are durations on the server's clock: the first begins when
the request was sent, as if the way there took no time. What then lies between the last stage and the first output at
the client (the way there and back, and what neither side accounts for) is the span `network`. Without a timeline they
are what the client knows: `wait` for the first output, then `stream`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twinpool.bench.serving.record import RequestRecord

CLIENT = "client"
COORDINATOR = "coordinator"
"""Where stages that no worker has run."""


@dataclass(frozen=True, slots=True)
class Span:
    """[start_s, end_s) of a request, on `worker`. `is_beside` if it runs while tokens are delivered."""

    name: str
    start_s: float
    end_s: float
    worker: str
    is_beside: bool = False


def spans_of(record: RequestRecord) -> list[Span]:
    """In order of their start. A request without output has what its server said of it, or one `wait` to its end."""
    sent_s = record.sent_at_s
    first_s = record.chunks[0].at_s if record.chunks else None
    spans = []
    if sent_s > record.intended_at_s:
        spans.append(Span("send lag", record.intended_at_s, sent_s, CLIENT))
    if record.timeline is None:
        spans.append(Span("wait", sent_s, record.ended_at_s if first_s is None else first_s, CLIENT))
        if first_s is not None:
            spans.append(Span("stream", first_s, record.chunks[-1].at_s, CLIENT, is_beside=True))
        return spans
    last_s = sent_s
    for is_beside, stages in ((False, record.timeline.stages), (True, record.timeline.beside)):
        for stage in stages:
            start_s = sent_s + stage.start_s
            end_s = start_s + stage.duration_s
            spans.append(Span(stage.name, start_s, end_s, stage.worker or COORDINATOR, is_beside))
            if not is_beside:
                last_s = max(last_s, end_s)
    if first_s is not None and first_s > last_s:
        spans.append(Span("network", last_s, first_s, CLIENT))
    return sorted(spans, key=lambda span: (span.start_s, span.end_s))


def lanes(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """For each [start, end), which are in order of their start, the lowest lane that is free of earlier ones."""
    free_from: list[float] = []
    taken = []
    for start, end in intervals:
        lane = next((n for n, free in enumerate(free_from) if free <= start), len(free_from))
        free_from[lane : lane + 1] = [end]
        taken.append(lane)
    return taken


def names_in_order(spans: Iterable[Span]) -> list[str]:
    """Each name once, first those that a request goes through first."""
    known = (
        "send lag",
        "validate",
        "tokenize",
        "queue",
        "prefill",
        "deliver",
        "network",
        "transfer",
        "resume",
        "decode",
    )
    found = {span.name for span in spans}
    return [name for name in known if name in found] + sorted(found - set(known))
