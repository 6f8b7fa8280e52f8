"""Ready-made loads, sized to the machine: what strains a fast one leaves a slow one behind for good.

Lengths, rates and objectives are multiples of a `Yardstick`, so the same name means the same strain everywhere. Prompts
of two repetitions are different ones, so no cache helps from one to the next; within a repetition every arm gets the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import tokenizers

from twinpool.bench.comparison.yardstick import NUM_STREAMS, Yardstick, fixed
from twinpool.bench.serving.arrivals import Pacing, Process, schedule
from twinpool.bench.serving.datasets import (
    DatasetName,
    DatasetSettings,
    LognormalLengths,
    PromptAs,
    TooLong,
    make_requests,
)
from twinpool.bench.serving.slo import Slo
from twinpool.bench.serving.workload import PlannedRequest

LONG_PROMPT_S = 1.2
"""Undisturbed; rounded to LONG_STEP tokens, and to what the model holds."""
LONG_STEP, LONG_OUTPUT = 256, 16
LONG_STRAIN, STREAM_STRAIN = 0.4, 0.25
"""Of a prefill worker's time: what long prompts take, and at most what those of streams take."""
LEAST_LONG = 2
STREAM_PROMPT, STREAM_OUTPUT = 128, 96
CHAT_PROMPT, CHAT_OUTPUT = 200, 64
CHAT_STRAIN = 0.5
"""Of the rate at which the busier pool would have no rest."""
LOOSE_TTFT, LOOSE_ITL = 4.0, 4.0
"""An objective is so many times what is undisturbed."""


@dataclass(frozen=True, slots=True)
class Load:
    """One workload as it is to be sent: its requests for a seed, and the objective of each of them."""

    name: str
    description: str
    requests: Callable[[int], list[PlannedRequest]]
    slo: Slo


@dataclass(frozen=True, slots=True)
class Model:
    """What workloads need to know of it."""

    tokenizer: tokenizers.Tokenizer
    max_model_len: int


def interference(model: Model, yardstick: Yardstick, seconds: float) -> Load:
    """A few streams at a time, and now and then a long prompt: does it make them wait?"""
    steps = max(1, round(LONG_PROMPT_S / yardstick.prompt_token_s / LONG_STEP))
    long_prompt = min(steps * LONG_STEP, model.max_model_len - LONG_OUTPUT)
    long_s = long_prompt * yardstick.prompt_token_s
    gap_s = long_s / LONG_STRAIN
    lasts_s = max(seconds, LEAST_LONG * gap_s)
    prompt, output = (min(length, model.max_model_len // 2) for length in (STREAM_PROMPT, STREAM_OUTPUT))
    rate_per_s = min(
        NUM_STREAMS / (output * yardstick.itl_s), STREAM_STRAIN / (prompt * yardstick.prompt_token_s)
    )

    def requests(seed: int) -> list[PlannedRequest]:
        streams = fixed(model.tokenizer, prompt, output, max(4, round(rate_per_s * lasts_s)), seed)
        longs = fixed(model.tokenizer, long_prompt, LONG_OUTPUT, int(lasts_s / gap_s), seed + 1)
        arrivals = schedule(streams, Pacing(Process.POISSON, rate_per_s), seed)
        # Half a gap in, streams run already.
        prompts = [
            msgspec.structs.replace(request, at_s=(number + 0.5) * gap_s)
            for number, request in enumerate(longs)
        ]
        return merged({"streams": arrivals, "long prompts": prompts})

    return Load(
        "interference",
        f"{prompt}-token prompts with {output} tokens out, {rate_per_s:.2f} per second; beside them a prompt of "
        f"{long_prompt} tokens every {gap_s:.1f} s, for {lasts_s:.0f} s",
        requests,
        bounds(LOOSE_TTFT * long_s, LOOSE_ITL * yardstick.itl_s),
    )


def chat(model: Model, yardstick: Yardstick, seconds: float) -> Load:
    """Short prompts and answers of many lengths, at half of what the busier pool can do."""
    prefill_per_s = 1 / (CHAT_PROMPT * yardstick.prompt_token_s)
    decode_per_s = NUM_STREAMS / (CHAT_OUTPUT * yardstick.itl_s)
    rate_per_s = CHAT_STRAIN * min(prefill_per_s, decode_per_s)
    lengths = LognormalLengths(
        input_median=CHAT_PROMPT, input_sigma=0.6, input_most=4 * CHAT_PROMPT,
        output_median=CHAT_OUTPUT, output_sigma=0.5, output_most=4 * CHAT_OUTPUT,
    )  # fmt: skip
    settings = DatasetSettings(
        name=DatasetName.LOGNORMAL,
        prompt_as=PromptAs.IDS,
        lognormal=lengths,
        max_model_len=model.max_model_len,
        too_long=TooLong.CLIP,
    )

    def requests(seed: int) -> list[PlannedRequest]:
        made = make_requests(settings, model.tokenizer, max(8, round(rate_per_s * seconds)), seed)
        return merged({"chat": schedule(made, Pacing(Process.POISSON, rate_per_s), seed)})

    return Load(
        "chat",
        f"prompts of about {CHAT_PROMPT} tokens, answers of about {CHAT_OUTPUT} (log-normal), {rate_per_s:.2f} "
        f"requests per second for {seconds:.0f} s",
        requests,
        bounds(LOOSE_TTFT * 4 * CHAT_PROMPT * yardstick.prompt_token_s, LOOSE_ITL * yardstick.itl_s),
    )


def from_dataset(
    model: Model, yardstick: Yardstick, settings: DatasetSettings, pacing: Pacing, count: int
) -> Load:
    """What the user describes. Its objective is as of `interference`, unless the user has one."""

    def requests(seed: int) -> list[PlannedRequest]:
        made = schedule(make_requests(settings, model.tokenizer, count, seed), pacing, seed)
        return [msgspec.structs.replace(request, index=index) for index, request in enumerate(made)]

    when = (
        "at the data's times"
        if pacing.process is Process.REPLAY
        else f"{pacing.process.value} arrivals at {pacing.rate_per_s:g} per second"
    )
    return Load(
        settings.name.value,
        f"{count or 'all'} requests of {settings.path or settings.name.value}, {when}",
        requests,
        bounds(LOOSE_TTFT * LONG_PROMPT_S, LOOSE_ITL * yardstick.itl_s),
    )


LOADS = {"interference": interference, "chat": chat}
"""By name; each is made of a model, a yardstick and the seconds that it should last."""


def bounds(ttft_s: float, itl_s: float) -> Slo:
    """Bounds of three digits: more would only look exact."""
    return Slo(ttft_s=float(f"{ttft_s:.3g}"), itl_p99_s=float(f"{itl_s:.3g}"))


def merged(groups: dict[str, Sequence[PlannedRequest]]) -> list[PlannedRequest]:
    """Timed requests of several groups as one load, earliest first, numbered anew."""
    named = [
        msgspec.structs.replace(request, group=group) for group, each in groups.items() for request in each
    ]
    named.sort(key=lambda request: request.at_s or 0.0)
    return [msgspec.structs.replace(request, index=index) for index, request in enumerate(named)]
