"""Which workers run a request: predicted work against the prefix that a worker should already hold."""

from __future__ import annotations

from array import array
from bisect import insort
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import inf
from typing import NamedTuple

import xxhash

from twinpool.config import Role
from twinpool.coordinator.hybrid import Choice, HybridChooser
from twinpool.coordinator.lifecycle import LegKind, Request
from twinpool.coordinator.pace import AnswerLengths, PrefillPace
from twinpool.coordinator.registry import GROWTH_TOKENS, Registry, share_taken
from twinpool.coordinator.service import Submission
from twinpool.coordinator.timeline import Candidate, CostUnit
from twinpool.coordinator.worker import Worker

CHUNK_TOKENS = 64
MAX_CHUNKS = 256
MAX_INDEXED_CHUNKS = 65_536
MAX_PENDING_PROMPT_TOKENS = 16_384
MAX_PENDING_S = 0.5
"""A worker where prompts of more than this time go before a prompt does not get it yet: what waits there has left the
queue's order, and `max_wait_s` does not bound it any more."""
STEP_TOKENS = 256
"""What may wait at a worker whatever its pace: enough for an efficient step (DESIGN.md, figures behind defaults)."""
PREFIX_WEIGHT = 0.25
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


_NOBODY = frozenset[str]()


class PrefixIndex:
    """Which worker processes were last given which prefixes: a bounded guess at their caches, oldest forgotten."""

    def __init__(self, max_chunks: int = MAX_INDEXED_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._holders: OrderedDict[int, frozenset[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, chain: Sequence[int], *incarnations: str) -> None:
        """These processes compute (or receive) the prefix of `chain`."""
        holders, new = self._holders, frozenset(incarnations)
        for link in chain:
            if (here := holders.get(link)) is None:
                holders[link] = new
            else:
                holders[link] = here | new
                holders.move_to_end(link)
        while len(holders) > self._max_chunks:
            holders.popitem(last=False)

    def num_matched_tokens(self, chain: Sequence[int], incarnation: str) -> int:
        """Prompt tokens at the start of `chain` that the process should hold."""
        matched = 0
        for link in chain:
            if incarnation not in self._holders.get(link, ()):
                break
            matched += CHUNK_TOKENS
        return matched

    def matches(self, chain: Sequence[int]) -> dict[str, int]:
        """`num_matched_tokens` of each process for which there are any."""
        found: dict[str, int] = {}
        here: Collection[str] = ()
        for num_matched, link in enumerate(chain):
            holders = self._holders.get(link, _NOBODY)
            still = holders.intersection(here) if num_matched else holders
            for incarnation in here if not still else [one for one in here if one not in still]:
                found[incarnation] = num_matched * CHUNK_TOKENS
            here = still
            if not here:
                break
        for incarnation in here:
            found[incarnation] = len(chain) * CHUNK_TOKENS
        return found

    def forget(self, incarnation: str) -> None:
        """The process is gone."""
        for link in self._held_by(incarnation):
            self._holders[link] -= {incarnation}

    def rename(self, incarnation: str, successor: str) -> None:
        """The process goes by another name, with the cache that it had."""
        for link in self._held_by(incarnation):
            self._holders[link] = self._holders[link] - {incarnation} | {successor}

    def _held_by(self, incarnation: str) -> list[int]:
        return [link for link, holders in self._holders.items() if incarnation in holders]


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


_Found = tuple[float, str, int, Worker]
"""A worker that could take the request: its cost, its name, the prompt tokens that it should hold. In the order of a
choice: names differ, so workers themselves are never compared."""


class _Wait(NamedTuple):
    """No worker had room for a request. That stays so until `until`, if neither a load has fallen since nor a prompt
    was timed: such were `num_falls` and `num_timed` then."""

    request: Request
    num_falls: int
    num_timed: int
    until: float


class Router:
    """Chooses workers: a function of the registry, the request, the prefix index, the prefill pace and the time.

    A worker that was not heard of for `quiet_s` gets nothing new: it may be frozen, long before its lease says so.

    Of many workers few are looked at: those that hold a part of the prompt, and of the others those with the least load
    (`Loads`). What was found to be impossible is not tried again until something has happened that may have made room.
    """

    def __init__(self, registry: Registry, pace: PrefillPace, answers: AnswerLengths, quiet_s: float) -> None:
        self._registry = registry
        self._pace = pace
        self._quiet_s = quiet_s
        self._index = PrefixIndex()
        self._hybrids = HybridChooser(registry, self.matched, answers)
        self._wait: _Wait | None = None

    def choose(self, request: Request, now: float) -> Route | None:
        """The best workers with room for the request now, or None: it waits.

        Prefill and colocated workers cost the prompt tokens to compute until this request's first token:
        those that wait there, plus its own without the matched prefix. On a colocated worker each sequence
        adds `SEQUENCE_COST_TOKENS`, for it takes part in every step. A decode worker costs its load after
        joining, the larger share of sequences or of KV slots, less `PREFIX_WEIGHT` for a wholly matched
        prefix. Only linked pairs count. Equal costs go to the first by name. A hybrid worker gets the request whole
        where that is predicted to be sooner (`coordinator/hybrid.py`).
        """
        if self._must_wait(request, now):
            return None
        route = self._find(request, now)
        self._wait = None if route is not None else self._wait_of(request, now)
        return route

    def _find(self, request: Request, now: float) -> Route | None:
        matches = {} if request.wants_prompt_logprobs else self._index.matches(request.prefix)
        colocated = self._with_prefill_cost(request, Role.COLOCATED, LegKind.GENERATE, matches, now)
        if first := list(islice(colocated, MAX_RECORDED_CANDIDATES)):
            return Route(first[0][-1], first[0][-1], _record(first, CostUnit.PROMPT_TOKENS))
        split = self._split(request, matches, now)
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

    def _split(self, request: Request, matches: Mapping[str, int], now: float) -> Route | None:
        prefills = self._with_prefill_cost(request, Role.PREFILL, LegKind.PREFILL, matches, now)
        first = list(islice(prefills, MAX_RECORDED_CANDIDATES))
        num_decode_workers = len(self._registry.of_role(Role.DECODE))
        for *_, prefill in chain(first, prefills):
            linked = self._registry.linked_to(prefill)
            has_all_links = len(linked) == num_decode_workers
            decodes = self._least_decode_cost(request, matches, None if has_all_links else linked, now)
            if decodes:
                tried = _record(first, CostUnit.PROMPT_TOKENS) + _record(decodes, CostUnit.SHARE)
                return Route(prefill, decodes[0][-1], tried)
            if has_all_links:
                return None
        return None

    # ── waiting ─────────────────────────────────────────────────────────────────────────────────────────────

    def _must_wait(self, request: Request, now: float) -> bool:
        """Whether nothing has happened that could make a choice of what was none."""
        wait = self._wait
        return (
            wait is not None
            and wait.request is request
            and now < wait.until
            and wait.num_falls == self._registry.num_falls()
            and wait.num_timed == self._pace.num_timed
        )

    def _wait_of(self, request: Request, now: float) -> _Wait | None:
        """Until when the request waits; None if whoever is heard of next may take it, or nobody can tell."""
        if self._registry.hybrids:
            return None
        until = inf
        for worker in self._registry:
            if worker.departure is not None or now - worker.seen_at > self._quiet_s:
                return None
            if worker.full_until > now:
                until = min(until, worker.full_until)
        return _Wait(request, self._registry.num_falls(), self._pace.num_timed, until)

    # ── what is known of caches ─────────────────────────────────────────────────────────────────────────────

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
        self._wait = None  # another that waits may share the prefix
        self._index.add(request.prefix, route.prefill.incarnation, route.decode.incarnation)

    def forget(self, worker: Worker) -> None:
        """The worker is gone, and its cache with it."""
        self._index.forget(worker.incarnation)

    def succeeded(self, incarnation: str, successor: str) -> None:
        """The process has another role now, under another incarnation, and has kept its cache."""
        self._index.rename(incarnation, successor)

    # ── who could take a request ────────────────────────────────────────────────────────────────────────────

    def _with_prefill_cost(
        self, request: Request, role: Role, kind: LegKind, matches: Mapping[str, int], now: float
    ) -> Iterator[_Found]:
        """The workers with room and time for the prompt, those with the least cost first."""
        num_tokens, max_slots, loads = request.num_tokens, request.max_slots, self._registry.loads[role]
        known: list[_Found] = []
        for worker, matched in self._holders(matches, role):
            if self._is_able(worker, kind, max_slots, now) and self._has_time(worker, num_tokens, matched):
                insort(known, (loads.load(worker) + num_tokens - matched, worker.worker_id, matched, worker))
        for load, name, worker in loads.in_order():
            cost = load + num_tokens
            while known and known[0] < (cost, name):
                yield known.pop(0)
            if (
                worker.incarnation not in matches
                and self._is_able(worker, kind, max_slots, now)
                and self._has_time(worker, num_tokens, 0)
            ):
                yield cost, name, 0, worker
        yield from known

    def _least_decode_cost(
        self, request: Request, matches: Mapping[str, int], linked: Mapping[str, Worker] | None, now: float
    ) -> list[_Found]:
        """The first few workers with room for the sequence, those with the least cost first; only of `linked`, unless
        that is None."""
        num_tokens, max_slots = request.num_tokens, request.max_slots

        def can_decode(worker: Worker) -> bool:
            is_linked = linked is None or worker.incarnation in linked
            return is_linked and self._is_able(worker, LegKind.DECODE, max_slots, now)

        found: list[_Found] = []
        for worker, matched in self._holders(matches, Role.DECODE):
            if can_decode(worker):
                self._registry.look_ahead(worker)
                _keep_first(found, _decode_cost(worker, num_tokens, matched))
        for load, name, worker in self._registry.loads[Role.DECODE].in_order():
            # A request never costs less than the load, so of those that follow none can be among the first any more.
            if len(found) == MAX_RECORDED_CANDIDATES and found[-1] < (load, name):
                break
            if worker.incarnation not in matches and can_decode(worker):
                _keep_first(found, _decode_cost(worker, num_tokens, 0))
        return found

    def _holders(self, matches: Mapping[str, int], role: Role) -> Iterator[tuple[Worker, int]]:
        """The workers of a role that should hold a part of the prompt, and how many of its tokens."""
        for incarnation, matched in matches.items():
            worker = self._registry.of_incarnation(incarnation)
            if worker is not None and worker.role is role:
                yield worker, matched

    def _has_time(self, worker: Worker, num_tokens: int, matched: int) -> bool:
        """Whether the prompt would start soon at the worker: behind less than `STEP_TOKENS` that go before it, or in at
        most `MAX_PENDING_S` at the measured pace, a hybrid's own. Before anything is measured only the former
        counts."""
        if worker.pending_tokens < STEP_TOKENS:
            return True
        if worker.pending_tokens + num_tokens > MAX_PENDING_PROMPT_TOKENS:
            return False
        before = worker.pending_before(num_tokens - matched)
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
        num_tokens = request.num_tokens
        for worker in self._registry.hybrids:
            if (
                worker.held_tokens + num_tokens + GROWTH_TOKENS <= worker.usable_slots
                and self._is_able(worker, LegKind.GENERATE, request.max_slots, now)
                and self._has_time(worker, num_tokens, self.matched(request, worker))
            ):
                yield worker

    def _is_able(self, worker: Worker, kind: LegKind, max_slots: int, now: float) -> bool:
        """Whether the worker stays in its pool, the whole request fits in, it has been heard of lately, did not just
        have to preempt, and, if it is to decode, holds fewer than `most_sequences`."""
        return (
            now >= worker.full_until
            and now - worker.seen_at <= self._quiet_s
            and worker.departure is None
            and max_slots <= worker.num_slots
            and (kind is LegKind.PREFILL or worker.num_sequences < worker.most_sequences)
        )


def _decode_cost(worker: Worker, num_tokens: int, matched: int) -> _Found:
    """What the sequence costs at the worker: see `choose`."""
    cost = share_taken(worker, num_tokens) - PREFIX_WEIGHT * matched / num_tokens
    return cost, worker.worker_id, matched, worker


def _keep_first(found: list[_Found], another: _Found) -> None:
    """Puts it in its place, if that is among the first few."""
    insort(found, another)
    del found[MAX_RECORDED_CANDIDATES:]


def _record(found: Sequence[_Found], unit: CostUnit) -> tuple[Candidate, ...]:
    """What was looked at, for the timeline."""
    return tuple([Candidate(worker_id, cost, unit, matched) for cost, worker_id, matched, _ in found])
