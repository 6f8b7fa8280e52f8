"""What a role is to the process around it: a core that takes events and gives commands, and plans the next step.

A role core (prefill, decode, colocated) is plain Python. It owns the block pool, the ledger and the scheduler; it
knows no tensor, socket, thread or clock. Its shell calls, on one thread::

    for command in core.handle(event, now): carry out
    plan = core.next_step(now)      # whenever the step thread is idle; None: nothing to run
    for command in core.flush(): carry out      # what planning gave rise to
    ahead = core.plan_ahead()       # while a step runs; None: what comes after it is for `next_step` to say

When the step ends, the step thread begins what `ahead` makes of its tokens at once, and the core hears of it in the
`StepDone` of the step that ended.

The shell answers every plan with `StepDone`, every `FinishPush` with `PushFinished` or `PushFailed`, every `StopPush`
with `PushStopped`, every `Verify` with `Verified`, every `CancelReceive` with `ReceiveCancelled`.
Answers may come late and in any order, after the request is long gone; cores ignore those they no longer wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from twinpool.engine.batch import SequenceSlice, StepBatch, StepOutput
from twinpool.engine.look_back import LookBack
from twinpool.messages import Dropped, DropReason, Manifest, Message, WorkerStats
from twinpool.request import Job, RequestKey

# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────


class FromCoordinator(msgspec.Struct, frozen=True):
    """A message of the coordinator."""

    message: Message


class FromPeer(msgspec.Struct, frozen=True):
    """A message of another worker, over the peer channel."""

    worker_id: str
    incarnation: str
    message: Message


class PeerLinked(msgspec.Struct, frozen=True):
    """KV can be pushed to this decode worker (prefill side: handshake and probe succeeded), or comes from this prefill
    worker (decode side: probed). Before that, and after its `PeerGone`, grants with that process are refused. Comes
    again when a link that was lost is back."""

    worker_id: str
    incarnation: str
    transport: str


class LinkLost(msgspec.Struct, frozen=True):
    """Prefill side: no KV can be pushed to this decode worker any more, which may live on: its messages still come.
    What was pushed and not finished is lost. Until the next `PeerLinked`, its grants are refused.

    Decode side: this prefill worker is declared lost, but its process is not known to be dead and could still write
    into the pool. Nothing more is believed of it; the blocks that it may write stay out of use until its `PeerGone`."""

    worker_id: str
    incarnation: str


class PeerGone(msgspec.Struct, frozen=True):
    """That process is dead or declared lost: nothing comes from it, and it writes nothing, any more."""

    worker_id: str
    incarnation: str


class StepDone(msgspec.Struct, frozen=True):
    """The plan has run; its layer pushes are handed to the transport. `following` is what the plan ahead became, and
    runs since then; None if nothing runs."""

    plan: StepPlan
    output: StepOutput
    following: StepPlan | None = None


class PushFinished(msgspec.Struct, frozen=True):
    """Every byte pushed under `fence` is handed over. `digests[i]` belongs to the i-th block of the `FinishPush`."""

    fence: int
    digests: tuple[int, ...]
    num_bytes: int
    transfer_s: float


class PushFailed(msgspec.Struct, frozen=True):
    """The bytes under `fence` cannot be delivered; none will be written any more."""

    fence: int
    reason: str


class PushStopped(msgspec.Struct, frozen=True):
    """Nothing will be written under `fence` any more; its source blocks are no longer read."""

    fence: int


class Verified(msgspec.Struct, frozen=True):
    """All bytes of a sealed reservation are in place and equal their digests; or not: `error` says why, and in
    `num_mismatched` blocks they arrived but differ."""

    fence: int
    wait_s: float
    error: str = ""
    num_mismatched: int = 0


class ReceiveCancelled(msgspec.Struct, frozen=True):
    """This side lets in no byte under `fence` any more (the writer may still write one-sidedly)."""

    fence: int


class StepTimed(msgspec.Struct, frozen=True):
    """For hybrids, before anything else: a step of so many sequences and so many prompt tokens was timed."""

    num_sequences: int
    num_prompt_tokens: int
    seconds: float


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. Comes at least every 100 ms, whether or not anything else happens."""


Event = (
    FromCoordinator | FromPeer | PeerLinked | LinkLost | PeerGone | StepDone
    | PushFinished | PushFailed | PushStopped | Verified | ReceiveCancelled | StepTimed | Tick
)  # fmt: skip

# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────


class SendCoordinator(msgspec.Struct, frozen=True):
    """Send `message` to the coordinator."""

    message: Message


class SendPeer(msgspec.Struct, frozen=True):
    """Send to another worker. Dropped if that incarnation is gone: a `PeerGone` comes or has come."""

    worker_id: str
    incarnation: str
    message: Message


class BlockPush(msgspec.Struct, frozen=True):
    """Copies of whole blocks: `source_blocks[i]` here to `target_blocks[i]` of the decode worker, under `fence`."""

    fence: int
    worker_id: str
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]


class Push(msgspec.Struct, frozen=True):
    """Push blocks that are already filled (all layers). The blocks stay pinned until the push finished or stopped."""

    push: BlockPush


class FinishPush(msgspec.Struct, frozen=True):
    """No more pushes under `fence`: answer when all bytes are handed over, with the digests of `source_blocks`."""

    fence: int
    worker_id: str
    source_blocks: tuple[int, ...]


class StopPush(msgspec.Struct, frozen=True):
    """Abandon the pushes under `fence`."""

    fence: int
    worker_id: str


class PostReceive(msgspec.Struct, frozen=True):
    """Expect `writer` (a worker and its incarnation) to write all of `block_ids` under `fence`."""

    fence: int
    writer: str
    writer_incarnation: str
    block_ids: tuple[int, ...]


class CancelReceive(msgspec.Struct, frozen=True):
    """Expect nothing under `fence` any more."""

    fence: int


class Verify(msgspec.Struct, frozen=True):
    """Wait until all bytes under the manifest's fence are in place, at most `timeout_s`, and check their digests."""

    manifest: Manifest
    timeout_s: float


Command = SendCoordinator | SendPeer | Push | FinishPush | StopPush | PostReceive | CancelReceive | Verify


class StepPlan(msgspec.Struct, frozen=True):
    """One model step. As each layer's KV is written, that layer of every block in `pushes` is pushed."""

    batch: StepBatch
    pushes: tuple[BlockPush, ...] = ()


class AwaitedSlice(msgspec.Struct, frozen=True):
    """The slice of a token that is still to be sampled, as the job's output token `output_index`: by the step that
    runs. It is to stand at position `start`, for which there is a slot in `block_table`. `look_back`: as in slices."""

    job: Job
    output_index: int
    start: int
    block_table: tuple[int, ...]
    look_back: LookBack | None = None


class PlanAhead(msgspec.Struct, frozen=True):
    """The step after `after`, made while that one runs: the sequences that go on with what it samples, and `joining`
    ones, whose token is known."""

    after: StepPlan
    awaited: tuple[AwaitedSlice, ...]
    joining: tuple[SequenceSlice, ...] = ()

    @property
    def keys(self) -> Iterator[RequestKey]:
        """The sequences that the step may have."""
        yield from (awaited.job.key for awaited in self.awaited)
        yield from (chunk.key for chunk in self.joining)

    def resolve(self, ran: StepPlan, output: StepOutput) -> StepPlan | None:
        """The step itself, without the sequences whose answer `output` ends, or that have failed in it. None if none is
        left, or if another step than `after` has run. A pure function: the step thread calls it."""
        if ran != self.after:
            return None
        slices: list[SequenceSlice] = []
        for awaited in self.awaited:
            job, index = awaited.job, awaited.output_index
            if job.key in output.failed:
                continue
            token_id = output.token_ids[job.key]
            if job.finish_reason(index, token_id) is None:
                banned = job.banned_token_ids(index + 1)
                slices.append(
                    SequenceSlice(
                        job.key,
                        (token_id,),
                        awaited.start,
                        awaited.block_table,
                        job.sampling,
                        banned,
                        awaited.look_back,
                    )
                )
        slices += self.joining
        return StepPlan(StepBatch(tuple(slices))) if slices else None


MOST_DETAIL = 1000
"""Characters of a reason: a library's may quote all that it was given."""


def cannot_go_on(key: RequestKey, output: StepOutput) -> Dropped | None:
    """What the coordinator hears of a sequence that has failed in a step: no other worker could go on with it either.
    None if it has not."""
    if (detail := output.failed.get(key)) is None:
        return None
    return Dropped(key, DropReason.REFUSED, detail[:MOST_DETAIL])


class RoleCore(Protocol):
    """The decisions of one role."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes one event; returns what to do about it, in order."""
        ...

    def next_step(self, now: float) -> StepPlan | None:
        """The next step to run, or None if there is nothing to run. Called only when no step runs.

        Planning may drop a request to make room; the commands that say so come with `flush`, or the next event's.
        """
        ...

    def plan_ahead(self) -> PlanAhead | None:
        """The step after the one that runs, as things are now, in place of any that was given before; None if it must
        wait for a decision, as about room. Called only while a step runs; the same object again if nothing has changed.

        Blocks of its sequences stay as they are until the `StepDone` of the running step, and if `following` has them
        until that one's.
        """
        ...

    def flush(self) -> list[Command]:
        """Takes the commands that planning gave rise to, in order."""
        ...

    def minds_time(self, now: float) -> bool:
        """Whether a `Tick` at `now` could change anything, or a step begin after it. A simulation leaves out others."""
        ...

    def stats(self) -> WorkerStats:
        """Blocks by state, queue lengths and counters at this moment."""
        ...

    def check(self) -> None:
        """Raises InvariantViolation if a block has no owner, or two (I1), or a count is wrong."""
        ...
