"""Between the coordinator and its workers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec

from twinpool.bounds import (
    MOST_IDS,
    MOST_JOBS,
    MOST_PEERS,
    Amount,
    BlockIds,
    ByteCount,
    Count,
    Fence,
    Label,
    Name,
    Seconds,
    Size,
    Text,
)
from twinpool.config import Role
from twinpool.layout import KVLayout
from twinpool.messages.base import PROTOCOL_VERSION, Message
from twinpool.request import FinishReason, Job, RequestKey, TokenLogprobs
from twinpool.step_pace import StepPace

# ── what a worker is and how it does ──────────────────────────────────────────────────────────────────────────────


class PeerInfo(Message, frozen=True, tag=True):
    """How to reach a worker's peer socket. `incarnation` is new at every start of the process."""

    worker_id: Name
    incarnation: Name
    role: Role
    endpoint: Label


class Register(Message, frozen=True, tag=True):
    """A worker offers itself. The coordinator answers Welcome or Denied.

    `fingerprint` names model config and weights; `num_blocks` is its KV pool; `max_model_len` the longest sequence it
    can hold; `max_num_seqs` how many it decodes together. A hybrid, a prefill or decode worker that also takes whole
    jobs (Generate), gives no stream a gap beyond `itl_budget_s` for a prompt; None: it is none.
    """

    worker_id: Name
    incarnation: Name
    role: Role
    pid: Count
    endpoint: Label
    fingerprint: Label
    layout: KVLayout
    num_blocks: Size
    max_model_len: Size
    max_num_seqs: Size
    itl_budget_s: Seconds | None = None
    succeeds: Label = ""
    fixed_role: Text = ""
    protocol: Count = PROTOCOL_VERSION

    @property
    def generates(self) -> bool:
        """Whether it has streams: what it computes goes on to a second token here."""
        return self.role is not Role.PREFILL or self.itl_budget_s is not None


class LinkReady(Message, frozen=True, tag=True):
    """A prefill worker has connected to a decode worker and probed the link.

    `gb_per_s` is the measured rate of the probe in 1e9 bytes per second, over `probe_bytes`.
    """

    decode_worker: Name
    decode_incarnation: Name
    transport: Label
    gb_per_s: Amount
    probe_bytes: ByteCount


class LinkFailed(Message, frozen=True, tag=True):
    """A prefill worker cannot exchange KV with a decode worker (layouts differ, probe failed)."""

    decode_worker: Name
    decode_incarnation: Name
    reason: Text


class WorkerStats(Message, frozen=True, tag=True):
    """A worker's counts at one moment; `counters` only grow (names: `twinpool.metrics`).

    `waiting` and `running` count sequences, `waiting_tokens` the prompt tokens that wait to be computed or received.
    `stalled_s` is how long nothing has moved at this worker although something should, on its own clock: a step that
    does not end, or work that waits for room while no step, transfer or grant ends. Small (below a few step times)
    while all is well or nothing is to be done. `pace` is how long a hybrid's steps take, once it has measured some.
    """

    free_blocks: Count
    owned_blocks: Count
    cached_blocks: Count
    quarantined_blocks: Count
    leased_blocks: Count
    waiting: Count
    running: Count
    waiting_tokens: ByteCount
    counters: Annotated[dict[Label, Amount], msgspec.Meta(max_length=256)]
    stalled_s: Seconds = 0.0
    pace: StepPace | None = None


class Heartbeat(Message, frozen=True, tag=True):
    """Sent every `heartbeat_s` of the Welcome."""

    stats: WorkerStats


class Left(Message, frozen=True, tag=True):
    """The worker stops on purpose; nothing more comes from it. `reason` is for the log."""

    reason: Text


class Welcome(Message, frozen=True, tag=True):
    """The worker is in, and heartbeats every `heartbeat_s` from now on."""

    heartbeat_s: Annotated[float, msgspec.Meta(ge=0.001, le=3600)]


class Denied(Message, frozen=True, tag=True):
    """The worker must not join: `reason` names both sides' values. The worker exits with that line."""

    reason: Text


class Peers(Message, frozen=True, tag=True):
    """All live workers that this worker may exchange KV with: the whole list, each time it changes."""

    peers: Annotated[tuple[PeerInfo, ...], msgspec.Meta(max_length=MOST_PEERS)]


class Stop(Message, frozen=True, tag=True):
    """Finish nothing more: release everything and exit."""


class TakeRole(Message, frozen=True, tag=True):
    """Sent to a prefill or decode worker that holds no attempt any more: once all its blocks are free or cached it says
    Left, keeps model and KV pool, and registers as a worker of `role` under a new incarnation (`Register.succeeds`)."""

    role: Role


class StartAnew(Message, frozen=True, tag=True):
    """This process is no member: it counted as lost, or the coordinator is a new one. What it holds is nobody's: it
    ends like after a Stop, and a new process may register in its place."""


# ── a request's way through the pools ─────────────────────────────────────────────────────────────────────────────


class Prefill(Message, frozen=True, tag=True):
    """Compute the job's prompt and sample one token. `decode_worker` will take the KV once it has granted room."""

    job: Job
    decode_worker: Name


class Reserve(Message, frozen=True, tag=True):
    """Reserve room on decode for the job, whose KV `prefill_worker` will push. Answer: Granted, now or when room is."""

    job: Job
    prefill_worker: Name
    prefill_incarnation: Name


class Granted(Message, frozen=True, tag=True):
    """Decode holds blocks for the job. `block_ids` is the whole table of the prompt's blocks in order; the first
    `num_cached_blocks` are already valid there and must not be sent. `wait_s`: from Reserve to this grant.
    """

    key: RequestKey
    fence: Fence
    block_ids: BlockIds
    num_cached_blocks: Count
    wait_s: Seconds

    def __post_init__(self) -> None:
        _require_cached_within(self.num_cached_blocks, self.block_ids)


class PushTo(Message, frozen=True, tag=True):
    """The grant, forwarded to the prefill worker that computes the job."""

    key: RequestKey
    decode_worker: Name
    decode_incarnation: Name
    fence: Fence
    block_ids: BlockIds
    num_cached_blocks: Count

    def __post_init__(self) -> None:
        _require_cached_within(self.num_cached_blocks, self.block_ids)


class Generate(Message, frozen=True, tag=True):
    """Prefill and decode the job in one worker: a colocated or a hybrid one."""

    job: Job


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One output token of one attempt. `index` counts the request's output tokens from 0 over all attempts.
    `logprobs` come if the job asks for them."""

    key: RequestKey
    index: Count
    token_id: Count
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None


class StepTokens(Message, frozen=True, tag=True):
    """All tokens that one step of one worker produced."""

    tokens: Annotated[tuple[Token, ...], msgspec.Meta(max_length=MOST_JOBS)]


class PromptLogprobs(Message, frozen=True, tag=True):
    """Sent before the first token of a job with `wants_prompt_logprobs`: `entries[i]` is of the prompt's token i + 1,
    after those before it."""

    key: RequestKey
    entries: Annotated[tuple[TokenLogprobs, ...], msgspec.Meta(max_length=MOST_IDS)]


class PrefillReport(Message, frozen=True, tag=True):
    """The prompt is computed (sent with, and before, its first token).

    `queue_s` from receipt to the first step, `compute_s` from there to the sampled token; `num_cached` prompt tokens
    came from the prefix cache, `num_computed` were run. Their sum is the job's token count.
    """

    key: RequestKey
    queue_s: Seconds
    compute_s: Seconds
    num_cached: Count
    num_computed: Count
    num_steps: Count


class HandoffReport(Message, frozen=True, tag=True):
    """Decode has verified the KV and owns the request.

    `num_bytes` were moved in `transfer_s` (sender's clock, first push to last byte, pauses between chunks left out);
    `wait_s` is the time between the seal's arrival and the end of verification; `num_blocks_sent` and
    `num_blocks_cached` add up to the prompt's blocks.
    """

    key: RequestKey
    transport: Label
    num_bytes: ByteCount
    transfer_s: Seconds
    wait_s: Seconds
    num_blocks_sent: Count
    num_blocks_cached: Count


class DropReason(StrEnum):
    """Why a worker let an attempt go."""

    CANCELLED = "cancelled"
    """It was asked to."""
    PREEMPTED = "preempted"
    """Others need the room that it had."""
    NO_ROOM = "no_room"
    """It had none yet, and none came free for it in time, or too many wait for some already."""
    TRANSFER = "transfer"
    """Its KV was lost or corrupt."""
    DEADLINE = "deadline"
    """Its KV did not come in time."""
    REVOKED = "revoked"
    """Said by prefill: decode took its grant back, and says itself why."""
    REFUSED = "refused"
    """It can never fit."""


class Dropped(Message, frozen=True, tag=True):
    """The worker no longer holds anything of this attempt and did not finish it.

    `detail` is for people.
    """

    key: RequestKey
    reason: DropReason
    detail: Text = ""


class Cancel(Message, frozen=True, tag=True):
    """Stop this attempt and release all it holds. Answered by Dropped (CANCELLED), also for an unknown key."""

    key: RequestKey


ControlMessage = (
    Register | LinkReady | LinkFailed | Heartbeat | Left | Welcome | Denied | Peers | Stop | StartAnew
    | TakeRole | Prefill | Reserve | Granted | PushTo | Generate | StepTokens | PromptLogprobs | PrefillReport
    | HandoffReport | Dropped | Cancel
)  # fmt: skip


def _require_cached_within(num_cached_blocks: int, block_ids: Sequence[int]) -> None:
    if num_cached_blocks > len(block_ids):
        raise ValueError(f"{num_cached_blocks} of {len(block_ids)} blocks are cached")
