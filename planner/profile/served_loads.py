"""The loads by which a server's overheads are measured: through a real one on 127.0.0.1, which they hardly load.

The load generator runs on the same machine, as it does for `twinpool bench serve`: what it takes is part of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import tokenizers

from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.stand import Stand
from twinpool.bench.serving.arrivals import Pacing, Process, schedule
from twinpool.bench.serving.datasets import DatasetSettings, PromptAs, RandomLengths, make_requests
from twinpool.bench.serving.record import Ending, Run
from twinpool.bench.serving.workload import PlannedRequest
from twinpool.config import Role
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.planner.step_shape import of_chunk, of_sequences
from twinpool.planner.times.service_times import ServiceTimes

KV_TOKENS = 24_576
SHORT_PROMPT, LONG_PROMPT, SINGLE_OUTPUT = 32, 512, 3
BESIDE_OUTPUT = 2
STREAM_PROMPT, STREAM_OUTPUT = 8, 64
"""Of streams: prompts so short that the steps that compute them hardly differ from the others."""


class OverheadsNotMeasured(TwinpoolError):
    """A server did not answer what its overheads are measured by. The message says what."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many single requests of each length, how many streams at once, and beside how many streams prompts of which
    length come."""

    singles: int
    streams: tuple[int, ...]
    beside: tuple[tuple[int, int], ...] = ((1, 128), (8, 512), (1, 512), (8, 128))


FULL, QUICK = Sizes(10, (1, 8, 32)), Sizes(5, (1, 8))


@dataclass(frozen=True, slots=True)
class RanSteps:
    """So many steps of a worker took `step_s` together, by its own clock, and computed for `own_s` of that: the rest
    of the time others had the core. On a GPU nobody else has it."""

    steps: float
    step_s: float
    own_s: float

    @property
    def lost_s(self) -> float:
        """What others took."""
        return max(0.0, self.step_s - self.own_s)


@dataclass(frozen=True, slots=True)
class Loaded:
    """One load: the steps of the worker that computes prompts, and of the one that decodes; they may be one."""

    run: Run
    prompts: RanSteps
    decode: RanSteps


@dataclass(frozen=True, slots=True)
class ServedRuns:
    """What was sent and what came of it. `streams`, each of which began together, are by their number. Prompts that
    came one after the other `beside` streams, which have a worker of their own then, are by the streams' number and
    their own length."""

    short: Loaded
    long: Loaded
    streams: dict[int, Loaded]
    beside: dict[tuple[int, int], Loaded]

    @property
    def is_split(self) -> bool:
        """Whether prompts and streams have workers of their own."""
        return self.short.prompts is not self.short.decode


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
    engine alone say, streams that begin together, and prompts beside streams. No sequence is longer than three quarters
    of `max_model_len`."""

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
        apart_s = 0.05 + 1.5 * self._prompt_s(prompt) + 5 * self._times.step_s(of_sequences([prompt]))
        made = self._made(prompt, SINGLE_OUTPUT, self.sizes.singles, seed)
        return schedule(made, Pacing(Process.CONSTANT, 1 / apart_s), seed)

    def streams(self, count: int, output: int, seed: int) -> list[PlannedRequest]:
        """So many at once, each with `output` tokens."""
        return schedule(self._made(STREAM_PROMPT, output, count, seed), Pacing(Process.BURST), seed)

    def beside(self, count: int, prompt: int, seed: int) -> list[PlannedRequest]:
        """First `count` streams; then prompts, which come one after the other while these last, each with `prompt`
        tokens and a short answer."""
        prompt = min(prompt, self._most_prompt)
        apart_s = 1.3 * self._prompt_s(prompt)
        token_s = self._times.step_s(of_sequences([STREAM_PROMPT] * count))
        output = min(self._most_output, math.ceil(2 * self.sizes.singles * apart_s / token_s))
        streams = self.streams(count, output, seed)
        num_prompts = max(1, int(output * token_s / apart_s))
        prompts = self._made(prompt, BESIDE_OUTPUT, num_prompts, seed + 1)
        return streams + [
            msgspec.structs.replace(each, index=count + number, at_s=(number + 0.5) * apart_s)
            for number, each in enumerate(prompts)
        ]

    def _prompt_s(self, prompt: int) -> float:
        return self._times.step_s(of_chunk(prompt))

    def _made(self, prompt: int, output: int, count: int, seed: int) -> list[PlannedRequest]:
        lengths = RandomLengths(
            input_len=min(prompt, self._most_prompt), output_len=min(output, self._most_output)
        )
        settings = DatasetSettings(random=lengths, prompt_as=self._prompt_as)
        return make_requests(settings, self._tokenizer, count, seed)


def run_loads(
    stand: Stand, arm: Arm, loads: OverheadLoads, say: Callable[[str], None], *, on_gpu: bool
) -> ServedRuns:
    """Starts the arm's server on `stand`, and sends it the loads one after the other; `say` is told which.

    Raises:
        ServerFault, NoServer: the server does not start, or ended meanwhile.
        OverheadsNotMeasured: not all requests were completed.
    """

    def load(requests: Sequence[PlannedRequest], name: str) -> Loaded:
        say(f"through a server ({arm.name}): {name}")
        return _load(stand, arm, requests, name.replace(" ", "-"), on_gpu=on_gpu)

    sizes = loads.sizes
    load(loads.streams(2, 4, 1), "a first load that does not count")
    return ServedRuns(
        short=load(loads.singles(SHORT_PROMPT, 2), "short prompts"),
        long=load(loads.singles(LONG_PROMPT, 3), "long prompts"),
        streams={
            count: load(loads.streams(count, STREAM_OUTPUT, 10 + count), f"{count} streams")
            for count in sizes.streams
        },
        beside={
            (count, prompt): load(
                loads.beside(count, prompt, 50 + count + prompt),
                f"prompts of {prompt} beside {count} streams",
            )
            for count, prompt in (sizes.beside if arm.num_workers > 1 else ())
        },
    )


def _load(stand: Stand, arm: Arm, requests: Sequence[PlannedRequest], slot: str, *, on_gpu: bool) -> Loaded:
    before = stand.counts(arm)
    run = _checked(stand.load(arm, requests, slot).run)
    after = stand.counts(arm)

    def ran(role: Role) -> RanSteps:
        steps, step_s, cpu_s = (
            after.total(name, role=role.value) - before.total(name, role=role.value)
            for name in ("steps_total", "step_seconds_total", "step_cpu_seconds_total")
        )
        return RanSteps(steps, step_s, step_s if on_gpu else cpu_s)

    if arm.num_workers > 1:
        return Loaded(run, ran(Role.PREFILL), ran(Role.DECODE))
    both = ran(Role.COLOCATED)
    return Loaded(run, both, both)


def _checked(run: Run) -> Run:
    failed = [record for record in run.requests if record.ending is not Ending.COMPLETED or not record.chunks]
    if failed:
        raise OverheadsNotMeasured(
            f"{len(failed)} of {len(run.requests)} requests were not completed: "
            f"{failed[0].error or failed[0].ending.value}; `twinpool serve` with the same model and flags shows why"
        )
    return run
