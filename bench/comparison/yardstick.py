"""How fast the machine is without strain, on one prefill and one decode worker: what workloads are sized by."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tokenizers

from twinpool.bench.comparison.arms import Arm, parse_arm
from twinpool.bench.serving.arrivals import Pacing, Process, schedule
from twinpool.bench.serving.datasets import DatasetSettings, PromptAs, RandomLengths, make_requests
from twinpool.bench.serving.metrics import itls_s, ttft_s
from twinpool.bench.serving.record import Ending, Run
from twinpool.bench.serving.workload import PlannedRequest
from twinpool.errors import TwinpoolError

NUM_STREAMS = 6
_LONG_PROMPT, _STREAM_PROMPT, _STREAM_OUTPUT = 1024, 128, 48
_NUM_LONG = 2
Send = Callable[[Sequence[PlannedRequest], str], Run]
"""Sends requests, under a name, and waits for their ends."""


class NothingMeasured(TwinpoolError):
    """A server did not answer what everything else depends on. The message says what."""


@dataclass(frozen=True, slots=True)
class Yardstick:
    """Seconds per token of a long prompt until its first output, and between tokens of NUM_STREAMS streams."""

    prompt_token_s: float
    itl_s: float

    def __str__(self) -> str:
        return (
            f"{1 / self.prompt_token_s:,.0f} prompt tokens/s, {self.itl_s * 1e3:.1f} ms between tokens of "
            f"{NUM_STREAMS} streams"
        )


def yardstick_arm(arms: Sequence[Arm]) -> Arm:
    """1P1D, if it is compared; else any arm that need not be tuned first."""
    by_layout = {arm.name: arm for arm in arms}
    untuned = [arm for arm in arms if not arm.is_tuned]
    return by_layout.get("1P1D") or (untuned[0] if untuned else parse_arm("1p1d", 0))


def measure_yardstick(
    send: Send, tokenizer: tokenizers.Tokenizer, seed: int, max_model_len: int
) -> Yardstick:
    """Sends a warm-up that does not count, long prompts one by one, and some streams at once.

    Raises:
        NothingMeasured: something of it was not completed, or tokens did not come one by one.
    """
    prompt = min(_LONG_PROMPT, max_model_len // 2)
    long = [fixed(tokenizer, prompt, 2, 1, seed + number) for number in range(1 + _NUM_LONG)]
    streams = fixed(
        tokenizer, min(_STREAM_PROMPT, prompt), min(_STREAM_OUTPUT, prompt), NUM_STREAMS, seed + 1 + _NUM_LONG
    )
    _, *prompted, streamed = (
        send(schedule(each, Pacing(Process.BURST), seed), f"yardstick-{number}")
        for number, each in enumerate((*long, streams))
    )
    firsts = [
        first / record.input_tokens
        for run in prompted
        for record in run.requests
        if record.ending is Ending.COMPLETED and (first := ttft_s(record))
    ]
    gaps = [gap for record in streamed.requests for gap in itls_s(record).tolist() if gap > 0]
    everything = [record for run in (*prompted, streamed) for record in run.requests]
    errors = sorted({record.error for record in everything if record.error})
    if not firsts or errors:
        raise NothingMeasured(
            f"not all of some first requests were completed: {'; '.join(errors) or 'no output'}"
        )
    if not gaps:
        raise NothingMeasured(
            "all tokens of each answer came at once: something else keeps this machine busy, or the server does not "
            "stream token by token"
        )
    return Yardstick(statistics.median(firsts), statistics.median(gaps))


def fixed(
    tokenizer: tokenizers.Tokenizer, input_tokens: int, output_tokens: int, count: int, seed: int
) -> list[PlannedRequest]:
    """So many requests of these lengths, without times. Prompts are token ids: exact with every tokenizer."""
    lengths = RandomLengths(input_len=input_tokens, output_len=output_tokens)
    settings = DatasetSettings(prompt_as=PromptAs.IDS, random=lengths)
    return make_requests(settings, tokenizer, count, random.Random(seed).randrange(2**31))
