"""The router's choice in its plain form: every worker is looked at, and all that could take the request are sorted."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from twinpool.config import Role
from twinpool.coordinator.lifecycle import Request
from twinpool.coordinator.pace import PrefillPace
from twinpool.coordinator.registry import GROWTH_TOKENS, SEQUENCE_COST_TOKENS, Registry
from twinpool.coordinator.routing import (
    MAX_PENDING_PROMPT_TOKENS,
    MAX_PENDING_S,
    MAX_RECORDED_CANDIDATES,
    PREFIX_WEIGHT,
    STEP_TOKENS,
)
from twinpool.coordinator.timeline import Candidate, CostUnit
from twinpool.coordinator.worker import Worker

_Found = tuple[float, str, int, Worker]


class Chosen(NamedTuple):
    """The workers of a route, and what was looked at first."""

    prefill: str
    decode: str
    candidates: tuple[Candidate, ...]


class ExhaustiveRouter:
    """Chooses for requests that no worker is a hybrid for. `matched` tells the prompt tokens that a worker holds."""

    def __init__(
        self,
        registry: Registry,
        pace: PrefillPace,
        quiet_s: float,
        matched: Callable[[Request, Worker], int],
    ) -> None:
        self._registry = registry
        self._pace = pace
        self._quiet_s = quiet_s
        self._matched = matched

    def choose(self, request: Request, now: float) -> Chosen | None:
        """The best workers with room, None if there are none."""
        if colocated := self._computing(request, Role.COLOCATED, now):
            name = colocated[0][1]
            return Chosen(name, name, _told(colocated, CostUnit.PROMPT_TOKENS))
        prefills = self._computing(request, Role.PREFILL, now)
        decodes = self._decoding(request, now)
        for *_, prefill in prefills:
            linked = self._registry.linked_to(prefill)
            if reachable := [found for found in decodes if found[-1].incarnation in linked]:
                told = _told(prefills, CostUnit.PROMPT_TOKENS) + _told(reachable, CostUnit.SHARE)
                return Chosen(prefill.worker_id, reachable[0][1], told)
        return None

    def _computing(self, request: Request, role: Role, now: float) -> list[_Found]:
        found: list[_Found] = []
        for worker in self._registry.of_role(role):
            matched = self._matched(request, worker)
            if self._may_have(worker, request, now) and self._starts_soon(worker, request, matched):
                cost = worker.pending_tokens + request.num_tokens - matched
                if role is Role.COLOCATED:
                    cost += SEQUENCE_COST_TOKENS * len(worker.legs)
                found.append((cost, worker.worker_id, matched, worker))
        return sorted(found)

    def _decoding(self, request: Request, now: float) -> list[_Found]:
        found: list[_Found] = []
        for worker in self._registry.of_role(Role.DECODE):
            if self._may_have(worker, request, now):
                sequences = (len(worker.legs) + 1) / worker.max_num_seqs
                slots = (worker.held_tokens + (request.num_tokens + GROWTH_TOKENS)) / worker.usable_slots
                matched = self._matched(request, worker)
                cost = max(sequences, slots) - PREFIX_WEIGHT * matched / request.num_tokens
                found.append((cost, worker.worker_id, matched, worker))
        return sorted(found)

    def _may_have(self, worker: Worker, request: Request, now: float) -> bool:
        return (
            now >= worker.full_until
            and now - worker.seen_at <= self._quiet_s
            and worker.departure is None
            and request.max_slots <= worker.num_slots
            and (worker.role is Role.PREFILL or worker.num_sequences < worker.most_sequences)
        )

    def _starts_soon(self, worker: Worker, request: Request, matched: int) -> bool:
        if worker.pending_tokens < STEP_TOKENS:
            return True
        if worker.pending_tokens + request.num_tokens > MAX_PENDING_PROMPT_TOKENS:
            return False
        before = worker.pending_before(request.num_tokens - matched)
        return before < STEP_TOKENS or 0 < self._pace.seconds_before(before) <= MAX_PENDING_S


def _told(found: list[_Found], unit: CostUnit) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(name, cost, unit, matched) for cost, name, matched, _ in found[:MAX_RECORDED_CANDIDATES]
    )
