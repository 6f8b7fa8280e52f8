"""The loads that predictions are tried on: four kinds of traffic, two rates each, sized to the machine.

They are fixed before anything is served: lengths, times and objectives are functions of a first look at the machine's
speed and a seed. A load is made once as shapes, which the simulator takes; the prompts that servers get are made of the
same shapes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import tokenizers

from twinpool.bench.arrivals import gamma_gap, offsets, poisson_gap
from twinpool.bench.serving.datasets import LognormalLengths, PrefixRepetition, PromptAs, RandomLengths
from twinpool.bench.serving.datasets.generated import lognormal_shapes, prefix_shapes, random_shapes
from twinpool.bench.serving.datasets.shapes import Piece, Shape
from twinpool.bench.serving.datasets.text import Synthesizer
from twinpool.bench.serving.distributions import percentile
from twinpool.bench.serving.slo import Slo
from twinpool.bench.serving.workload import PlannedRequest
from twinpool.planner.accuracy.folder import Facts
from twinpool.planner.step_shape import of_chunk, of_sequences
from twinpool.planner.times.service_times import ServiceTimes

SHARES = {"low": 0.3, "high": 0.45}
"""The two rates: of what the busier of one prefill and one decode worker can do. Both are below the knee, also
while everything takes 1.5 times as long: a wait's relative error is 2 + u / (1 − u) times that of service times (M/D/1;
u is the share of capacity), which is 2.8 at the higher rate and 11 at 90 %."""
NUM_STREAMS, STREAM_LENGTH = 8, 256
"""Decode is counted at so many streams of such a length."""
BURSTINESS = 0.2
LONG_SHARE = 0.12
"""Of the requests of "long prompt": each takes as long as several others together."""
LOOSE_TTFT, LOOSE_TPOT = 3.0, 2.0
"""An objective is so many times what is undisturbed: TTFT of the longest tenth of the prompts, a step of some streams.
"""


@dataclass(frozen=True, slots=True)
class Yardstick:
    """Seconds of a prefill worker for a token of a prompt, and of a decode worker for one of `NUM_STREAMS` tokens."""

    prompt_token_s: float
    stream_token_s: float

    @classmethod
    def of(cls, times: ServiceTimes) -> Yardstick:
        """Of a worker with these times."""
        prompt_s = times.step_s(of_chunk(STREAM_LENGTH)) / STREAM_LENGTH
        return cls(prompt_s, times.step_s(of_sequences([STREAM_LENGTH] * NUM_STREAMS)) / NUM_STREAMS)


@dataclass(frozen=True, slots=True)
class TimedLoad:
    """One workload at one rate. `shapes` have their times and come in their order."""

    workload: str
    rate: str
    rate_per_s: float
    shapes: tuple[Shape, ...]
    slo: Slo

    @property
    def name(self) -> str:
        """Of files and rows."""
        return f"{self.workload}, {self.rate}"


def chat(count: int, seed: int) -> list[Shape]:
    """Log-normal lengths."""
    lengths = LognormalLengths(
        input_median=150, input_sigma=0.6, input_most=600, output_median=40, output_sigma=0.5, output_most=120
    )
    return lognormal_shapes(lengths, count, seed)


def long_prompt(count: int, seed: int) -> list[Shape]:
    """Chat, and now and then a prompt of 1,024 tokens with a short answer."""
    shapes, rng = chat(count, seed), random.Random(seed)
    num_long = max(1, round(LONG_SHARE * count))
    places = set(rng.sample(range(count), num_long))
    longs = iter(random_shapes(RandomLengths(input_len=1024, output_len=16), num_long, seed + 1))
    first = 1_000_000  # own pieces are told apart by their number
    made = []
    for index, shape in enumerate(shapes):
        if index in places:
            shape = next(longs)
            own = tuple(Piece((*piece.key[:-1], first + index), piece.num_tokens) for piece in shape.pieces)
            shape = replace(shape, pieces=own)
        made.append(shape)
    return made


def shared_prefix(count: int, seed: int) -> list[Shape]:
    """Three prefixes of 384 tokens, each with many suffixes."""
    settings = PrefixRepetition(prefix_len=384, suffix_len=96, num_prefixes=3, output_len=32)
    return prefix_shapes(settings, max(count, settings.num_prefixes), seed)


def bursts(count: int, seed: int) -> list[Shape]:
    """Chat again: what differs is when they come."""
    return chat(count, seed + 7)


WORKLOADS: dict[str, Callable[[int, int], list[Shape]]] = {
    "chat": chat,
    "long prompt": long_prompt,
    "shared prefix": shared_prefix,
    "bursts": bursts,
}


def make_loads(yardstick: Yardstick, seconds: float, seed: int) -> list[TimedLoad]:
    """All workloads at all rates, each for about `seconds`."""
    return [
        _load(name, rate, share, yardstick, seconds, seed + number)
        for number, name in enumerate(WORKLOADS)
        for rate, share in SHARES.items()
    ]


def loads_of(facts: Facts) -> list[TimedLoad]:
    """The loads of runs that were, or are to be, measured."""
    return make_loads(Yardstick(facts.prompt_token_s, facts.stream_token_s), facts.seconds, facts.seed)


def _load(
    workload: str, rate: str, share: float, yardstick: Yardstick, seconds: float, seed: int
) -> TimedLoad:
    make = WORKLOADS[workload]
    typical = make(400, seed)
    rate_per_s = share / max(_prefill_s(typical, yardstick), _decode_s(typical, yardstick))
    shapes = make(max(4, round(rate_per_s * seconds)), seed)
    gap = gamma_gap(BURSTINESS) if workload == "bursts" else poisson_gap
    at_s = offsets(gap, [rate_per_s] * len(shapes), random.Random(seed))
    timed = tuple(replace(shape, at_s=at) for shape, at in zip(shapes, at_s, strict=True))
    longest_tenth = percentile([shape.input_tokens for shape in typical], 90)
    slo = Slo(
        ttft_s=_three_digits(LOOSE_TTFT * yardstick.prompt_token_s * longest_tenth),
        tpot_s=_three_digits(LOOSE_TPOT * yardstick.stream_token_s * NUM_STREAMS),
    )
    return TimedLoad(workload, rate, rate_per_s, timed, slo)


def _three_digits(seconds: float) -> float:
    return float(f"{seconds:.3g}")


def _prefill_s(shapes: Sequence[Shape], yardstick: Yardstick) -> float:
    """What a prompt takes a prefill worker, on average: of shared pieces all but the first are cached."""
    seen: set[object] = set()
    num_computed = 0
    for shape in shapes:
        num_computed += sum(p.num_tokens for p in shape.pieces if not p.is_shared or p.key not in seen)
        seen |= {p.key for p in shape.pieces if p.is_shared}
    return num_computed * yardstick.prompt_token_s / len(shapes)


def _decode_s(shapes: Sequence[Shape], yardstick: Yardstick) -> float:
    """What an answer takes a decode worker that has some streams, on average."""
    return yardstick.stream_token_s * sum(shape.output_tokens for shape in shapes) / len(shapes)


def planned(
    load: TimedLoad, tokenizer: tokenizers.Tokenizer, prompt_as: PromptAs, seed: int
) -> list[PlannedRequest]:
    """The same requests with prompts. Raises ConfigError if the tokenizer cannot make texts of exact lengths."""
    synthesizer = Synthesizer(tokenizer, prompt_as, seed)
    requests = [
        PlannedRequest(
            index=index,
            prompt=synthesizer.prompt(shape.pieces),
            input_tokens=shape.input_tokens,
            output_tokens=shape.output_tokens,
            at_s=shape.at_s,
            group=shape.group,
        )
        for index, shape in enumerate(load.shapes)
    ]
    synthesizer.check([each.prompt for each in requests], [each.input_tokens for each in requests])
    return requests
