"""No claim beats the data sheet: times and plans that are faster than the roofline are refused."""

from __future__ import annotations

from twinpool.errors import ConfigError
from twinpool.planner.step_shape import StepShape, of_chunk, of_sequences
from twinpool.planner.times.roofline import Roofline
from twinpool.planner.times.service_times import ServiceTimes

_PROBED_BATCHES = (1, 8, 64, 256)
_PROBED_LENGTHS = (256, 2_048, 8_192)


class AboveRoofline(ConfigError):
    """Something claims to be faster than the hardware that it is said of."""


def refuse_faster_times(times: ServiceTimes, floor: Roofline) -> None:
    """Raises AboveRoofline if `times` says of a step (a few of each kind are tried) that it takes less than it can on
    the hardware of `floor`."""
    for shape in probes():
        claimed, least = times.step_s(shape), floor.floor_s(shape)
        if claimed < least:
            raise AboveRoofline(
                f"{times.name}: a step of {_words(shape)} is said to take {1e3 * claimed:.3f} ms, and "
                f"{floor.tp} × {floor.device.title} cannot do {floor.model.name} in {floor.precision} in less than "
                f"{1e3 * least:.3f} ms (its data sheet's roofline); check --model, --gpu, --tp and --precision"
            )


def refuse_faster_plan(
    requests_per_s: float, num_accelerators: int, floor: Roofline, request: StepShape
) -> None:
    """Raises AboveRoofline if so many accelerators cannot serve `requests_per_s` requests even at the data sheet's
    rates, whatever the layout and the batch. `request` are the means of what they sum up to (`of_request`)."""
    least = floor.least_accelerator_s(request)
    if requests_per_s * least > num_accelerators:
        cached_tokens = request.prompt_context - request.prompt_tokens
        raise AboveRoofline(
            f"{requests_per_s:.3g} requests/s of {request.prompt_context:,} prompt tokens ({cached_tokens:,} cached) "
            f"and {request.num_sequences + 1:,} output tokens take {requests_per_s * least:.1f} × {floor.device.title} "
            f"at least (their data sheet's roofline, {floor.model.name} in {floor.precision}), and the plan has "
            f"{num_accelerators}; its service times cannot be those of this hardware: check --times, --model and --gpu"
        )


def probes() -> list[StepShape]:
    """Steps of one kind: sequences of all batches and lengths, chunks of all lengths."""
    steps = [of_sequences([length] * batch) for batch in _PROBED_BATCHES for length in _PROBED_LENGTHS]
    return steps + [of_chunk(length) for length in _PROBED_LENGTHS]


def _words(shape: StepShape) -> str:
    parts = []
    if shape.num_sequences:
        mean = shape.context_tokens / shape.num_sequences
        parts.append(f"{shape.num_sequences} sequences at {mean:,.0f} tokens")
    if shape.prompt_tokens:
        parts.append(f"{shape.prompt_tokens:,} prompt tokens")
    return " and ".join(parts) or "nothing"
