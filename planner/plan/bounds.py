"""What a layout serves at best, in closed form: rates that no schedule exceeds, to search where it is worth while.

Steps are taken as full as settings, memory and objectives allow, prompts as reused as a cache without bounds could, and
nothing ever waits: so each bound is an upper one for service times that grow no faster than their step's tokens. Of
workers that share cores as many compute at a time as together do most, and objectives are held against a step alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from twinpool.bench.serving.distributions import percentile
from twinpool.bench.serving.slo import Slo
from twinpool.config import Role, SchedulerConfig
from twinpool.planner.plan.layouts import Layout, LayoutSpace, WorkerKind
from twinpool.planner.plan.traffic import Lengths
from twinpool.planner.step_shape import StepShape, StepTime, chunks_of, of_sequences, together
from twinpool.planner.times.service_times import Overheads

_EXEMPT_SHARE = 0.01
"""Of a request's gaps: an objective of its p99 lets so many be of any length."""


class Limit(StrEnum):
    """What keeps a pool from serving more."""

    PREFILL = "the time of its prompts"
    ITL = "the ITL objective"
    KV = "its KV memory"
    SLOTS = "--max-num-seqs"
    BUDGET = "its token budget"
    LINK = "its link"
    TIME = "the time of its workers"
    """Of hybrids, each of which does what it is best at."""
    NOTHING = "the time of one step"
    """Not even one sequence meets the objective."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The most requests per second that a pool serves, why no more, and how many sequences each of its workers then has
    in steps of `step_s`. The `role` of hybrids of both pools is colocated: each does both."""

    role: Role
    rate_per_s: float
    limit: Limit
    num_sequences: int = 0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Workers:
    """Alike; with `share_cores`, each slows the others down."""

    kind: WorkerKind
    count: int
    share_cores: bool = False

    def num_computing(self, shape: StepShape) -> int:
        """So many of them, at a time, get most steps of that shape done."""
        if not self.share_cores:
            return self.count
        step_s = self.kind.times.step_s
        return max(range(1, self.count + 1), key=lambda number: number / step_s(shape, number - 1))

    def step_s(self, shape: StepShape) -> float:
        """Of one of them while so many compute."""
        return self.kind.times.step_s(shape, self.num_computing(shape) - 1 if self.share_cores else 0)

    def interval_s(self, shape: StepShape) -> float:
        """From one step's end to the next one's, of whichever of them."""
        return self.step_s(shape) / self.num_computing(shape)


def bounds(space: LayoutSpace, layout: Layout, lengths: Lengths, slo: Slo) -> tuple[Bound, ...]:
    """Of each pool and, where KV travels, of its links."""
    share_cores = space.machine is not None
    if not layout.is_split:
        workers = _Workers(space.kinds[layout.decode_tp], layout.colocated, share_cores)
        return (_colocated(workers, space.deployment(layout).pools[0].scheduler, lengths, slo),)
    prefill = _Workers(space.kinds[layout.prefill_tp], layout.prefill, share_cores)
    decode = _Workers(space.kinds[layout.decode_tp], layout.decode, share_cores)
    if space.decode.hybrid:
        return (_hybrid((prefill, decode), space.decode, lengths, slo),)
    # Blocks that decode has cached are not sent.
    tokens_sent = lengths.new_tokens if space.decode.prefix_cache else lengths.input_tokens
    bytes_sent = round(tokens_sent * space.kv.token_bytes)
    transfer_s = prefill.kind.times.transfer_s(bytes_sent)
    num_links = min(layout.prefill, layout.decode)
    link = Bound(Role.PREFILL, num_links / transfer_s if transfer_s else float("inf"), Limit.LINK)
    return (
        _prefill(prefill, space.prefill, lengths),
        _decode(decode, space.decode, lengths, slo),
        link,
    )


def bound(space: LayoutSpace, layout: Layout, lengths: Lengths, slo: Slo) -> Bound:
    """The least of them."""
    return min(bounds(space, layout, lengths, slo), key=lambda each: each.rate_per_s)


def accelerator_seconds(
    space: LayoutSpace, layout: Layout, lengths: Lengths, slo: Slo
) -> tuple[float, float]:
    """What a request takes of accelerators in prefill and in decode where steps are as full as they may be: how the
    cost of colocated workers is shared out."""
    prefill_tp = layout.prefill_tp if layout.is_split else layout.decode_tp
    prefill = _prefill(_Workers(space.kinds[prefill_tp], 1), space.prefill, lengths)
    decode = _decode(_Workers(space.kinds[layout.decode_tp], 1), space.decode, lengths, slo)
    return prefill_tp / prefill.rate_per_s, layout.decode_tp / decode.rate_per_s if decode.rate_per_s else 0.0


def ttft_floors_s(
    step_s: StepTime, overheads: Overheads, token_budget: int, prompts: Iterable[tuple[int, int]]
) -> list[float]:
    """TTFT of each prompt alone on an idle worker, of which so many tokens are new and so many cached, ascending."""
    return sorted(
        overheads.request_s
        + overheads.prompt_token_s * (new + cached)
        + overheads.output_s
        + sum(map(step_s, chunks_of(new, cached, token_budget)))
        for new, cached in prompts
    )


def itl_floors_s(step_s: StepTime, contexts: Iterable[int]) -> list[float]:
    """The gaps of sequences of so many tokens, each alone on a worker, ascending."""
    return sorted(step_s(of_sequences([length])) for length in contexts)


def share_within(floors_s: Sequence[float], bound_s: float | None) -> float:
    """Of them; all without a bound."""
    if bound_s is None or not floors_s:
        return 1.0
    return sum(floor <= bound_s for floor in floors_s) / len(floors_s)


def quantile_s(floors_s: Sequence[float], share: float) -> float:
    """What that share of them is within."""
    return percentile(floors_s, 100 * share)


def _prompts(lengths: Lengths, num_tokens: float) -> StepShape:
    """A step's part with so many prompt tokens."""
    count = num_tokens / lengths.new_tokens
    return StepShape(
        num_chunks=max(1, round(count)),
        prompt_tokens=round(num_tokens),
        prompt_pairs=round(count * lengths.prompt_pairs),
        prompt_context=round(count * lengths.input_tokens),
    )


def _prefill(workers: _Workers, scheduler: SchedulerConfig, lengths: Lengths) -> Bound:
    tokens = scheduler.token_budget or 0
    best, step_s = 0.0, 0.0
    while tokens >= 1:
        prompts = _prompts(lengths, tokens)
        if (rate := tokens / workers.interval_s(prompts)) > best:
            best, step_s = rate, workers.step_s(prompts)
        tokens //= 2
    return Bound(Role.PREFILL, best / lengths.new_tokens, Limit.PREFILL, step_s=step_s)


def _gap_bound_s(slo: Slo) -> float:
    """What a typical gap must keep."""
    given = [each for each in (slo.itl_p99_s, slo.tpot_s) if each is not None]
    return min(given, default=float("inf"))


def _fit_in_memory(kind: WorkerKind, scheduler: SchedulerConfig, lengths: Lengths) -> int:
    """Sequences of average context that the pool holds; the last block of each is half full. With a prefix cache,
    sequences share the blocks of equal beginnings, which then take no room of their own."""
    shared = lengths.input_tokens - lengths.new_tokens if scheduler.prefix_cache else 0.0
    per_sequence = max(0.0, lengths.context - shared) + kind.capacity.layout.block_size / 2
    return int(kind.capacity.num_tokens / per_sequence)


def _decode(workers: _Workers, scheduler: SchedulerConfig, lengths: Lengths, slo: Slo) -> Bound:
    def alone_s(sequences: int) -> float:
        return workers.kind.times.step_s(_running(lengths, sequences))

    in_memory = _fit_in_memory(workers.kind, scheduler, lengths)
    most = min(in_memory, scheduler.max_num_seqs)
    gap_s = _gap_bound_s(slo)
    found = _most(most, lambda sequences: alone_s(sequences) <= gap_s)
    if found < most:
        limit = Limit.ITL if found else Limit.NOTHING
    else:
        limit = Limit.KV if in_memory <= scheduler.max_num_seqs else Limit.SLOTS
    if not found or not lengths.steps:
        rate = 0.0 if not found else float("inf")
        return Bound(Role.DECODE, rate, limit)
    step = _running(lengths, found)
    rate = found / workers.interval_s(step) / lengths.steps
    return Bound(Role.DECODE, rate, limit, found, workers.step_s(step))


def _hybrid(pools: Sequence[_Workers], scheduler: SchedulerConfig, lengths: Lengths, slo: Slo) -> Bound:
    """Workers that each take prompts, streams, or both: the better of mixed steps everywhere and of the best division
    of their time between prompts and streams. Between the two, rates are weighted means of theirs."""
    mixed = [_colocated(pool, scheduler, lengths, slo) for pool in pools]
    rates = [
        (
            _prefill(pool, scheduler, lengths).rate_per_s,
            _decode(pool, scheduler, lengths, slo).rate_per_s,
        )
        for pool in pools
    ]
    rate, divided_rate = sum(each.rate_per_s for each in mixed), _divided(rates)
    if divided_rate <= rate:
        return replace(max(mixed, key=lambda each: each.rate_per_s), rate_per_s=rate)
    streams = max(
        (_decode(pool, scheduler, lengths, slo) for pool in pools), key=lambda each: each.rate_per_s
    )
    return replace(streams, role=Role.COLOCATED, rate_per_s=divided_rate, limit=Limit.TIME)


def _divided(rates: Sequence[tuple[float, float]]) -> float:
    """What pools serve that each may give any share of its time to prompts, at the first rate, and the rest to streams,
    at the second: those that are best at prompts by comparison take them first."""
    ordered = sorted(rates, key=lambda each: -each[0] / each[1] if each[1] else -math.inf)
    prompts, streams = 0.0, sum(decode for _, decode in ordered)
    for prefill, decode in ordered:
        if prompts + prefill >= streams - decode:
            share = (streams - prompts) / (prefill + decode) if prefill + decode else 0.0
            return prompts + share * prefill
        prompts, streams = prompts + prefill, streams - decode
    return streams


def _colocated(workers: _Workers, scheduler: SchedulerConfig, lengths: Lengths, slo: Slo) -> Bound:
    """The better of two ways: prompts in every step, within the objective; or, where that is of the p99 of gaps, in
    one step of a hundred, whose length does not count then."""
    each = [_mixed(workers, scheduler, lengths, _gap_bound_s(slo), 1.0)]
    if slo.itl_p99_s is not None and slo.tpot_s is None:
        each.append(_mixed(workers, scheduler, lengths, slo.itl_p99_s, _EXEMPT_SHARE))
    return max(each, key=lambda found: found.rate_per_s)


def _mixed(
    workers: _Workers, scheduler: SchedulerConfig, lengths: Lengths, gap_s: float, share: float
) -> Bound:
    """A step has B sequences, and a `share` of the steps have the prompts of those that replace the ones which end
    meanwhile."""
    per_sequence = lengths.new_tokens / max(1.0, lengths.steps) / share
    budget = scheduler.token_budget or 0

    def with_prompts(sequences: int) -> StepShape:
        return together(_running(lengths, sequences), _prompts(lengths, sequences * per_sequence))

    def counts_s(sequences: int) -> float:
        counts = with_prompts(sequences) if share == 1 else _running(lengths, sequences)
        return workers.kind.times.step_s(counts)

    in_memory = _fit_in_memory(workers.kind, scheduler, lengths)
    in_budget = int(budget / (1 + per_sequence))
    most = min(in_memory, in_budget, scheduler.max_num_seqs)
    found = _most(most, lambda sequences: counts_s(sequences) <= gap_s)
    limit = (
        Limit.ITL if found < most else {in_memory: Limit.KV, in_budget: Limit.BUDGET}.get(most, Limit.SLOTS)
    )
    if not found:
        return _one_sequence(workers, budget, lengths, gap_s, share)

    def mean(seconds: StepTime) -> float:
        return share * seconds(with_prompts(found)) + (1 - share) * seconds(_running(lengths, found))

    rate = found / mean(workers.interval_s) / max(1.0, lengths.steps)
    return Bound(Role.COLOCATED, rate, limit, found, mean(workers.step_s))


def _one_sequence(workers: _Workers, budget: int, lengths: Lengths, gap_s: float, share: float) -> Bound:
    """Where the prompts that one sequence's share of time must take do not fit beside it: as many as fit."""
    alone, step_s = _running(lengths, 1), workers.kind.times.step_s
    if share < 1 or step_s(alone) > gap_s:
        return Bound(Role.COLOCATED, 0.0, Limit.NOTHING)
    tokens = _most(budget - 1, lambda count: step_s(together(alone, _prompts(lengths, count))) <= gap_s)
    if not tokens:
        return Bound(Role.COLOCATED, 0.0, Limit.NOTHING)
    step = together(alone, _prompts(lengths, tokens))
    limit = Limit.BUDGET if tokens == budget - 1 else Limit.ITL
    rate = tokens / workers.interval_s(step) / lengths.new_tokens
    return Bound(Role.COLOCATED, rate, limit, 1, workers.step_s(step))


def _running(lengths: Lengths, sequences: int) -> StepShape:
    return StepShape(num_sequences=sequences, context_tokens=round(sequences * lengths.context))


def _most(most: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to `most` that holds, 0 if none does; whoever holds, so does any smaller one."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
