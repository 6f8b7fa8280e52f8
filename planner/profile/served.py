"""What a server adds to the engine's steps: measured through one on 127.0.0.1, by loads that hardly load it.

The load generator runs on the same machine, as it does for `twinpool bench serve`: what it takes is part of this.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers

from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.stand import Hardware, Stand
from twinpool.bench.comparison.workloads import merged
from twinpool.bench.serving.arrivals import Pacing, Process, schedule
from twinpool.bench.serving.datasets import DatasetSettings, RandomLengths, make_requests
from twinpool.bench.serving.metrics import ttft_s
from twinpool.bench.serving.record import Ending, RequestRecord, Run
from twinpool.bench.serving.workload import PlannedRequest
from twinpool.errors import TwinpoolError
from twinpool.planner.profile.nnls import nnls
from twinpool.planner.profile.saved import ServedSample, ServedSteps
from twinpool.planner.profile.spread import spread
from twinpool.planner.step_shape import of_chunk, of_sequences
from twinpool.planner.times.service_times import Overheads, ServiceTimes

KV_TOKENS = 24_576
SHORT_PROMPT, LONG_PROMPT, SINGLE_OUTPUT = 32, 512, 3
STREAM_PROMPT, STREAM_OUTPUT, SKIPPED_GAPS = 32, 48, 8
"""Of each stream the first gaps are left out: others are still being taken in."""
BUSY_STREAMS, BUSY_PROMPT, BUSY_OUTPUT = 8, 256, 96


class OverheadsNotMeasured(TwinpoolError):
    """A server did not answer what its overheads are measured by. The message says what."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many single requests of each length, and how many streams at once."""

    singles: int
    streams: tuple[int, ...]


FULL, QUICK = Sizes(12, (1, 4, 8, 16, 32)), Sizes(5, (1, 8))


@dataclass(frozen=True, slots=True)
class ServedRuns:
    """What was sent and what came of it. `streams` by their number; `beside` are streams while prompts were computed
    on another worker, None where one worker does both."""

    short: Run
    long: Run
    streams: dict[int, Run]
    beside: Run | None


def run_loads(
    arm: Arm, common: tuple[str, ...], block_size: int, tokenizer: tokenizers.Tokenizer, max_model_len: int,
    times: ServiceTimes, sizes: Sizes, folder: Path, say: Callable[[str], None],
) -> ServedRuns:  # fmt: skip
    """Starts the arm's server with the flags in `common`, sends the loads, stops it. `times` of the engine alone say
    how far apart single requests must be so as not to meet.

    Raises:
        ServerFault, NoServer: the server does not start, or ended meanwhile.
        OverheadsNotMeasured: not all requests were completed.
    """
    long = min(LONG_PROMPT, max_model_len // 2)

    def made(prompt: int, output: int, count: int, seed: int) -> list[PlannedRequest]:
        lengths = RandomLengths(
            input_len=min(prompt, max_model_len // 2), output_len=min(output, max_model_len // 4)
        )
        return make_requests(DatasetSettings(random=lengths), tokenizer, count, seed)

    def alone(prompt: int, seed: int) -> list[PlannedRequest]:
        apart_s = 0.05 + 1.5 * times.step_s(of_chunk(prompt)) + 5 * times.step_s(of_sequences([prompt]))
        pacing = Pacing(Process.CONSTANT, 1 / apart_s)
        return schedule(made(prompt, SINGLE_OUTPUT, sizes.singles, seed), pacing, seed)

    def burst(count: int, output: int, seed: int) -> list[PlannedRequest]:
        return schedule(made(STREAM_PROMPT, output, count, seed), Pacing(Process.BURST), seed)

    with Stand(Hardware(common, KV_TOKENS, block_size), folder) as stand:

        def load(requests: Sequence[PlannedRequest], slot: str) -> Run:
            say(f"through a server ({arm.name}): {slot}")
            return _checked(stand.load(arm, requests, slot.replace(" ", "-")).run)

        load(burst(2, 4, 1), "a first load that does not count")
        short, long_run = load(alone(SHORT_PROMPT, 2), "short prompts"), load(alone(long, 3), "long prompts")
        streams = {n: load(burst(n, STREAM_OUTPUT, 10 + n), f"{n} streams") for n in sizes.streams}
        beside = None
        if arm.num_workers > 1:
            prompt_s = times.step_s(of_chunk(min(BUSY_PROMPT, long)), 1)
            lasts_s = BUSY_OUTPUT * times.step_s(of_sequences([2 * STREAM_PROMPT] * BUSY_STREAMS), 1)
            prompts = made(min(BUSY_PROMPT, long), 1, max(2, round(lasts_s / prompt_s)), 4)
            both = {
                "streams": burst(BUSY_STREAMS, BUSY_OUTPUT, 5),
                "prompts": schedule(prompts, Pacing(Process.BURST), 5),
            }
            beside = load(merged(both), "streams beside prompts")
        return ServedRuns(short, long_run, streams, beside)


def _checked(run: Run) -> Run:
    failed = [record for record in run.requests if record.ending is not Ending.COMPLETED or not record.chunks]
    if failed:
        raise OverheadsNotMeasured(
            f"{len(failed)} of {len(run.requests)} requests were not completed: "
            f"{failed[0].error or failed[0].ending.value}"
        )
    return run


@dataclass(frozen=True, slots=True)
class Served:
    """What was found, and the figures that it was found from."""

    steps: ServedSteps
    overheads: Overheads
    samples: tuple[ServedSample, ...]


def served_of(runs: ServedRuns, times: ServiceTimes, last_layer_s: Callable[[int], float] | None) -> Served:
    """What a server adds, beyond `times` of the engine alone. `last_layer_s` gives the transfer of a prompt's last
    layer by the prompt's tokens: the others' are over when the step is. None: nothing is transferred. Pure."""
    samples: list[ServedSample] = []

    def middle(name: str, values: Sequence[float]) -> float:
        samples.append(ServedSample(name, statistics.median(values), spread(values), len(values)))
        return samples[-1].seconds

    steps = _steps(runs, times, middle)
    short, long = list(runs.short.requests), list(runs.long.requests)
    short_front_s = middle("before the queue, short prompt", [_front_s(record) for record in short])
    long_front_s = middle("before the queue, long prompt", [_front_s(record) for record in long])
    more_tokens = long[0].input_tokens - short[0].input_tokens
    token_s = max(0.0, long_front_s - short_front_s) / more_tokens if more_tokens > 0 else 0.0
    # On its way a request crosses from the coordinator to the worker, and its first token back.
    around_s = middle(
        "a prompt's stage beside its step",
        [
            _stage_s(record, "queue")
            + _stage_s(record, "prefill")
            - times.step_s(of_chunk(record.input_tokens))
            for record in short
        ],
    )
    deliver_s = middle("the first token's delivery", [_stage_s(record, "deliver") for record in short])
    control_s = max(0.0, around_s - steps.step_s) / 2
    handoff_s = 0.0
    if last_layer_s is not None:
        gaps = [_first_gap_s(record, times, steps) - last_layer_s(record.input_tokens) for record in short]
        handoff_s = max(0.0, middle("a hand-over beside its last layer", gaps) - control_s)
    overheads = Overheads(
        request_s=max(0.0, short_front_s - token_s * short[0].input_tokens),
        prompt_token_s=token_s,
        control_s=control_s,
        output_s=control_s + deliver_s,
        handoff_s=handoff_s,
    )
    return Served(steps, overheads, tuple(samples))


def _steps(
    runs: ServedRuns, times: ServiceTimes, middle: Callable[[str, Sequence[float]], float]
) -> ServedSteps:
    """From one step to the next, and for each stream: the gaps between tokens beyond the engine's steps."""
    extra = [
        (count, middle(f"a step of {count} streams beyond the engine's", _gaps_beyond(run, times, count, 0)))
        for count, run in runs.streams.items()
    ]
    columns = np.array([[1.0, float(count)] for count, _ in extra])
    step_s, sequence_s = nnls(columns, np.array([max(0.0, seconds) for _, seconds in extra])).tolist()
    busy_s = 0.0
    if runs.beside is not None:
        streams = [record for record in runs.beside.requests if record.group == "streams"]
        ends_s = max(r.chunks[0].at_s for r in runs.beside.requests if r.group == "prompts")
        found = _gaps_beyond(runs.beside, times, len(streams), 1, until_s=ends_s)
        if found:
            beyond_s = middle("a step of streams beside prompts beyond the engine's", found)
            busy_s = max(0.0, beyond_s - step_s - sequence_s * len(streams)) / len(streams)
    return ServedSteps(step_s, sequence_s, busy_s)


def _gaps_beyond(
    run: Run, times: ServiceTimes, count: int, num_busy: int, until_s: float = float("inf")
) -> list[float]:
    """Each gap of the streams while all of them run, less the engine's step then."""
    streams = [record for record in run.requests if record.output_tokens > 1]
    from_s = max(record.chunks[0].at_s for record in streams)
    to_s = min(until_s, *(record.chunks[-1].at_s for record in streams))
    found = []
    for record in streams:
        length = record.input_tokens
        for number, (chunk, following) in enumerate(itertools.pairwise(record.chunks)):
            length += chunk.num_tokens
            is_within = number >= SKIPPED_GAPS and from_s <= chunk.at_s and following.at_s <= to_s
            if is_within and following.num_tokens == 1:
                step_s = times.step_s(of_sequences([length] * count), num_busy)
                found.append(following.at_s - chunk.at_s - step_s)
    return found


def _first_gap_s(record: RequestRecord, times: ServiceTimes, steps: ServedSteps) -> float:
    """Between the first two tokens, less the step in it."""
    step_s = times.step_s(of_sequences([record.input_tokens + 1])) + steps.step_s + steps.sequence_s
    return record.chunks[1].at_s - record.chunks[0].at_s - step_s


def _front_s(record: RequestRecord) -> float:
    """The client's TTFT less the stages that are not the gateway's: the ways to and fro, checks, tokenizing."""
    others_s = sum(_stage_s(record, name) for name in ("queue", "prefill", "deliver"))
    return (ttft_s(record) or 0.0) - others_s


def _stage_s(record: RequestRecord, name: str) -> float:
    assert record.timeline is not None, "it was joined"
    return sum(stage.duration_s for stage in record.timeline.stages if stage.name == name)
