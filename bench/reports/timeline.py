"""The data behind the page's timeline: requests of each run and their spans, small enough to embed.

Times are whole numbers of 10 µs. Names are listed once and meant by their place. `timeline.js` draws it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from twinpool.bench.reports.model import ArmReport
from twinpool.bench.reports.spans import CLIENT, COORDINATOR, Span, names_in_order, spans_of
from twinpool.bench.serving.record import RequestRecord, Run

MOST_REQUESTS = 20_000
MOST_CHUNKS = 400_000
"""Of all runs together: about 12 MB and 2 MB of text."""
_MOST_TEXT = 200
_UNITS_PER_S = 100_000


def timeline_data(arms: Sequence[ArmReport]) -> dict[str, Any]:
    """What `timeline.js` reads, as JSON values. Runs beyond the bounds are left out, or are without the times of their
    tokens; `left_out` and `without_tokens` count them. The first repetition of every arm comes first in that."""
    numbered = sorted(
        ((number, arm, run) for arm in arms for number, run in enumerate(arm.runs)), key=lambda each: each[0]
    )
    names = _Names(run for _, _, run in numbered)
    requests_left, chunks_left = MOST_REQUESTS, MOST_CHUNKS
    runs: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    left_out = without_tokens = 0
    for number, arm, run in numbered:
        num_chunks = sum(len(record.chunks) for record in run.requests)
        if len(run.requests) > requests_left:
            left_out += 1
            continue
        with_tokens = num_chunks <= chunks_left
        requests_left -= len(run.requests)
        chunks_left -= num_chunks if with_tokens else 0
        without_tokens += not with_tokens
        runs[arm.name].append(
            {
                "name": f"repetition {number + 1}",
                "duration": _units(run.duration_s),
                "requests": [names.request(record, with_tokens) for record in run.requests],
            }
        )
    return {
        "units_per_s": _UNITS_PER_S,
        "arms": [{"name": name, "runs": found} for name, found in runs.items() if found],
        "stages": names.stages,
        "workers": names.workers,
        "client": CLIENT,
        "coordinator": COORDINATOR,
        "left_out": left_out,
        "without_tokens": without_tokens,
    }


class _Names:
    """Stages and workers of some runs, numbered."""

    def __init__(self, runs: Iterable[Run]) -> None:
        spans = [span for run in runs for record in run.requests for span in spans_of(record)]
        self.stages = names_in_order(spans)
        self.workers = sorted({span.worker for span in spans})
        self._stage = {name: n for n, name in enumerate(self.stages)}
        self._worker = {name: n for n, name in enumerate(self.workers)}

    def request(self, record: RequestRecord, with_tokens: bool) -> dict[str, Any]:
        """One request. `spans` are flat: stage, worker, start, duration, whether beside, for each."""
        first = record.chunks[0].at_s if record.chunks else None
        at = [_units(chunk.at_s) for chunk in record.chunks] if with_tokens else []
        return {
            "index": record.index,
            "id": record.request_id[:_MOST_TEXT],
            "group": record.group[:_MOST_TEXT],
            "ending": record.ending.value,
            "error": record.error[:_MOST_TEXT],
            "intended": _units(record.intended_at_s),
            "sent": _units(record.sent_at_s),
            "first": None if first is None else _units(first),
            "ended": _units(record.ended_at_s),
            "input": record.input_tokens,
            "output": record.output_tokens,
            "spans": [number for span in spans_of(record) for number in self._numbers(span)],
            "gaps": [later - earlier for earlier, later in pairwise(at)],
        }

    def _numbers(self, span: Span) -> tuple[int, int, int, int, int]:
        start, end = _units(span.start_s), _units(span.end_s)
        return self._stage[span.name], self._worker[span.worker], start, end - start, int(span.is_beside)


def _units(seconds: float) -> int:
    return round(seconds * _UNITS_PER_S)
