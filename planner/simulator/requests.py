"""What a simulation sends: requests as lengths, at times of an arrival process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from twinpool.bench.serving.arrivals import Pacing, schedule
from twinpool.bench.serving.datasets.shapes import Shape, own
from twinpool.bench.serving.workload import PlannedRequest


def at_times(shapes: Sequence[Shape], pacing: Pacing, seed: int) -> list[Shape]:
    """The requests at the times that `twinpool bench` would send them at, with the same seed. Raises ConfigError as
    `schedule`."""
    planned = [
        PlannedRequest(
            index=index,
            prompt=(),
            input_tokens=shape.input_tokens,
            output_tokens=shape.output_tokens,
            at_s=shape.at_s,
        )
        for index, shape in enumerate(shapes)
    ]
    return [replace(shapes[request.index], at_s=request.at_s) for request in schedule(planned, pacing, seed)]


def shapes_of(requests: Iterable[PlannedRequest]) -> list[Shape]:
    """The lengths of requests that have prompts: nothing is known of what those share."""
    return [
        Shape(
            (own(number, max(1, request.input_tokens)),),
            max(1, request.output_tokens),
            request.at_s,
            request.group,
        )
        for number, request in enumerate(requests)
    ]
