"""Whether two arms answered alike. They serve the same weights with the same kernels, so greedy answers should."""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.bench.reports.model import OutputCheck, OutputDifference
from twinpool.bench.serving.record import Ending, RequestRecord, Run

_SHOWN = 5
_BEFORE, _BEHIND = 40, 60
"""Characters around the place where two texts part."""


def check_outputs(baseline: str, other: str, pairs: Sequence[tuple[Run, Run]]) -> OutputCheck:
    """Compares what both arms completed, by its digest; of some that differ it shows where, if texts were kept.

    An answer that one arm cut short, be it by its own count of tokens, differs.
    """
    num_compared = num_different = 0
    shown: list[OutputDifference] = []
    for before, after in pairs:
        for one, same in zip(before.requests, after.requests, strict=True):
            if one.ending is not Ending.COMPLETED or same.ending is not Ending.COMPLETED:
                continue
            num_compared += 1
            if one.output_digest != same.output_digest:
                num_different += 1
                if len(shown) < _SHOWN:
                    shown.append(_difference(one, same))
    return OutputCheck(
        baseline=baseline,
        other=other,
        num_compared=num_compared,
        num_different=num_different,
        differences=tuple(shown),
    )


def _difference(one: RequestRecord, same: RequestRecord) -> OutputDifference:
    first, second = one.output or "", same.output or ""
    place = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    part = slice(max(0, place - _BEFORE), place + _BEHIND)
    return OutputDifference(
        index=one.index,
        first_difference=place,
        baseline_output=first[part],
        other_output=second[part],
    )
