"""What a server adds to the engine's steps: measured through one on 127.0.0.1, by loads that hardly load it.

The load generator runs on the same machine, as it does for `twinpool bench serve`: what it takes is part of this.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers

from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.stand import Stand
from twinpool.bench.serving.arrivals import Pacing, Process, schedule
from twinpool.bench.serving.datasets import DatasetSettings, PromptAs, RandomLengths, make_requests
from twinpool.bench.serving.metrics import ttft_s
from twinpool.bench.serving.record import Ending, RequestRecord, Run
from twinpool.bench.serving.workload import PlannedRequest
from twinpool.config import Role
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.planner.profile.nnls import nnls
from twinpool.planner.profile.saved import ServedSample, ServedSteps
from twinpool.planner.profile.spread import spread
from twinpool.planner.step_shape import of_chunk, of_sequences
from twinpool.planner.times.service_times import Overheads, ServiceTimes

KV_TOKENS = 24_576
SHORT_PROMPT, LONG_PROMPT, SINGLE_OUTPUT = 32, 512, 3
STREAM_PROMPT, STREAM_OUTPUT = 8, 64
"""Of streams: prompts so short that the steps that compute them hardly differ from the others."""


class OverheadsNotMeasured(TwinpoolError):
    """A server did not answer what its overheads are measured by. The message says what."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many single requests of each length, and how many streams at once."""

    singles: int
    streams: tuple[int, ...]


FULL, QUICK = Sizes(10, (1, 8, 32)), Sizes(5, (1, 8))


@dataclass(frozen=True, slots=True)
class Loaded:
    """One load: `steps` of the worker that decodes took `step_s` together, by its own clock; `others_cpu_s` of CPU were
    used meanwhile by all but the workers."""

    run: Run
    steps: float
    step_s: float
    others_cpu_s: float


@dataclass(frozen=True, slots=True)
class ServedRuns:
    """What was sent and what came of it. `streams`, each of which began together, are by their number."""

    short: Loaded
    long: Loaded
    streams: dict[int, Loaded]


def prompts_as(tokenizer: tokenizers.Tokenizer) -> PromptAs:
    """How prompts of exact lengths can be sent: as text, as clients do, or as ids where the tokenizer joins words."""
    lengths = DatasetSettings(random=RandomLengths(input_len=LONG_PROMPT, output_len=1))
    try:
        make_requests(lengths, tokenizer, 4, 0)
    except ConfigError:
        return PromptAs.IDS
    return PromptAs.TEXT


class OverheadLoads:
    """The requests that overheads are measured by: single ones, so far apart that no two meet, which `times` of the
    engine alone say, and streams that begin together. No sequence is longer than three quarters of `max_model_len`."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, max_model_len: int, times: ServiceTimes, sizes: Sizes
    ) -> None:
        self.sizes = sizes
        self._tokenizer = tokenizer
        self._prompt_as = prompts_as(tokenizer)
        self._most_prompt, self._most_output = max_model_len // 2, max_model_len // 4
        self._times = times

    def singles(self, prompt: int, seed: int) -> list[PlannedRequest]:
        """One after the other, each with `prompt` tokens."""
        prompt = min(prompt, self._most_prompt)
        prompt_s, token_s = self._times.step_s(of_chunk(prompt)), self._times.step_s(of_sequences([prompt]))
        pacing = Pacing(Process.CONSTANT, 1 / (0.05 + 1.5 * prompt_s + 5 * token_s))
        return schedule(self._made(prompt, SINGLE_OUTPUT, self.sizes.singles, seed), pacing, seed)

    def streams(self, count: int, output: int, seed: int) -> list[PlannedRequest]:
        """So many at once, each with `output` tokens."""
        return schedule(self._made(STREAM_PROMPT, output, count, seed), Pacing(Process.BURST), seed)

    def _made(self, prompt: int, output: int, count: int, seed: int) -> list[PlannedRequest]:
        lengths = RandomLengths(
            input_len=min(prompt, self._most_prompt), output_len=min(output, self._most_output)
        )
        settings = DatasetSettings(random=lengths, prompt_as=self._prompt_as)
        return make_requests(settings, self._tokenizer, count, seed)


def run_loads(stand: Stand, arm: Arm, loads: OverheadLoads, say: Callable[[str], None]) -> ServedRuns:
    """Starts the arm's server on `stand`, and sends it the loads one after the other; `say` is told which.

    Raises:
        ServerFault, NoServer: the server does not start, or ended meanwhile.
        OverheadsNotMeasured: not all requests were completed.
    """

    def load(requests: Sequence[PlannedRequest], name: str) -> Loaded:
        say(f"through a server ({arm.name}): {name}")
        return _load(stand, arm, requests, name.replace(" ", "-"))

    load(loads.streams(2, 4, 1), "a first load that does not count")
    return ServedRuns(
        short=load(loads.singles(SHORT_PROMPT, 2), "short prompts"),
        long=load(loads.singles(LONG_PROMPT, 3), "long prompts"),
        streams={
            count: load(loads.streams(count, STREAM_OUTPUT, 10 + count), f"{count} streams")
            for count in loads.sizes.streams
        },
    )


def _load(stand: Stand, arm: Arm, requests: Sequence[PlannedRequest], slot: str) -> Loaded:
    decoding = (Role.DECODE if arm.num_workers > 1 else Role.COLOCATED).value
    before, before_s = stand.counts(arm), stand.coordinator_cpu_s(arm)
    run = _checked(stand.load(arm, requests, slot).run)
    coordinator_s = stand.coordinator_cpu_s(arm) - before_s
    senders_s = sum(sender.cpu_share for sender in run.senders) * run.duration_s
    after = stand.counts(arm)
    steps, step_s = (
        after.total(name, role=decoding) - before.total(name, role=decoding)
        for name in ("steps_total", "step_seconds_total")
    )
    return Loaded(run, steps, step_s, coordinator_s + senders_s)


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


def served_of(runs: ServedRuns, last_layer_s: Callable[[int], float] | None, *, shares_cores: bool) -> Served:
    """What a server adds to the engine's steps. `last_layer_s` gives the transfer of a prompt's last layer by the
    prompt's tokens: the others' are over when the step is. None: nothing is transferred. `shares_cores`: the worker's
    threads are on all cores, so that whatever else is done delays them. Pure.

    Every figure is a difference of times of the same moments, so that a machine that becomes slower for a while does
    not count as overhead."""
    samples: list[ServedSample] = []

    def middle(name: str, values: Sequence[float]) -> float:
        samples.append(ServedSample(name, statistics.median(values), spread(values), len(values)))
        return samples[-1].seconds

    steps = _steps(runs, middle, shares_cores=shares_cores)
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
    )
    return Served(steps, overheads, tuple(samples))


def _steps(
    runs: ServedRuns, middle: Callable[[str, Sequence[float]], float], *, shares_cores: bool
) -> ServedSteps:
    """From one step to the next and for each stream, as a line through the streams' numbers; and what delivering a
    step's tokens takes of the cores."""
    between = {
        count: middle(f"between two steps of {count} streams", [_between_s(each)])
        for count, each in runs.streams.items()
    }
    columns = np.array([[1.0, float(count)] for count in between])
    step_s, sequence_s = nnls(columns, np.array([max(0.0, seconds) for seconds in between.values()])).tolist()
    step_cpu_s, token_cpu_s = _delivery_cpu_s(runs)
    middle("CPU of coordinator and load generator for a step", [step_cpu_s])
    middle("CPU of coordinator and load generator for a token", [token_cpu_s])
    if shares_cores:
        return ServedSteps(step_s + step_cpu_s, sequence_s + token_cpu_s)
    # While a neighbour computes, too, half of that work falls to each of the two.
    return ServedSteps(step_s, sequence_s, step_cpu_s / 2, token_cpu_s / 2)


def _delivery_cpu_s(runs: ServedRuns) -> tuple[float, float]:
    """What a step's message takes of the cores and what each token in it takes more, apart from what requests take: all
    loads' CPU as a sum of the three. Each load counts by its relative error."""
    loads = [each for each in (runs.short, runs.long, *runs.streams.values()) if each.others_cpu_s > 0]
    if not loads:
        return 0.0, 0.0
    counts = [
        (len(each.run.requests), each.steps, sum(record.output_tokens for record in each.run.requests))
        for each in loads
    ]
    seconds = np.array([each.others_cpu_s for each in loads])
    _, step_s, token_s = nnls(np.array(counts, float) / seconds[:, None], np.ones(len(loads))).tolist()
    return step_s, token_s


def _between_s(streamed: Loaded) -> float:
    """What passes from one step to the next on average: the time from the first step's end to the last one's, less what
    as many steps took."""
    records = streamed.run.requests
    is_split = any(_beside_s(record, "transfer") for record in records)
    first_at_s = min(record.chunks[int(is_split)].at_s for record in records)
    last_at_s = max(record.chunks[-1].at_s for record in records)
    following = streamed.steps - 1
    return (last_at_s - first_at_s - streamed.step_s / streamed.steps * following) / following


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
