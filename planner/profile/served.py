"""What a server adds to the engine's steps, as its loads tell. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from twinpool.bench.serving.metrics import ttft_s
from twinpool.bench.serving.record import RequestRecord
from twinpool.planner.profile.nnls import Floats, nnls
from twinpool.planner.profile.saved import ServedSample, ServedSteps
from twinpool.planner.profile.served_loads import SINGLE_OUTPUT, Loaded, ServedRuns
from twinpool.planner.profile.spread import spread
from twinpool.planner.times.service_times import Overheads

Middle = Callable[[str, Sequence[float]], float]
"""Keeps figures under a name, and gives their median."""


@dataclass(frozen=True, slots=True)
class Served:
    """What was found, and the figures that it was found from."""

    steps: ServedSteps
    overheads: Overheads
    samples: tuple[ServedSample, ...]


def served_of(runs: ServedRuns, last_layer_s: Callable[[int], float] | None) -> Served:
    """What a server adds to the engine's steps. `last_layer_s` gives the transfer of a prompt's last layer by the
    prompt's tokens: the others' are over when the step is. None: nothing is transferred, as there is one worker. Pure.

    Every figure is a difference of times of the same moments, so that a machine that becomes slower for a while does
    not count as overhead."""
    samples: list[ServedSample] = []

    def middle(name: str, values: Sequence[float]) -> float:
        samples.append(ServedSample(name, statistics.median(values), spread(values), len(values)))
        return samples[-1].seconds

    steps, delivery_s, delivery_token_s = _beside(runs, _steps(runs, middle), middle)
    short, long = list(runs.short.run.requests), list(runs.long.run.requests)
    short_front_s = middle("before the queue, short prompt", [_front_s(record) for record in short])
    long_front_s = middle("before the queue, long prompt", [_front_s(record) for record in long])
    more_tokens = long[0].input_tokens - short[0].input_tokens
    token_s = max(0.0, long_front_s - short_front_s) / more_tokens if more_tokens > 0 else 0.0
    # From the coordinator to the worker, and the first token's way back.
    ways_s = middle("a prompt's ways to its worker and back", [_ways_s(record) for record in (*short, *long)])
    deliver_s = middle("the first token's delivery", [_stage_s(record, "deliver") for record in short])
    control_s = max(0.0, ways_s) / 2
    handoff_s = 0.0
    if last_layer_s is not None:
        beyond = [
            _beside_s(record, "transfer") - last_layer_s(record.input_tokens) for record in (*short, *long)
        ]
        handoff_s = max(0.0, middle("a hand-over beside its last layer", beyond) - control_s)
    overheads = Overheads(
        request_s=max(0.0, short_front_s - token_s * short[0].input_tokens),
        prompt_token_s=token_s,
        control_s=control_s,
        output_s=control_s + deliver_s,
        handoff_s=handoff_s,
        delivery_s=delivery_s,
        delivery_token_s=delivery_token_s,
    )
    return Served(steps, overheads, tuple(samples))


def _steps(runs: ServedRuns, middle: Middle) -> ServedSteps:
    """What each step and each stream adds, a line through the streams' numbers; and each chunk, by what steps of single
    requests lost beyond that."""
    step_s, sequence_s = _line(
        {count: middle(f"a step of {count} streams beside its own time", [_added_s(each, count)])
         for count, each in runs.streams.items()}
    )  # fmt: skip
    singles = (runs.short, runs.long)
    num_steps = sum(each.prompts.steps for each in singles)
    num_decode = 0 if runs.is_split else sum((SINGLE_OUTPUT - 1) * len(each.run.requests) for each in singles)
    lost_s = sum(each.prompts.lost_s for each in singles) - num_steps * _lost_alone_s(runs, 1)
    chunk_s = middle(
        "what else had the core in a prompt's step", [max(0.0, lost_s) / (num_steps - num_decode)]
    )
    return ServedSteps(step_s, sequence_s, chunk_s)


def _added_s(streamed: Loaded, count: int) -> float:
    """What passes from one step's end to the next one's, on average, less what such a step computes."""
    following = streamed.decode.steps - 1
    return (
        _streaming_s(streamed, count) - streamed.decode.own_s / streamed.decode.steps * following
    ) / following


def _streaming_s(loaded: Loaded, count: int) -> float:
    """From the first step of the first `count` requests, which stream, until the last one's end."""
    streams = loaded.run.requests[:count]
    first_at_s = min(record.chunks[int(_beside_s(record, "transfer") > 0)].at_s for record in streams)
    return max(record.chunks[-1].at_s for record in streams) - first_at_s


def _lost_alone_s(runs: ServedRuns, count: int) -> float:
    """What others took of a step of so many streams while nothing else was computed."""
    lost = {number: each.decode.lost_s / each.decode.steps for number, each in runs.streams.items()}
    step_s, sequence_s = _line(lost)
    return step_s + count * sequence_s


def _beside(runs: ServedRuns, steps: ServedSteps, middle: Middle) -> tuple[ServedSteps, float, float]:
    """What a step loses while the other worker computes, too: `steps` with that, and by how much each step of decode,
    and each of its streams, delays the step of prompts meanwhile."""
    if not runs.beside:
        return steps, 0.0, 0.0
    counts, prompts_s, decode_s = [], [], []
    for (count, prompt), each in runs.beside.items():
        delivered = each.decode.steps * min(1.0, each.prompts.step_s / _streaming_s(each, count))
        counts.append((each.prompts.steps, delivered, delivered * count))
        name = f"steps of {prompt} tokens beside {count} streams while others have the core"
        prompts_s.append(middle(name, [each.prompts.lost_s / each.prompts.steps]) * each.prompts.steps)
        name = f"steps of {count} streams beside prompts of {prompt} while others have the core"
        lost_s = middle(name, [each.decode.lost_s / each.decode.steps]) - _lost_alone_s(runs, count)
        decode_s.append(lost_s * each.decode.steps)
    found = np.array(counts)
    chunk_s, delivery_s, token_s = _shares(found, prompts_s)
    busy_step_s, busy_sequence_s = _shares(found[:, 1:], decode_s)
    steps = msgspec.structs.replace(
        steps,
        beside_chunk_s=max(0.0, chunk_s - steps.chunk_s - _lost_alone_s(runs, 1)),
        busy_step_s=busy_step_s,
        busy_sequence_s=busy_sequence_s,
    )
    return steps, delivery_s, token_s


def _shares(counts: Floats, seconds: Sequence[float]) -> list[float]:
    """What each of what `counts` has in its columns takes of the seconds, by least squares of relative errors. What is
    next to nothing does not count for more than a tenth of the most."""
    taken = np.maximum(np.array(seconds), 0.0)
    scale = np.maximum(taken, max(taken.max() / 10, 1e-9))
    found: list[float] = nnls(counts / scale[:, None], taken / scale).tolist()
    return found


def _line(points: dict[int, float]) -> tuple[float, float]:
    """Height and slope, neither of them negative, of a line through these."""
    if not points:
        return 0.0, 0.0
    columns = np.array([[1.0, float(count)] for count in points])
    height, slope = nnls(columns, np.array([max(0.0, value) for value in points.values()])).tolist()
    return height, slope


def _ways_s(record: RequestRecord) -> float:
    timeline = record.timeline
    assert timeline is not None, "it was joined"
    return _stage_s(record, "prefill") - (timeline.prefill_s or 0.0)


def _front_s(record: RequestRecord) -> float:
    """The client's TTFT less the stages that are not the gateway's: the ways to and fro, checks, tokenizing."""
    others_s = sum(_stage_s(record, name) for name in ("queue", "prefill", "deliver"))
    return (ttft_s(record) or 0.0) - others_s


def _stage_s(record: RequestRecord, name: str) -> float:
    assert record.timeline is not None, "it was joined"
    return sum(stage.duration_s for stage in record.timeline.stages if stage.name == name)


def _beside_s(record: RequestRecord, name: str) -> float:
    assert record.timeline is not None, "it was joined"
    return sum(stage.duration_s for stage in record.timeline.beside if stage.name == name)
