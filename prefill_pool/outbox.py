"""How KV goes out: hand-offs are granted, pushed, sealed and acknowledged, or given up; then their blocks come back.

`handoff.py` has the way of one; here are all of a worker, the decode workers that they go to, and what those say.
"""

from __future__ import annotations

from collections.abc import Iterator

from twinpool.config import SchedulerConfig
from twinpool.engine.block_pool import BlockPool
from twinpool.layout import KVLayout
from twinpool.messages import Dropped, DropReason, Message, PushTo, Revoke, RevokeAck, Seal, SealAck
from twinpool.metrics import Counters, WorkerMetric
from twinpool.prefill_pool.handoff import (
    ACTIVE,
    RENEWALS_PER_LEASE,
    Handoff,
    HandoffState,
    Peer,
    RevokedFences,
    renewals,
)
from twinpool.prefill_pool.scheduler import PrefillScheduler, Prompt
from twinpool.request import RequestKey
from twinpool.worker.core import (
    Command,
    FinishPush,
    Push,
    PushFinished,
    SendCoordinator,
    SendPeer,
    StopPush,
)


class Outbox:
    """All hand-offs of one prefill worker. What it decides goes to `commands`, in order.

    Those in `in_step` are being computed: until their step ends, nothing of theirs is pushed or released from here.
    """

    def __init__(
        self,
        pool: BlockPool,
        scheduler: PrefillScheduler,
        layout: KVLayout,
        fingerprint: str,
        config: SchedulerConfig,
        counters: Counters,
        commands: list[Command],
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._layout = layout
        self._fingerprint = fingerprint
        self._renew_every_s = config.transfer_timeout_s / RENEWALS_PER_LEASE
        self._renewed_at = 0.0
        self._counters = counters
        self._commands = commands
        self._jobs: dict[RequestKey, Handoff] = {}
        self._by_fence: dict[int, Handoff] = {}
        self._links: set[Peer] = set()
        self._revoked = RevokedFences()
        self.in_step: frozenset[RequestKey] = frozenset()

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._jobs

    def __getitem__(self, key: RequestKey) -> Handoff:
        return self._jobs[key]

    def __iter__(self) -> Iterator[Handoff]:
        return iter(self._jobs.values())

    @property
    def num_granted(self) -> int:
        """Hand-offs whose room decode has granted."""
        return len(self._by_fence)

    def add(self, prompt: Prompt) -> None:
        """The prompt's KV is to be handed to a decode worker, which is to grant room."""
        self._jobs[prompt.key] = Handoff(prompt)

    # ── decode workers ────────────────────────────────────────────────────────────────────────────────────

    def link(self, peer: Peer) -> None:
        """KV can be pushed to `peer` from now on."""
        self._links.add(peer)

    def link_lost(self, peer: Peer) -> None:
        """Nothing can be pushed to `peer` any more, which may live on."""
        self._links.discard(peer)
        for job in [job for job in self._by_fence.values() if job.peer == peer and job.awaits_seal]:
            self._fail(job, f"the link to {peer[0]} is lost")

    def peer_gone(self, peer: Peer) -> None:
        """That process is no more, and what it granted with it."""
        self._links.discard(peer)
        self._revoked.forget(peer)
        for job in [job for job in self._by_fence.values() if job.peer == peer and not job.ending]:
            self._fail(job, f"{peer[0]} is gone")

    def from_peer(self, peer: Peer, message: Message) -> None:
        """A decode worker answers a Seal, or takes a grant back."""
        match message:
            case SealAck(_, fence, error):
                self._seal_ack(peer, fence, error)
            case Revoke(key, fence):
                self._revoke(peer, key, fence)
            case _:
                self._counters.add(WorkerMetric.JUNK_MESSAGES)

    def minds_time(self, now: float) -> bool:
        """Whether it is time to `renew`."""
        return now - self._renewed_at >= self._renew_every_s

    def renew(self, now: float) -> None:
        """Time has passed: decode workers hear that their grants are held, when it is time for it."""
        if not self.minds_time(now):
            return
        self._renewed_at = now
        self._commands += renewals(self._by_fence.values())

    # ── the way of one hand-off ───────────────────────────────────────────────────────────────────────────

    def grant(self, grant: PushTo) -> None:
        """A decode worker has room. A grant that does not fit the job, or comes too late, ends it or counts for
        nothing."""
        job = self._jobs.get(grant.key)
        peer = (grant.decode_worker, grant.decode_incarnation)
        was_revoked = self._revoked.take(peer, grant.fence)
        if job is None or job.ending or job.state is not HandoffState.WAITING:
            self._counters.add(WorkerMetric.STALE_FENCES)
        elif was_revoked:
            self.end(job, Dropped(job.key, DropReason.REVOKED, "the grant was revoked before it came"))
        elif peer not in self._links:
            self._fail(job, f"no link to {peer[0]}/{peer[1]}")
        elif grant.fence in self._by_fence:
            self._fail(job, f"fence {grant.fence} is in use for another worker")
        elif len(grant.block_ids) != (needed := self._pool.blocks_for(job.prompt.num_tokens)):
            self._fail(job, f"{len(grant.block_ids)} blocks were granted, {needed} are needed")
        else:
            job.accept(grant)
            self._by_fence[grant.fence] = job
            self.advance(job)

    def advance(self, job: Handoff) -> None:
        """Does what is due for the job between two events: pushes, the end of pushing, or letting go."""
        if job.ending:
            self._wind_down(job)
            return
        if job.key in self.in_step or job.state is not HandoffState.PUSHING or job.grant is None:
            return
        if push := job.take_push(job.prompt.num_done, self._pool.block_size):
            self._commands.append(Push(push))
        if job.first_token is None or job.prompt.table is None:
            return
        if sent := job.sent_blocks(job.prompt.table.block_ids):
            job.move(HandoffState.FINISHING)
            self._commands.append(FinishPush(job.grant.fence, job.grant.decode_worker, sent))
        else:
            self._seal(job, None)

    def push_finished(self, event: PushFinished) -> None:
        """All bytes of a hand-off are handed over: it is sealed."""
        job = self._by_fence.get(event.fence)
        if job is None or job.state is not HandoffState.FINISHING or job.ending:
            return
        self._counters.add(WorkerMetric.BLOCKS_SENT, len(event.digests))
        self._counters.add(WorkerMetric.BYTES_SENT, event.num_bytes)
        self._counters.add(WorkerMetric.TRANSFER_SECONDS, event.transfer_s)
        self._seal(job, event)

    def push_failed(self, fence: int, reason: str) -> None:
        """Nothing more is written under `fence`, and not all was."""
        job = self._by_fence.get(fence)
        if job is None or job.state not in ACTIVE:
            return
        job.move(HandoffState.CLOSED)
        if job.ending:
            self._wind_down(job)
        else:
            self._fail(job, reason)

    def push_stopped(self, fence: int) -> None:
        """Nothing more is written under `fence`, as was asked for."""
        job = self._by_fence.get(fence)
        if job and job.state is HandoffState.STOPPING:
            job.move(HandoffState.CLOSED)
            self._wind_down(job)

    def end(self, job: Handoff, farewell: Dropped | None) -> None:
        """The job is over here. Its blocks and `farewell` go when nothing reads or writes them any more."""
        job.ending = True
        job.farewell = farewell
        self._scheduler.withdraw(job.key)
        self._wind_down(job)

    def _seal(self, job: Handoff, finished: PushFinished | None) -> None:
        job.move(HandoffState.SEALED)
        if job.grant:
            job.seal = Seal(job.manifest(self._fingerprint, self._layout, finished))
            self._counters.add(WorkerMetric.BLOCKS_SKIPPED, job.grant.num_cached_blocks)
            self._commands.append(SendPeer(job.grant.decode_worker, job.grant.decode_incarnation, job.seal))

    def _seal_ack(self, peer: Peer, fence: int, error: str) -> None:
        job = self._granted_by(peer, fence)
        if job is None or job.state is not HandoffState.SEALED:
            self._counters.add(WorkerMetric.STALE_FENCES)
        elif error:
            self._fail(job, error)
        else:
            job.move(HandoffState.CLOSED)
            self.end(job, None)

    def _revoke(self, peer: Peer, key: RequestKey, fence: int) -> None:
        if (job := self._granted_by(peer, fence)) is None:
            self._revoked.remember(peer, fence)
            self._commands.append(SendPeer(*peer, RevokeAck(key, fence)))
            return
        job.num_acks_owed += 1
        if not job.ending:
            self.end(job, Dropped(job.key, DropReason.REVOKED, f"{peer[0]} revoked its grant"))

    def _fail(self, job: Handoff, detail: str) -> None:
        self._counters.add(WorkerMetric.TRANSFER_FAILURES)
        self.end(job, Dropped(job.key, DropReason.TRANSFER, detail))

    def _wind_down(self, job: Handoff) -> None:
        if job.key in self.in_step or job.state is HandoffState.STOPPING:
            return
        if job.state in ACTIVE and job.grant:
            # Never while a step runs that pushes under this fence: what comes after a stop would go astray.
            job.move(HandoffState.STOPPING)
            self._commands.append(StopPush(job.grant.fence, job.grant.decode_worker))
            return
        if job.prompt.table:
            self._pool.release(job.prompt.table)
        del self._jobs[job.key]
        if grant := job.grant:
            del self._by_fence[grant.fence]
            self._commands += job.acks_owed()
        if job.farewell:
            self._commands.append(SendCoordinator(job.farewell))

    def _granted_by(self, peer: Peer, fence: int) -> Handoff | None:
        job = self._by_fence.get(fence)
        return job if job and job.peer == peer else None
