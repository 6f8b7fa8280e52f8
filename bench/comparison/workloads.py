"""Ready-made loads, sized to the machine: what strains a fast one leaves a slow one behind for good.

A *yardstick* is measured first, on the layout with one prefill and one decode worker, with nothing beside: how long a
long prompt takes, and the gap between tokens of a few streams. Rates and objectives are multiples of those, so the same
name means the same strain everywhere. Prompts of two repetitions are different ones, so no cache helps from one to the
next; within a repetition every arm gets the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import tokenizers

from twinpool.bench.serving.arrivals import Pacing, Process, schedule
from twinpool.bench.serving.datasets import (
    DatasetName,
    DatasetSettings,
    LognormalLengths,
    RandomLengths,
    TooLong,
    make_requests,
)
from twinpool.bench.serving.slo import Slo
from twinpool.bench.serving.workload import PlannedRequest

LONG_PROMPT, LONG_OUTPUT = 2048, 16
STREAM_PROMPT, STREAM_OUTPUT = 128, 96
NUM_STREAMS = 6
CHAT_PROMPT, CHAT_OUTPUT = 200, 64
CHAT_STRAIN = 0.5
"""Of the rate at which the busier pool would have no rest."""
LONG_STRAIN = 0.45
"""Of a prefill worker's time, that long prompts take."""
LEAST_LONG = 3
LOOSE_ITL, LOOSE_TTFT = 2.5, 4.0
"""An objective is so many times the yardstick's."""
MOST_LOAD_FACTOR = 3
"""A load lasts at most so many times the seconds that were asked for, to hold LEAST_LONG prompts."""


@dataclass(frozen=True, slots=True)
class Yardstick:
    """Undisturbed, on one prefill and one decode worker: seconds per token of a long prompt until its first output, and
    between tokens of NUM_STREAMS streams."""

    prompt_token_s: float
    itl_s: float

    @property
    def long_prompt_s(self) -> float:
        """Of LONG_PROMPT tokens."""
        return LONG_PROMPT * self.prompt_token_s


@dataclass(frozen=True, slots=True)
class Load:
    """One workload as it is to be sent: its requests for a seed, and the objective of each of them."""

    name: str
    description: str
    requests: Callable[[int], list[PlannedRequest]]
    slo: Slo


def interference(tokenizer: tokenizers.Tokenizer, yardstick: Yardstick, seconds: float) -> Load:
    """A few streams at a time, and now and then a long prompt: does it make them wait?"""
    gap_s = yardstick.long_prompt_s / LONG_STRAIN
    lasts_s = min(max(seconds, LEAST_LONG * gap_s), MOST_LOAD_FACTOR * seconds)
    rate_per_s = NUM_STREAMS / (STREAM_OUTPUT * yardstick.itl_s)

    def requests(seed: int) -> list[PlannedRequest]:
        streams = _fixed(tokenizer, STREAM_PROMPT, STREAM_OUTPUT, max(4, round(rate_per_s * lasts_s)), seed)
        longs = _fixed(tokenizer, LONG_PROMPT, LONG_OUTPUT, max(1, int(lasts_s / gap_s)), seed + 1)
        arrivals = schedule(streams, Pacing(Process.POISSON, rate_per_s), seed)
        # Half a gap in, streams run already.
        prompts = [
            msgspec.structs.replace(request, at_s=(number + 0.5) * gap_s)
            for number, request in enumerate(longs)
        ]
        return merged({"streams": arrivals, "long prompts": prompts})

    return Load(
        "interference",
        f"{STREAM_PROMPT}-token prompts with {STREAM_OUTPUT} tokens out, about {NUM_STREAMS} streams at a time; beside "
        f"them a prompt of {LONG_PROMPT} tokens every {gap_s:.1f} s, for {lasts_s:.0f} s",
        requests,
        Slo(ttft_s=LOOSE_TTFT * yardstick.long_prompt_s, itl_p99_s=LOOSE_ITL * yardstick.itl_s),
    )


def chat(tokenizer: tokenizers.Tokenizer, yardstick: Yardstick, seconds: float) -> Load:
    """Short prompts and answers of many lengths, at half of what the busier pool can do."""
    prefill_per_s = 1 / (CHAT_PROMPT * yardstick.prompt_token_s)
    decode_per_s = NUM_STREAMS / (CHAT_OUTPUT * yardstick.itl_s)
    rate_per_s = CHAT_STRAIN * min(prefill_per_s, decode_per_s)
    lengths = LognormalLengths(
        input_median=CHAT_PROMPT, input_sigma=0.6, input_most=8 * CHAT_PROMPT,
        output_median=CHAT_OUTPUT, output_sigma=0.5, output_most=4 * CHAT_OUTPUT,
    )  # fmt: skip
    settings = DatasetSettings(name=DatasetName.LOGNORMAL, lognormal=lengths, too_long=TooLong.CLIP)

    def requests(seed: int) -> list[PlannedRequest]:
        made = make_requests(settings, tokenizer, max(8, round(rate_per_s * seconds)), seed)
        return merged({"chat": schedule(made, Pacing(Process.POISSON, rate_per_s), seed)})

    return Load(
        "chat",
        f"prompts of about {CHAT_PROMPT} tokens, answers of about {CHAT_OUTPUT} (log-normal), {rate_per_s:.2f} "
        f"requests per second for {seconds:.0f} s",
        requests,
        Slo(
            ttft_s=LOOSE_TTFT * 4 * CHAT_PROMPT * yardstick.prompt_token_s,
            itl_p99_s=LOOSE_ITL * yardstick.itl_s,
        ),
    )


def from_dataset(
    tokenizer: tokenizers.Tokenizer,
    yardstick: Yardstick,
    settings: DatasetSettings,
    pacing: Pacing,
    count: int,
) -> Load:
    """What the user describes. Its objective is as of `interference`, unless the user has one."""

    def requests(seed: int) -> list[PlannedRequest]:
        return schedule(make_requests(settings, tokenizer, count, seed), pacing, seed)

    return Load(
        settings.name.value,
        f"{count} requests of {settings.name.value}, {pacing.process.value} arrivals at {pacing.rate_per_s:g}/s",
        requests,
        Slo(ttft_s=LOOSE_TTFT * yardstick.long_prompt_s, itl_p99_s=LOOSE_ITL * yardstick.itl_s),
    )


LOADS = {"interference": interference, "chat": chat}
"""By name; each is made of a tokenizer, a yardstick and the seconds that it should last."""


def yardstick_requests(tokenizer: tokenizers.Tokenizer, seed: int) -> tuple[list[PlannedRequest], ...]:
    """What a yardstick is measured with, one after the other: a warm-up that does not count, two long prompts, some
    streams at once."""
    long = [_fixed(tokenizer, LONG_PROMPT, 2, 1, seed + number) for number in range(3)]
    streams = _fixed(tokenizer, STREAM_PROMPT, STREAM_OUTPUT // 2, NUM_STREAMS, seed + 3)
    return tuple(schedule(each, Pacing(Process.BURST), seed) for each in (*long, streams))


def merged(groups: dict[str, Sequence[PlannedRequest]]) -> list[PlannedRequest]:
    """Timed requests of several groups as one load, earliest first, numbered anew."""
    named = [
        msgspec.structs.replace(request, group=group) for group, each in groups.items() for request in each
    ]
    named.sort(key=lambda request: request.at_s or 0.0)
    return [msgspec.structs.replace(request, index=index) for index, request in enumerate(named)]


def _fixed(
    tokenizer: tokenizers.Tokenizer, input_tokens: int, output_tokens: int, count: int, seed: int
) -> list[PlannedRequest]:
    settings = DatasetSettings(random=RandomLengths(input_len=input_tokens, output_len=output_tokens))
    return make_requests(settings, tokenizer, count, random.Random(seed).randrange(2**31))
