"""What happens to the coordinator's core, and what it answers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import msgspec

from twinpool.config import Role
from twinpool.coordinator.pool_plan import PoolChange
from twinpool.coordinator.request_record import EndedRequest
from twinpool.coordinator.service import Output, Submission
from twinpool.coordinator.tenants import Tenant
from twinpool.errors import RequestError
from twinpool.messages import Message

# ── events ──────────────────────────────────────────────────────────────────────────────────────────────────


class Arrived(msgspec.Struct, frozen=True):
    """The gateway submits a request, whose id no live one has. Answered by Refuse at once, or by Emits up to one with
    `finish`."""

    submission: Submission


class Knocked(msgspec.Struct, frozen=True):
    """A request of that tenant and priority has arrived, and its prompt is not tokenized yet. Answered by Refuse if it
    would not be admitted whatever its prompt is, else by nothing.
    """

    request_id: str
    tenant: Tenant
    priority: int


class Completed(msgspec.Struct, frozen=True):
    """A stop string ended the answer at its `num_output_tokens`-th token. No Emit follows. It may come when the request
    has ended: its reader is behind.
    """

    request_id: str
    num_output_tokens: int


class Abandoned(msgspec.Struct, frozen=True):
    """The client has left."""

    request_id: str


class Cancelled(msgspec.Struct, frozen=True):
    """The tenant of this name wants this request of its own to end. Answered by Refuse (UnknownRequest) if the tenant
    has none with this id. Does nothing if the request has ended.
    """

    request_id: str
    tenant: str


class Cut(msgspec.Struct, frozen=True):
    """The gateway gives the request up for the reason `error`. The request counts as failed."""

    request_id: str
    error: RequestError


class Delivered(msgspec.Struct, frozen=True):
    """The first output went to the client's connection."""

    request_id: str


class FromWorker(msgspec.Struct, frozen=True):
    """A message came over the connection of this worker process."""

    worker_id: str
    incarnation: str
    message: Message


class WorkerLost(msgspec.Struct, frozen=True):
    """That worker process is dead or out of reach."""

    worker_id: str
    incarnation: str
    reason: str


class PoolGivenUp(msgspec.Struct, frozen=True):
    """Nobody starts workers of this role any more. Until one joins from elsewhere, nothing can run."""

    role: Role
    reason: str


class ChangeRole(msgspec.Struct, frozen=True):
    """That worker is to have `role`. What runs there has `wait_s` to end, then it is handed on to others. Answered by
    Agree or Decline, with `ticket`; so are the two events that follow.
    """

    ticket: str
    worker_id: str
    role: Role
    wait_s: float


class DrainWorker(msgspec.Struct, frozen=True):
    """That worker is to end. `wait_s` is as in ChangeRole."""

    ticket: str
    worker_id: str
    wait_s: float


class SetPools(msgspec.Struct, frozen=True):
    """There are to be so many prefill and decode workers, each 1 or more (None: as many as now). `kept` are those that
    a scaler keeps running, by id, whether they have joined yet or not; `why_no_start` says why none can be started
    (empty: they can).
    """

    ticket: str
    prefill: int | None
    decode: int | None
    wait_s: float
    kept: Mapping[str, Role]
    why_no_start: str = ""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. Comes at least every 100 ms."""


class Drain(msgspec.Struct, frozen=True):
    """Admit nothing more; finish what there is."""


class Shutdown(msgspec.Struct, frozen=True):
    """Time out whatever is left and stop all workers."""


Event = (
    Arrived
    | Knocked
    | Completed
    | Abandoned
    | Cancelled
    | Cut
    | Delivered
    | FromWorker
    | WorkerLost
    | PoolGivenUp
    | ChangeRole
    | DrainWorker
    | SetPools
    | Tick
    | Drain
    | Shutdown
)

# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────


class Send(msgspec.Struct, frozen=True):
    """Send to a worker process. If it cannot be reached, WorkerLost must follow."""

    worker_id: str
    incarnation: str
    message: Message


class EndProcess(msgspec.Struct, frozen=True):
    """That worker counts as lost without having left. If its process is ours, it must be dead before the commands
    that follow: one that is only frozen could still write into KV blocks that others are given.
    """

    worker_id: str
    pid: int


class Emit(msgspec.Struct, frozen=True):
    """The next output of a request; after one with `finish` nothing more comes."""

    request_id: str
    output: Output


class EmitRun(msgspec.Struct, frozen=True):
    """What one Emit of `token_id` at each of `times` would have said, with indices from `first_index` on: from workers
    that decode in lockstep (`LockstepTokens`), told when the run ends. Before any other output of the request."""

    worker_id: str
    request_id: str
    token_id: int
    first_index: int
    times: array[float]


class Refuse(msgspec.Struct, frozen=True):
    """The answer no: the request that has just arrived is not admitted, or the one to be cancelled is not known."""

    request_id: str
    error: RequestError


class Agree(msgspec.Struct, frozen=True):
    """What the operator asked for is being done: these changes, perhaps none."""

    ticket: str
    changes: tuple[PoolChange, ...]


class Decline(msgspec.Struct, frozen=True):
    """Nothing of what the operator asked for is done; `error` says why."""

    ticket: str
    error: RequestError


class StartWorker(msgspec.Struct, frozen=True):
    """Start one more worker of that role."""

    role: Role


class Reassign(msgspec.Struct, frozen=True):
    """Should that worker have to be started again, then with this role."""

    worker_id: str
    role: Role


class Retire(msgspec.Struct, frozen=True):
    """That worker, of this role, is not to be started again. It holds nothing, and has been told to end, if it has ever
    joined."""

    worker_id: str
    role: Role


class Record(msgspec.Struct, frozen=True):
    """Write this into the record of requests."""

    ended: EndedRequest


class Note(msgspec.Struct, frozen=True):
    """A line for the log. `is_fault`: something that should not happen did."""

    text: str
    is_fault: bool = False


Command = (
    Send
    | EndProcess
    | Emit
    | EmitRun
    | Refuse
    | Agree
    | Decline
    | StartWorker
    | Reassign
    | Retire
    | Record
    | Note
)
