"""Small stories of a few requests, told one by one: where did each wait, and whose wait grew because of the others?

*Three customers*: A has a short prompt and streams; B comes with the longest prompt that the model holds; C comes right
behind B with a short one. On each schedule every customer is first served alone, then all three together, and that a
few times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import tokenizers

from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.stand import Stand
from twinpool.bench.comparison.yardstick import fixed
from twinpool.bench.reports.model import ArmReport, Table
from twinpool.bench.reports.words import NONE, number
from twinpool.bench.serving.distributions import percentile
from twinpool.bench.serving.metrics import itls_s, ttft_s
from twinpool.bench.serving.record import RequestRecord, Run
from twinpool.bench.serving.workload import PlannedRequest
from twinpool.config import require

APART_S = 0.25
LEAST_CONTEXT = 1024
NUM_ROUNDS = 3
"""One would tell chance from nothing."""
GREW_BY = 1.2
"""A wait has grown if it is so many times what it was alone, and by more than a few milliseconds."""
GREW_BY_S = 0.005


@dataclass(frozen=True, slots=True)
class Customer:
    """Who asks for what."""

    name: str
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Served:
    """One customer on one schedule: alone, and with the others, in each round."""

    arm: str
    customer: Customer
    alone: tuple[RequestRecord, ...]
    together: tuple[RequestRecord, ...]

    @property
    def has_waited(self) -> bool:
        """Whether the wait for the first output grew."""
        return _has_grown([ttft_s(each) for each in self.alone], [ttft_s(each) for each in self.together])

    @property
    def has_stalled(self) -> bool:
        """Whether the longest gap behind it grew."""
        return _has_grown(
            [_longest_s(each) for each in self.alone], [_longest_s(each) for each in self.together]
        )

    @property
    def whose_wait_grew(self) -> str:
        """In words: the wait for the first output, the longest gap behind it, both, or neither."""
        grown = ["first output"] * self.has_waited + ["a gap"] * self.has_stalled
        return " and ".join(grown) or "no"


def three_customers(max_model_len: int) -> tuple[Customer, ...]:
    """B's prompt is of 12,000 tokens, or as long as the model holds. Raises ConfigError if that is not long."""
    allowed = f"a model that holds {LEAST_CONTEXT:,} tokens, and this one holds {max_model_len:,}"
    require("--workload", "three-customers", max_model_len >= LEAST_CONTEXT, allowed)
    return (
        Customer("A", 200, 128),
        Customer("B", min(12_000, max_model_len - 256), 256),
        Customer("C", 300, 128),
    )


@dataclass(frozen=True, slots=True)
class Story:
    """One schedule: each customer on it, and the runs in which they came together."""

    arm: Arm
    served: tuple[Served, ...]
    together: tuple[Run, ...]


def tell_story(
    arm: Arm,
    customers: Sequence[Customer],
    stand: Stand,
    tokenizer: tokenizers.Tokenizer,
    seed: int,
    say: Callable[[str], None],
) -> Story:
    """Serves every customer alone on the arm, then all together, and that NUM_ROUNDS times. Raises as `Stand.load`."""
    alone: list[list[RequestRecord]] = [[] for _ in customers]
    together = []
    for turn in range(NUM_ROUNDS):
        first = seed + 1000 * turn
        requests = [_request(each, place, tokenizer, first + place) for place, each in enumerate(customers)]
        began = time.monotonic()
        if not turn:
            *short, _ = sorted(requests, key=lambda request: request.input_tokens)
            warm_up = [_at(request, place, 0.0) for place, request in enumerate(short)]
            stand.load(arm, warm_up, "story-warm-up")
        for customer, request, own in zip(customers, requests, alone, strict=True):
            run = stand.load(arm, [_at(request, 0, 0.0)], f"story-{turn}-alone-{customer.name}").run
            own.append(run.requests[0])
        close = [_at(request, place, APART_S * place) for place, request in enumerate(requests)]
        together.append(stand.load(arm, close, f"story-{turn}-together").run)
        say(f"  round {turn + 1} of {NUM_ROUNDS} took {time.monotonic() - began:.0f} s")
    served = (
        Served(arm.name, customer, tuple(own), tuple(run.requests[place] for run in together))
        for place, (customer, own) in enumerate(zip(customers, alone, strict=True))
    )
    return Story(arm, tuple(served), tuple(together))


def arm_report(story: Story, description: str, command: str) -> ArmReport:
    """The schedule in a report: its timeline."""
    return ArmReport(name=story.arm.name, description=description, command=command, runs=story.together)


def conclusions(story: Story) -> list[str]:
    """Whose wait grew on this schedule, a sentence for each, or that nobody's did."""
    told = []
    for each in story.served:
        name = f"{each.customer.name} ({each.customer.input_tokens:,} tokens in)"
        if each.has_waited:
            waits = [_ms(_median(map(ttft_s, records))) for records in (each.together, each.alone)]
            told.append(f"{name} waits {waits[0]} ms for its first output, alone {waits[1]} ms")
        if each.has_stalled:
            gaps = [_ms(_median(map(_longest_s, records))) for records in (each.together, each.alone)]
            told.append(f"the longest gap of {name} is {gaps[0]} ms, alone {gaps[1]} ms")
    return [f"{story.arm.name}: {text}" for text in told or ["nobody's wait grew"]]


def table(story: Story) -> Table:
    """A row for each customer of a schedule."""
    return Table(
        title=f"Customers who come close together, on {story.arm.name}",
        columns=(
            "", "tokens in, out", "queue, ms", "prefill, ms", "first output (alone), ms", "gap p50, ms",
            "longest gap (alone), ms", "ends with", "wait grew",
        ),
        rows=tuple(_row(each) for each in story.served),
        note=f"They come {APART_S * 1e3:.0f} ms apart. Medians of {len(story.together)} rounds; queue and prefill are "
        f"the server's stages. A wait grew if it is more than {GREW_BY:g} times that of the same request alone on the "
        "same schedule, and in every round longer than in any alone.",
    )  # fmt: skip


def _row(each: Served) -> tuple[str, ...]:
    stages = [
        {} if record.timeline is None else {stage.name: stage.duration_s for stage in record.timeline.stages}
        for record in each.together
    ]
    (record, *_), customer = each.together, each.customer
    endings = dict.fromkeys(one.finish_reason or one.error or one.ending.value for one in each.together)
    return (
        customer.name,
        f"{customer.input_tokens:,}, {record.output_tokens:,}",
        _ms(_median(found.get("queue") for found in stages)),
        _ms(_median(found.get("prefill") for found in stages)),
        f"{_ms(_median(map(ttft_s, each.together)))} ({_ms(_median(map(ttft_s, each.alone)))})",
        _ms(_median(_middle_gap_s(one) for one in each.together)),
        f"{_ms(_median(map(_longest_s, each.together)))} ({_ms(_median(map(_longest_s, each.alone)))})",
        ", ".join(endings),
        each.whose_wait_grew,
    )


def _request(customer: Customer, number: int, tokenizer: tokenizers.Tokenizer, seed: int) -> PlannedRequest:
    (request,) = fixed(tokenizer, customer.input_tokens, customer.output_tokens, 1, seed)
    return msgspec.structs.replace(request, index=number, group=customer.name)


def _at(request: PlannedRequest, index: int, at_s: float) -> PlannedRequest:
    return msgspec.structs.replace(request, index=index, at_s=at_s)


def _longest_s(record: RequestRecord) -> float | None:
    gaps = itls_s(record)
    return float(gaps.max()) if len(gaps) else None


def _middle_gap_s(record: RequestRecord) -> float | None:
    gaps = itls_s(record)
    return percentile(gaps, 50) if len(gaps) else None


def _median(found: Iterable[float | None]) -> float | None:
    """Of those that are known; None of none."""
    known = [value for value in found if value is not None]
    return statistics.median(known) if known else None


def _has_grown(before: Sequence[float | None], after: Sequence[float | None]) -> bool:
    """Every one after exceeds every one before: of six equal ones a chance of one in twenty."""
    old, new = ([value for value in each if value is not None] for each in (before, after))
    if not old or not new or min(new) <= max(old):
        return False
    usual, now = statistics.median(old), statistics.median(new)
    return now > GREW_BY * usual and now - usual > GREW_BY_S


def _ms(seconds: float | None) -> str:
    return NONE if seconds is None else number(seconds * 1e3)
