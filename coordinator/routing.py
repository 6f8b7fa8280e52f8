"""Which workers run a request: predicted work against the prefix that a worker should already hold."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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

    def matches(self, chain: Sequence[int]) -> dict[str, int]:
        """`num_matched_tokens` of each process for which there are any."""
        found: dict[str, int] = {}
        here: Collection[str] = ()
        for num_matched, link in enumerate(chain):
            holders = self._holders.get(link, set())
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


_Found = tuple[float, str, int, Worker]
"""A worker that could take the request: its cost, its name, the prompt tokens that it should hold. In the order of a
choice: names differ, so workers themselves are never compared."""


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
        matches = {} if request.wants_prompt_logprobs else self._index.matches(request.prefix)
        colocated = self._with_prefill_cost(request, Role.COLOCATED, LegKind.GENERATE, matches, now)
        if colocated:
            return Route(colocated[0][-1], colocated[0][-1], _record(colocated, CostUnit.PROMPT_TOKENS))
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
        if not prefills:
            return None
        decodes = self._with_decode_cost(request, matches, now)
        num_decode_workers = len(self._registry.of_role(Role.DECODE))
        for *_, prefill in prefills if decodes else ():
            linked, reachable = self._registry.linked_to(prefill), decodes
            if len(linked) < num_decode_workers:
                reachable = [found for found in decodes if found[-1].incarnation in linked]
            if reachable:
                tried = _record(prefills, CostUnit.PROMPT_TOKENS) + _record(reachable, CostUnit.SHARE)
                return Route(prefill, reachable[0][-1], tried)
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

    def _with_prefill_cost(
        self, request: Request, role: Role, kind: LegKind, matches: Mapping[str, int], now: float
    ) -> list[_Found]:
        """The workers with room and time for the prompt, those with the least cost first."""
        found: list[_Found] = []
        num_tokens = request.num_tokens
        for worker in self._able(self._registry.of_role(role), kind, request, now):
            matched = matches.get(worker.incarnation, 0)
            if worker.pending_tokens >= STEP_TOKENS and not self._has_time(worker, num_tokens, matched):
                continue
            cost = worker.pending_tokens + num_tokens - matched
            if kind is LegKind.GENERATE:
                cost += SEQUENCE_COST_TOKENS * len(worker.legs)
            found.append((cost, worker.worker_id, matched, worker))
        return sorted(found)

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
        for worker in self._able(self._registry.hybrids, LegKind.GENERATE, request, now):
            if worker.held_tokens + num_tokens + GROWTH_TOKENS <= worker.usable_slots and self._has_time(
                worker, num_tokens, self.matched(request, worker)
            ):
                yield worker

    def _able(self, workers: Iterable[Worker], kind: LegKind, request: Request, now: float) -> list[Worker]:
        """Those that stay in their pool, which the whole request fits in, have been heard of lately, did not just have
        to preempt, and, if they are to decode, hold fewer than `most_sequences`."""
        quiet_s, max_slots, prefills = self._quiet_s, request.max_slots, kind is LegKind.PREFILL
        return [
            worker
            for worker in workers
            if now >= worker.full_until
            and now - worker.seen_at <= quiet_s
            and worker.departure is None
            and max_slots <= worker.num_slots
            and (prefills or worker.num_sequences < worker.most_sequences)
        ]

    def _with_decode_cost(self, request: Request, matches: Mapping[str, int], now: float) -> list[_Found]:
        """The workers with room for the sequence, those with the least cost first."""
        able = self._able(self._registry.of_role(Role.DECODE), LegKind.DECODE, request, now)
        num_tokens = request.num_tokens
        num_grown = num_tokens + GROWTH_TOKENS
        shares = [
            (
                (len(worker.legs) + 1) / worker.max_num_seqs,
                (worker.held_tokens + num_grown) / worker.usable_slots,
                worker,
            )
            for worker in able
        ]
        if not matches:
            return sorted(
                (sequences if sequences > slots else slots, worker.worker_id, 0, worker)
                for sequences, slots, worker in shares
            )
        found: list[_Found] = []
        for sequences, slots, worker in shares:
            matched = matches.get(worker.incarnation, 0)
            cost = max(sequences, slots) - PREFIX_WEIGHT * matched / num_tokens
            found.append((cost, worker.worker_id, matched, worker))
        return sorted(found)


def _record(found: Sequence[_Found], unit: CostUnit) -> tuple[Candidate, ...]:
    """The first few, for the timeline."""
    return tuple(
        Candidate(worker_id, cost, unit, matched)
        for cost, worker_id, matched, _ in found[:MAX_RECORDED_CANDIDATES]
    )
