"""How KV comes in: room is reserved, granted to one writer, sealed by it, verified here, and joins the batch.

::

    WAITING ──room──► GRANTED ──Seal──► VERIFYING ──all there──► joins the batch
       └── cancelled, writer gone ──┴── expired ──┴── corrupt ──► dropped; its blocks by way of quarantine

The lease of a grant is this worker's own: it runs out `transfer_timeout_s` after the grant, or after the last
Renew of the writer, which renews for as long as it holds the job, queued or not. So a long queue at prefill
never costs a grant, and a writer that died, froze or forgot the job loses it without anybody telling. While
bytes are verified the lease does not run: `Verify` has its own bound and is always answered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.config import SchedulerConfig
from twinpool.decode_pool.scheduler import num_kv_tokens, why_never_fits
from twinpool.engine.block_pool import BlockPool, BlockTable
from twinpool.engine.prefix_chain import Chains, PrefixChain
from twinpool.errors import InvariantViolation
from twinpool.kv_transfer.connector import TWO_SIDED
from twinpool.kv_transfer.ledger import OwnershipLedger, Writer
from twinpool.layout import KVLayout
from twinpool.messages import (
    Dropped,
    DropReason,
    Granted,
    HandoffReport,
    Manifest,
    Message,
    Reserve,
    Revoke,
    SealAck,
)
from twinpool.metrics import Counters, WorkerMetric
from twinpool.request import Job, RequestKey
from twinpool.worker.core import (
    CancelReceive,
    Command,
    PostReceive,
    SendCoordinator,
    SendPeer,
    Verified,
    Verify,
)

WAITING_PER_SLOT = 4
"""Reservations that may wait for room, per slot of the batch. Those beyond are sent back: there is no room."""


class IntakeState(StrEnum):
    """Where an arrival is."""

    WAITING = "waiting"
    GRANTED = "granted"
    VERIFYING = "verifying"


@dataclass(slots=True, eq=False)
class Arrival:
    """A job whose KV is to come from `writer`. From GRANTED on it owns `table`, of which the writer may write
    the prompt's blocks that were not cached, under `fence`."""

    job: Job
    writer: Writer
    transport: str
    chain: PrefixChain
    arrived_at: float
    state: IntakeState = IntakeState.WAITING
    table: BlockTable | None = None
    fence: int = 0
    num_prompt_blocks: int = 0
    manifest: Manifest | None = None
    key: RequestKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.job.key

    @property
    def written_blocks(self) -> tuple[int, ...]:
        """The blocks that the writer may write, in order."""
        return self.table.block_ids[self.table.num_cached : self.num_prompt_blocks] if self.table else ()


class Intake:
    """All arrivals of one decode worker. What it decides goes to `commands`, in order."""

    def __init__(
        self,
        pool: BlockPool,
        ledger: OwnershipLedger,
        layout: KVLayout,
        fingerprint: str,
        config: SchedulerConfig,
        counters: Counters,
        commands: list[Command],
        chains: Chains,
    ) -> None:
        self._pool = pool
        self._ledger = ledger
        self._layout = layout
        self._fingerprint = fingerprint
        self._headroom_tokens = config.headroom_tokens
        self._timeout_s = config.transfer_timeout_s
        self._grant_timeout_s = config.grant_timeout_s
        self._max_waiting = WAITING_PER_SLOT * config.max_num_seqs
        self._counters = counters
        self._commands = commands
        self._chains = chains
        self._links: dict[Writer, str] = {}
        self._waiting: dict[RequestKey, Arrival] = {}
        self._granted: dict[RequestKey, Arrival] = {}
        self._by_fence: dict[int, Arrival] = {}

    @property
    def num_granted(self) -> int:
        """Arrivals that have their room: they will need a slot of the batch."""
        return len(self._granted)

    @property
    def waiting(self) -> Collection[Arrival]:
        """Arrivals without room yet, in order."""
        return self._waiting.values()

    @property
    def granted(self) -> Iterable[Arrival]:
        """Arrivals with room, in order."""
        return self._granted.values()

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._waiting or key in self._granted

    # ── the way in ────────────────────────────────────────────────────────────────────────────────────────

    def link(self, writer: Writer, transport: str) -> None:
        """KV comes from `writer` over `transport` from now on."""
        self._links[writer] = transport

    def reserve(self, message: Reserve, now: float) -> None:
        """Puts the job at the end of the line; or refuses it for good, or for now if the line is full."""
        job, writer = message.job, Writer(message.prefill_worker, message.prefill_incarnation)
        if (transport := self._links.get(writer)) is None:
            self._tell(
                Dropped(job.key, DropReason.TRANSFER, f"no link from {writer.worker_id}/{writer.incarnation}")
            )
            return
        if (detail := why_never_fits(job, self._pool)) is not None:
            self._counters.add(WorkerMetric.REFUSED)
            self._tell(Dropped(job.key, DropReason.REFUSED, detail))
            return
        if len(self._waiting) >= self._max_waiting:
            self._counters.add(WorkerMetric.NO_ROOM)
            detail = f"{len(self._waiting)} reservations wait for room already, as many as may"
            self._tell(Dropped(job.key, DropReason.NO_ROOM, detail))
            return
        arrival = Arrival(job, writer, transport, self._chains(job), now)
        self._waiting[arrival.key] = arrival

    def grant(self, num_slots: int, now: float) -> None:
        """Gives room to those who wait, first come first served, at most `num_slots` of them."""
        for arrival in list(self._waiting.values())[:num_slots]:
            if not self._try_grant(arrival, now):
                return

    def renew(self, writer: Writer, fences: Sequence[int], now: float) -> None:
        """The writer still holds these jobs."""
        for fence in fences:
            if (arrival := self._by_fence.get(fence)) and arrival.writer == writer:
                self._ledger.renew(fence, now)

    def seal(self, writer: Writer, manifest: Manifest, now: float) -> Arrival | None:
        """All bytes are on their way. Returns the arrival if none had to come: then it is complete now."""
        if not self._ledger.sealed(manifest.fence, writer, now):
            if self._ledger.has_ended(manifest.fence):  # it was answered, and the answer was lost
                self._send(writer, SealAck(manifest.key, manifest.fence))
            return None
        arrival = self._by_fence[manifest.fence]
        arrival.state = IntakeState.VERIFYING
        arrival.manifest = manifest
        if error := self._objection(arrival, manifest):
            self._reject(arrival, error, now)
            return None
        if not arrival.written_blocks:
            return self._accept(arrival, manifest, 0.0)
        # What the sender needed for these bytes, they may need once more to arrive.
        self._commands.append(Verify(manifest, self._timeout_s + manifest.transfer_s))
        return None

    def verified(self, event: Verified, now: float) -> Arrival | None:
        """The bytes were looked at. Returns the arrival, which is the caller's from now on, if all is well."""
        arrival = self._by_fence.get(event.fence)
        if arrival is None or arrival.manifest is None:
            return None
        if event.error:
            self._counters.add(WorkerMetric.DIGEST_MISMATCHES, event.num_mismatched)
            self._reject(arrival, event.error, now)
            return None
        return self._accept(arrival, arrival.manifest, event.wait_s)

    # ── the ways out ──────────────────────────────────────────────────────────────────────────────────────

    def drop(self, key: RequestKey, reason: DropReason, detail: str, now: float) -> None:
        """Takes the job out, wherever it is here, and says so to the coordinator."""
        if (arrival := self._granted.get(key)) is not None:
            self._revoke(arrival, detail or reason, now)
        else:
            del self._waiting[key]
        self._tell(Dropped(key, reason, detail))

    def preempt_youngest(self, now: float) -> None:
        """The running sequences need room and have nothing left to give: the last grant is taken back."""
        if self._granted:
            self._counters.add(WorkerMetric.PREEMPTIONS)
            self.drop(
                next(reversed(self._granted)), DropReason.PREEMPTED, "a running sequence needed the room", now
            )

    def expire(self, now: float) -> None:
        """Takes back the grants whose lease has run out, reminds writers that owe an acknowledgement, and sends back
        the jobs that have waited too long for room."""
        for held in self._ledger.unacknowledged(now):
            self._send(held.writer, Revoke(held.key, held.fence))
        for fence in self._ledger.expired(now):
            arrival = self._by_fence[fence]
            if arrival.state is IntakeState.VERIFYING:
                self._ledger.renew(fence, now)
                continue
            self._counters.add(WorkerMetric.EXPIRED)
            detail = f"{arrival.writer.worker_id} gave no sign of this transfer for {self._timeout_s} s"
            self.drop(arrival.key, DropReason.DEADLINE, detail, now)
        detail = f"no room came free for it within {self._grant_timeout_s:g} s"
        for arrival in [a for a in self._waiting.values() if now - a.arrived_at >= self._grant_timeout_s]:
            self._counters.add(WorkerMetric.NO_ROOM)
            self.drop(arrival.key, DropReason.NO_ROOM, detail, now)

    def minds_time(self, now: float) -> bool:
        """Whether `expire` would do something at `now`, or may let somebody in who waits."""
        return len(self._waiting) > 0 or self._ledger.next_deadline <= now

    def writer_gone(self, writer: Writer, now: float) -> None:
        """That process writes no more. What it has not sealed is lost."""
        self._pool.end_quarantine(self._ledger.writer_gone(writer).released)
        self.writer_lost(writer, now)

    def writer_lost(self, writer: Writer, now: float) -> None:
        """That process counts as lost, but may still write: what it has not sealed is lost, and the blocks stay in
        quarantine until it has acknowledged or is gone."""
        self._links.pop(writer, None)
        lost = [a for a in (*self._waiting.values(), *self._granted.values()) if a.writer == writer]
        for arrival in lost:
            if arrival.state is not IntakeState.VERIFYING:
                self._counters.add(WorkerMetric.TRANSFER_FAILURES)
                self.drop(arrival.key, DropReason.TRANSFER, f"{writer.worker_id} is gone", now)

    def writer_acknowledged(self, fence: int, writer: Writer) -> None:
        """The writer has stopped writing under a revoked fence."""
        if self._ledger.has_ended(fence) and self._links.get(writer) in TWO_SIDED:
            return  # `_revoke` did not wait for this word
        self._pool.end_quarantine(self._ledger.writer_acknowledged(fence, writer))

    def receive_cancelled(self, fence: int) -> None:
        """This side lets nothing in any more under a revoked fence."""
        self._pool.end_quarantine(self._ledger.receive_cancelled(fence))

    # ── moves ─────────────────────────────────────────────────────────────────────────────────────────────

    def _try_grant(self, arrival: Arrival, now: float) -> bool:
        pool, job = self._pool, arrival.job
        num_blocks = pool.blocks_for(num_kv_tokens(job, self._headroom_tokens))
        if (table := pool.try_reserve(num_blocks, arrival.chain.digests)) is None:
            return False
        arrival.table = table
        arrival.num_prompt_blocks = pool.blocks_for(len(job.token_ids))
        blocks, writer = arrival.written_blocks, arrival.writer
        key, arrival.state = arrival.key, IntakeState.GRANTED
        arrival.fence = self._ledger.open(key, writer, blocks, now, self._timeout_s)
        del self._waiting[key]
        self._granted[key] = self._by_fence[arrival.fence] = arrival
        if blocks:
            self._commands.append(PostReceive(arrival.fence, writer.worker_id, writer.incarnation, blocks))
        self._tell(
            Granted(
                key=key,
                fence=arrival.fence,
                block_ids=table.block_ids[: arrival.num_prompt_blocks],
                num_cached_blocks=table.num_cached,
                wait_s=now - arrival.arrived_at,
            )
        )
        return True

    def _objection(self, arrival: Arrival, manifest: Manifest) -> str:
        wanted = (arrival.key, len(arrival.job.token_ids))
        if (manifest.key, manifest.num_tokens) != wanted:
            found = f"{manifest.key} with {manifest.num_tokens} tokens"
            return f"the manifest is of {found}; granted was {wanted[0]} with {wanted[1]}"
        granted, sent = arrival.written_blocks, manifest.block_ids
        if sent != granted:
            odd = sorted(set(sent) ^ set(granted))[:4]  # a long prompt's blocks would fill pages
            return f"the manifest names {len(sent)} blocks, granted were {len(granted)}; " + (
                f"only one of them has blocks like {odd}" if odd else "in another order"
            )
        if len(manifest.digests) != len(sent):
            return f"the manifest has {len(manifest.digests)} digests for {len(sent)} blocks"
        if manifest.fingerprint != self._fingerprint or manifest.layout != self._layout:
            return (
                f"the manifest is for {manifest.fingerprint} in {manifest.layout}; "
                f"here is {self._fingerprint} in {self._layout}"
            )
        return ""

    def _accept(self, arrival: Arrival, manifest: Manifest, wait_s: float) -> Arrival:
        if arrival.table is None or self._ledger.accept(arrival.fence) != arrival.written_blocks:
            raise InvariantViolation(f"{arrival.key} was verified, but the ledger does not have its blocks")
        self._forget(arrival)
        num_sent = len(manifest.block_ids)
        self._counters.add(WorkerMetric.BLOCKS_RECEIVED, num_sent)
        self._counters.add(WorkerMetric.BYTES_RECEIVED, manifest.num_bytes)
        self._send(arrival.writer, SealAck(arrival.key, arrival.fence))
        self._tell(
            HandoffReport(
                key=arrival.key,
                transport=arrival.transport,
                num_bytes=manifest.num_bytes,
                transfer_s=manifest.transfer_s,
                wait_s=wait_s,
                num_blocks_sent=num_sent,
                num_blocks_cached=arrival.table.num_cached,
            )
        )
        return arrival

    def _reject(self, arrival: Arrival, error: str, now: float) -> None:
        self._counters.add(WorkerMetric.TRANSFER_FAILURES)
        self._send(arrival.writer, SealAck(arrival.key, arrival.fence, error))
        self.drop(arrival.key, DropReason.TRANSFER, error, now)

    def _revoke(self, arrival: Arrival, reason: str, now: float) -> None:
        fence, blocks, writer = arrival.fence, arrival.written_blocks, arrival.writer
        held = self._ledger.reservation(fence)
        if arrival.table is None or held is None or not self._ledger.revoke(fence, now, reason):
            raise InvariantViolation(
                f"{arrival.key} is to be revoked, but the ledger has ended fence {fence}"
            )
        first = arrival.table.num_cached
        self._forget(arrival)
        if blocks:
            self._pool.quarantine(arrival.table, first, first + len(blocks))
            self._commands.append(CancelReceive(fence))
        else:
            self._pool.release(arrival.table)
            self._ledger.receive_cancelled(fence)
        # Its word is not needed: nothing comes in once the receive is cancelled.
        if arrival.transport in TWO_SIDED:
            self.writer_acknowledged(fence, writer)
        if not held.writer_is_gone:
            self._send(writer, Revoke(arrival.key, fence))

    def _forget(self, arrival: Arrival) -> None:
        del self._granted[arrival.key]
        del self._by_fence[arrival.fence]

    def _tell(self, message: Message) -> None:
        self._commands.append(SendCoordinator(message))

    def _send(self, writer: Writer, message: Message) -> None:
        self._commands.append(SendPeer(writer.worker_id, writer.incarnation, message))
