"""What members tell of requests and of themselves while they work: tokens, grants, hand-offs, what they let go of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinpool.config import Role
from twinpool.coordinator.custody import LACK_OF_ROOM, Custody
from twinpool.coordinator.delivery import Delivery
from twinpool.coordinator.events import Command, Note
from twinpool.coordinator.health import Health
from twinpool.coordinator.hybrid import capability
from twinpool.coordinator.lifecycle import LegKind, Move
from twinpool.coordinator.lockstep import Lockstep
from twinpool.coordinator.membership import Membership
from twinpool.coordinator.pace import PrefillPace
from twinpool.coordinator.tally import Tally
from twinpool.coordinator.worker import Worker
from twinpool.errors import RequestFailed
from twinpool.messages import (
    Dropped,
    DropReason,
    Granted,
    HandoffReport,
    Heartbeat,
    LockstepTokens,
    Message,
    PrefillReport,
    PromptLogprobs,
    PushTo,
    StepTokens,
)
from twinpool.metrics import CoordinatorMetric
from twinpool.request import FinishReason, RequestState

FULL_PAUSE_S = 0.2
"""A worker that sent a job back for lack of room gets nothing new for so long: it would only send it back again."""


class Reports:
    """Takes what live workers say; the rest is `membership`'s. `prefill` is how prompts are computed; `emit` takes
    commands in order."""

    def __init__(
        self,
        custody: Custody,
        delivery: Delivery,
        membership: Membership,
        health: Health,
        prefill: PrefillPace,
        tally: Tally,
        emit: Callable[[Command], None],
    ) -> None:
        self._custody = custody
        self._delivery = delivery
        self._membership = membership
        self._health = health
        self._prefill = prefill
        self._tally = tally
        self._emit = emit
        self._lockstep = Lockstep(custody, delivery, tally, emit)
        self._takes: Mapping[type[Message], Callable[[Worker, Any, float], None]] = {
            StepTokens: self._on_tokens,
            LockstepTokens: self._on_step,
            PrefillReport: self._on_prefilled,
            PromptLogprobs: self._on_prompt_logprobs,
            Granted: self._on_granted,
            HandoffReport: self._on_handoff,
            Dropped: self._on_dropped,
            Heartbeat: self._on_heartbeat,
        }

    def take(self, worker: Worker, message: Message, now: float) -> None:
        """Takes a message of a worker that has joined."""
        worker.seen_at = now
        take = self._takes.get(type(message), self._membership.from_member)
        take(worker, message, now)

    def count_steps(self, worker: Worker, times: Sequence[float]) -> bool:
        """Steps of a worker in lockstep have ended at these times, and nothing but its streams' tokens came of them.
        Says whether they were counted, as `Lockstep.take_quiet` does."""
        worker.seen_at = max(worker.seen_at, times[-1])
        self._health.moved(times[-1])
        return self._lockstep.take_quiet(worker, times)

    def take_step(self, worker: Worker, message: LockstepTokens, now: float) -> None:
        """Takes a step that `count_steps` could not count."""
        self._lockstep.take(worker, message, now)

    def lost(self, worker: Worker) -> None:
        """Books what the worker has told in lockstep: it is lost, and says no more."""
        self._lockstep.end(worker)

    def catch_up(self) -> None:
        """Books all tokens that have been told."""
        self._lockstep.catch_up()

    def _on_tokens(self, worker: Worker, message: StepTokens, now: float) -> None:
        self._health.moved(now)
        self._lockstep.end(worker)
        for token in message.tokens:
            if (leg := self._custody.leg_of(worker, token.key)) is not None:
                self._delivery.take(leg, token, now)

    def _on_step(self, worker: Worker, message: LockstepTokens, now: float) -> None:
        self._health.moved(now)
        self._lockstep.take(worker, message, now)

    def _on_prefilled(self, worker: Worker, report: PrefillReport, _now: float) -> None:
        if (leg := self._custody.leg_of(worker, report.key)) is not None:
            worker.prompt_computed(leg)
            if worker.role is not Role.DECODE:  # a hybrid one computes in the gaps between its steps
                self._prefill.computed(report.num_computed, report.compute_s)
            leg.request.timeline.attempts[-1].prefill = report

    def _on_prompt_logprobs(self, worker: Worker, message: PromptLogprobs, now: float) -> None:
        if (leg := self._custody.leg_of(worker, message.key)) is not None:
            self._delivery.take_prompt_logprobs(leg, message, now)

    def _on_granted(self, worker: Worker, grant: Granted, _now: float) -> None:
        if (leg := self._custody.leg_of(worker, grant.key, LegKind.DECODE)) is None:
            return
        request = leg.request
        request.timeline.attempts[-1].grant_wait_s = grant.wait_s
        if (prefill := request.leg(LegKind.PREFILL)) is not None:
            self._custody.send(
                prefill.worker,
                PushTo(
                    key=grant.key,
                    decode_worker=worker.worker_id,
                    decode_incarnation=worker.incarnation,
                    fence=grant.fence,
                    block_ids=grant.block_ids,
                    num_cached_blocks=grant.num_cached_blocks,
                ),
            )

    def _on_handoff(self, worker: Worker, report: HandoffReport, now: float) -> None:
        if (leg := self._custody.leg_of(worker, report.key, LegKind.DECODE)) is None:
            return
        request = leg.request
        request.handed_off = True
        request.timeline.attempts[-1].handoff = report
        # It may overtake the first token, which comes over the other worker's connection.
        if request.state is RequestState.TRANSFERRING:
            self._custody.move(request, Move.HAND_OFF, now)

    def _on_heartbeat(self, worker: Worker, message: Heartbeat, now: float) -> None:
        stats = message.stats
        self._health.heard(worker, stats, now)
        is_first_pace = worker.pace is None and stats.pace is not None
        worker.says(stats)
        if is_first_pace:
            self._emit(Note(capability(worker)))

    def _on_dropped(self, worker: Worker, dropped: Dropped, now: float) -> None:
        leg = worker.legs.get(dropped.key)
        if leg is None:
            self._tally.add(CoordinatorMetric.STALE_MESSAGES)
            return
        self._lockstep.dropped(worker, dropped.key)
        was_cancelled = leg.cancelled_at is not None
        if dropped.reason in LACK_OF_ROOM:
            worker.full_until = now + FULL_PAUSE_S
            # Also when another worker's word about the same attempt came first.
            leg.request.uncharged_attempts.add(leg.key.attempt)
        self._custody.close(leg)
        if was_cancelled:
            self._custody.settle(leg.request, now)
        elif dropped.reason == DropReason.REVOKED and leg.request.leg(LegKind.DECODE) is not None:
            pass  # decode ended the attempt, and its word, which says why, is on the way
        elif dropped.reason == DropReason.REFUSED:
            error = RequestFailed(
                f"worker {worker.worker_id} cannot run the request: {dropped.detail or 'refused'}"
            )
            self._custody.end(leg.request, Move.FAIL, FinishReason.ERROR, now, error=error)
        else:
            self._custody.resume(leg.request, dropped.reason, now, detail=dropped.detail)
