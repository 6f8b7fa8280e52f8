"""Small stories of a few requests, told one by one: where did each wait, and whose wait grew because of the others?

*Three customers*: A has a short prompt and streams; B comes with the longest prompt that the model holds; C comes right
behind B with a short one. On each schedule every customer is first served alone, then all three together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import tokenizers

from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.stand import Stand
from twinpool.bench.comparison.yardstick import fixed
from twinpool.bench.reports.model import ArmReport, Table
from twinpool.bench.serving.distributions import percentile
from twinpool.bench.serving.metrics import itls_s, ttft_s
from twinpool.bench.serving.record import RequestRecord, Run
from twinpool.bench.serving.workload import PlannedRequest
from twinpool.config import require

APART_S = 0.25
LEAST_CONTEXT = 1024
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
    """One customer on one schedule: alone, and with the others."""

    arm: str
    customer: Customer
    alone: RequestRecord
    together: RequestRecord

    @property
    def whose_wait_grew(self) -> str:
        """In words: the wait for the first output, the longest gap behind it, both, or neither."""
        grown = []
        if _has_grown(ttft_s(self.alone), ttft_s(self.together)):
            grown.append("first output")
        if _has_grown(_longest_s(self.alone), _longest_s(self.together)):
            grown.append("a gap")
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
    """One schedule: each customer on it, and the run in which they came together."""

    arm: Arm
    served: tuple[Served, ...]
    together: Run


def tell_story(
    arm: Arm, customers: Sequence[Customer], stand: Stand, tokenizer: tokenizers.Tokenizer, seed: int
) -> Story:
    """Serves every customer alone on the arm, then all together. Raises as `Stand.load`."""
    requests = [
        _request(customer, number, tokenizer, seed + number) for number, customer in enumerate(customers)
    ]
    *short, _ = sorted(requests, key=lambda request: request.input_tokens)
    stand.load(arm, [_at(request, number, 0.0) for number, request in enumerate(short)], "story-warm-up")
    alone = [
        stand.load(arm, [_at(request, 0, 0.0)], f"story-alone-{number}").run.requests[0]
        for number, request in enumerate(requests)
    ]
    close = [_at(request, number, APART_S * number) for number, request in enumerate(requests)]
    together = stand.load(arm, close, "story-together").run
    each = zip(customers, alone, together.requests, strict=True)
    return Story(arm, tuple(Served(arm.name, *found) for found in each), together)


def arm_report(story: Story, description: str, command: str) -> ArmReport:
    """The schedule in a report: its timeline."""
    return ArmReport(name=story.arm.name, description=description, command=command, runs=(story.together,))


def table(served: Sequence[Served]) -> Table:
    """A row for each schedule and customer."""
    return Table(
        title="Customers who come close together",
        columns=(
            "schedule", "customer", "in", "out", "queue, ms", "prefill, ms", "first output, ms", "alone",
            "gaps p50, ms", "longest, ms", "alone", "ends with", "wait grew",
        ),
        rows=tuple(_row(each) for each in served),
        note=f"They come {APART_S * 1e3:.0f} ms apart. Queue and prefill are the server's stages. A wait grew if it is "
        f"more than {GREW_BY:g} times that of the same request alone on the same schedule.",
    )  # fmt: skip


def _row(each: Served) -> tuple[str, ...]:
    record = each.together
    stages = (
        {} if record.timeline is None else {stage.name: stage.duration_s for stage in record.timeline.stages}
    )
    gaps = itls_s(record)
    return (
        each.arm,
        each.customer.name,
        str(each.customer.input_tokens),
        str(record.output_tokens),
        _ms(stages.get("queue")),
        _ms(stages.get("prefill")),
        _ms(ttft_s(record)),
        _ms(ttft_s(each.alone)),
        _ms(percentile(gaps, 50) if len(gaps) else None),
        _ms(_longest_s(record)),
        _ms(_longest_s(each.alone)),
        record.finish_reason or record.error or record.ending.value,
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


def _has_grown(before: float | None, after: float | None) -> bool:
    return (
        before is not None and after is not None and after > GREW_BY * before and after - before > GREW_BY_S
    )


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:,.1f}"
