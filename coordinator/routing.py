"""Which workers run a request: predicted work against the prefix that a worker should already hold."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import xxhash

from twinpool.config import Role
from twinpool.coordinator.hybrid import Choice, HybridChooser
from twinpool.coordinator.lifecycle import LegKind, Request
from twinpool.coordinator.pace import AnswerLengths, PrefillPace
from twinpool.coordinator.registry import Registry, Worker
from twinpool.coordinator.service import Submission
from twinpool.coordinator.timeline import Candidate, CostUnit

CHUNK_TOKENS = 64
MAX_CHUNKS = 256
MAX_INDEXED_CHUNKS = 65_536
MAX_PENDING_PROMPT_TOKENS = 16_384
MAX_PENDING_S = 0.5
"""A worker where prompts of more than this time go before a prompt does not get it yet: what waits there has left the
queue's order, and `max_wait_s` does not bound it any more."""
STEP_TOKENS = 256
"""What may wait at a worker whatever its pace: enough for an efficient step (DESIGN.md, figures behind defaults)."""
GROWTH_TOKENS = 64
PREFIX_WEIGHT = 0.25
SEQUENCE_COST_TOKENS = 32
MAX_RECORDED_CANDIDATES = 4


def prefix_chain(token_ids: Sequence[int], cache_salt: str) -> tuple[int, ...]:
    """Hashes of the first `MAX_CHUNKS` whole chunks of `CHUNK_TOKENS` tokens, each over all up to its end."""
    parent = xxhash.xxh3_64_intdigest(cache_salt.encode())
    chain = []
    for start in range(0, min(len(token_ids), MAX_CHUNKS * CHUNK_TOKENS) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        chunk = array("q", token_ids[start : start + CHUNK_TOKENS]).tobytes()
        parent = xxhash.xxh3_64_intdigest(chunk, seed=parent)
        chain.append(parent)
    return tuple(chain)


def prefix_of(submission: Submission) -> tuple[int, ...]:
    """The chain of a request's prompt."""
    return prefix_chain(submission.prompt_token_ids, submission.cache_salt)


class PrefixIndex:
    """Which worker processes were last given which prefixes: a bounded guess at their caches, oldest forgotten."""

    def __init__(self, max_chunks: int = MAX_INDEXED_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._holders: OrderedDict[int, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, chain: Sequence[int], incarnation: str) -> None:
        """This process computes (or receives) the prefix of `chain`."""
        for link in chain:
            self._holders.setdefault(link, set()).add(incarnation)
            self._holders.move_to_end(link)
        while len(self._holders) > self._max_chunks:
            self._holders.popitem(last=False)

    def num_matched_tokens(self, chain: Sequence[int], incarnation: str) -> int:
        """Prompt tokens at the start of `chain` that the process should hold."""
        matched = 0
        for link in chain:
            if incarnation not in self._holders.get(link, ()):
                break
            matched += CHUNK_TOKENS
        return matched

    def forget(self, incarnation: str) -> None:
        """The process is gone."""
        for holders in self._holders.values():
            holders.discard(incarnation)

    def rename(self, incarnation: str, successor: str) -> None:
        """The process goes by another name, with the cache that it had."""
        for holders in self._holders.values():
            if incarnation in holders:
                holders.remove(incarnation)
                holders.add(successor)


@dataclass(frozen=True, slots=True)
class Route:
    """Where an attempt goes: one worker that does both, or a linked pair, and what the choice was made of."""

    prefill: Worker
    decode: Worker
    candidates: tuple[Candidate, ...]
    choice: Choice | None = None

    @property
    def is_colocated(self) -> bool:
        """Whether one worker does both."""
        return self.prefill is self.decode


class Router:
    """Chooses workers: a function of the registry, the request, the prefix index, the prefill pace and the time.

    A worker that was not heard of for `quiet_s` gets nothing new: it may be frozen, long before its lease says so.
    """

    def __init__(self, registry: Registry, pace: PrefillPace, answers: AnswerLengths, quiet_s: float) -> None:
        self._registry = registry
        self._pace = pace
        self._quiet_s = quiet_s
        self._index = PrefixIndex()
        self._hybrids = HybridChooser(registry, self.matched, answers)

    def choose(self, request: Request, now: float) -> Route | None:
        """The best workers with room for the request now, or None: it waits.

        Prefill and colocated workers cost the prompt tokens to compute until this request's first token:
        those that wait there, plus its own without the matched prefix. On a colocated worker each sequence
        adds `SEQUENCE_COST_TOKENS`, for it takes part in every step. A decode worker costs its load after
        joining, the larger share of sequences or of KV slots, less `PREFIX_WEIGHT` for a wholly matched
        prefix. Only linked pairs count. Equal costs go to the first by name. A hybrid worker gets the request whole
        where that is predicted to be sooner (`coordinator/hybrid.py`).
        """
        colocated = self._by_prefill_cost(request, Role.COLOCATED, LegKind.GENERATE, now)
        if colocated:
            return Route(colocated[0][1], colocated[0][1], _record(colocated))
        split = self._split(request, now)
        choice = self._hybrids.choose(
            request,
            None if split is None else (split.prefill, split.decode),
            lambda: self._heard_pairs(now),
            lambda: self._able_hybrids(request, now),
        )
        if choice is None:
            return split
        if choice.worker is not None:
            return Route(choice.worker, choice.worker, () if split is None else split.candidates, choice)
        return None if split is None else replace(split, choice=choice)

    def _split(self, request: Request, now: float) -> Route | None:
        prefills = self._by_prefill_cost(request, Role.PREFILL, LegKind.PREFILL, now)
        for _, prefill in prefills:
            decodes = self._by_decode_cost(request, prefill, now)
            if decodes:
                return Route(prefill, decodes[0][1], _record(prefills) + _record(decodes))
        return None

    def matched(self, request: Request, worker: Worker) -> int:
        """Prompt tokens of the request that the worker should find in its prefix cache; none if it is to tell their log
        probabilities, for which it has to compute them."""
        if request.wants_prompt_logprobs:
            return 0
        return self._index.num_matched_tokens(request.prefix, worker.incarnation)

    def best_match(self, request: Request) -> int:
        """Prompt tokens of the request that some worker which computes prompts should hold."""
        computing = (w for w in self._registry if w.role is not Role.DECODE)
        return max((self.matched(request, worker) for worker in computing), default=0)

    def dispatched(self, request: Request, route: Route) -> None:
        """The request goes there: its prefix will be in those caches."""
        self._index.add(request.prefix, route.prefill.incarnation)
        self._index.add(request.prefix, route.decode.incarnation)

    def forget(self, worker: Worker) -> None:
        """The worker is gone, and its cache with it."""
        self._index.forget(worker.incarnation)

    def succeeded(self, incarnation: str, successor: str) -> None:
        """The process has another role now, under another incarnation, and has kept its cache."""
        self._index.rename(incarnation, successor)

    def _by_prefill_cost(
        self, request: Request, role: Role, kind: LegKind, now: float
    ) -> list[tuple[Candidate, Worker]]:
        found = []
        for worker in self._registry.of_role(role):
            if self._can_take(worker, kind, request, now) and self._has_time(worker, request):
                matched = self.matched(request, worker)
                cost = worker.pending_tokens + request.num_tokens - matched
                if kind is LegKind.GENERATE:
                    cost += SEQUENCE_COST_TOKENS * len(worker.legs)
                found.append((Candidate(worker.worker_id, cost, CostUnit.PROMPT_TOKENS, matched), worker))
        return sorted(found, key=_by_cost)

    def _has_time(self, worker: Worker, request: Request) -> bool:
        """Whether the prompt would start soon at the worker: behind less than `STEP_TOKENS` that go before it, or in at
        most `MAX_PENDING_S` at the measured pace, a hybrid's own. Before anything is measured only the former
        counts."""
        if worker.pending_tokens < STEP_TOKENS:
            return True
        if worker.pending_tokens + request.num_tokens > MAX_PENDING_PROMPT_TOKENS:
            return False
        before = worker.pending_before(request.num_tokens - self.matched(request, worker))
        if before < STEP_TOKENS:
            return True
        if (pace := worker.pace) is not None:
            return before * pace.prompt_token_s <= MAX_PENDING_S
        return 0 < self._pace.seconds_before(before) <= MAX_PENDING_S

    def _heard_pairs(self, now: float) -> Iterator[tuple[Worker, Worker]]:
        """Linked pairs that may have room before long."""
        for prefill, decode, _ in self._registry.links():
            if all(w.stays and now - w.seen_at <= self._quiet_s for w in (prefill, decode)):
                yield prefill, decode

    def _able_hybrids(self, request: Request, now: float) -> Iterator[Worker]:
        """Hybrids with room for the whole request, where its prompt would start soon."""
        for worker in self._registry:
            is_hybrid = worker.info.itl_budget_s is not None
            if is_hybrid and self._can_take(worker, LegKind.GENERATE, request, now):
                num_slots = worker.held_tokens + request.num_tokens + GROWTH_TOKENS
                if num_slots <= worker.usable_slots and self._has_time(worker, request):
                    yield worker

    def _can_take(self, worker: Worker, kind: LegKind, request: Request, now: float) -> bool:
        """Whether the worker stays in its pool, which the whole request fits in, has been heard of lately, did not just
        have to preempt, and, if it decodes, holds fewer than `most_sequences`."""
        if now < worker.full_until or now - worker.seen_at > self._quiet_s or not worker.stays:
            return False
        if request.max_slots > worker.num_slots:
            return False
        return kind is LegKind.PREFILL or worker.num_sequences < worker.most_sequences

    def _by_decode_cost(
        self, request: Request, prefill: Worker, now: float
    ) -> list[tuple[Candidate, Worker]]:
        found = []
        for worker in self._registry.of_role(Role.DECODE):
            linked = self._registry.link(prefill, worker) is not None
            if linked and self._can_take(worker, LegKind.DECODE, request, now):
                matched = self.matched(request, worker)
                sequences = (len(worker.legs) + 1) / worker.info.max_num_seqs
                tokens = (worker.held_tokens + request.num_tokens + GROWTH_TOKENS) / worker.usable_slots
                cost = max(sequences, tokens) - PREFIX_WEIGHT * matched / request.num_tokens
                found.append((Candidate(worker.worker_id, cost, CostUnit.SHARE, matched), worker))
        return sorted(found, key=_by_cost)


def _record(found: list[tuple[Candidate, Worker]]) -> tuple[Candidate, ...]:
    return tuple(candidate for candidate, _ in found[:MAX_RECORDED_CANDIDATES])


def _by_cost(pair: tuple[Candidate, Worker]) -> tuple[float, str]:
    return pair[0].cost, pair[0].worker_id
