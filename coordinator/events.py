"""What happens to the coordinator's core, and what it answers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from twinpool.config import Role
from twinpool.coordinator.pool_plan import PoolChange
from twinpool.coordinator.request_record import EndedRequest
from twinpool.coordinator.service import Output, Submission
from twinpool.coordinator.tenants import Tenant
from twinpool.errors import RequestError
from twinpool.messages import Message

# ── events ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Arrived:
    """The gateway submits a request, whose id no live one has. Answered by Refuse at once, or by Emits up to one with
    `finish`."""

    submission: Submission


@dataclass(frozen=True, slots=True)
class Knocked:
    """A request of that tenant and priority has arrived, and its prompt is not tokenized yet. Answered by Refuse if it
    would not be admitted whatever its prompt is, else by nothing.
    """

    request_id: str
    tenant: Tenant
    priority: int


@dataclass(frozen=True, slots=True)
class Completed:
    """A stop string ended the answer at its `num_output_tokens`-th token. No Emit follows. It may come when the request
    has ended: its reader is behind.
    """

    request_id: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The client has left."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The tenant of this name wants this request of its own to end. Answered by Refuse (UnknownRequest) if the tenant
    has none with this id. Does nothing if the request has ended.
    """

    request_id: str
    tenant: str


@dataclass(frozen=True, slots=True)
class Cut:
    """The gateway gives the request up for the reason `error`. The request counts as failed."""

    request_id: str
    error: RequestError


@dataclass(frozen=True, slots=True)
class Delivered:
    """The first output went to the client's connection."""

    request_id: str


@dataclass(frozen=True, slots=True)
class FromWorker:
    """A message came over the connection of this worker process."""

    worker_id: str
    incarnation: str
    message: Message


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """That worker process is dead or out of reach."""

    worker_id: str
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class PoolGivenUp:
    """Nobody starts workers of this role any more. Until one joins from elsewhere, nothing can run."""

    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """That worker is to have `role`. What runs there has `wait_s` to end, then it is handed on to others. Answered by
    Agree or Decline, with `ticket`; so are the two events that follow.
    """

    ticket: str
    worker_id: str
    role: Role
    wait_s: float


@dataclass(frozen=True, slots=True)
class DrainWorker:
    """That worker is to end. `wait_s` is as in ChangeRole."""

    ticket: str
    worker_id: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class SetPools:
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


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Comes at least every 100 ms."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Admit nothing more; finish what there is."""


@dataclass(frozen=True, slots=True)
class Shutdown:
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


@dataclass(frozen=True, slots=True)
class Send:
    """Send to a worker process. If it cannot be reached, WorkerLost must follow."""

    worker_id: str
    incarnation: str
    message: Message


@dataclass(frozen=True, slots=True)
class EndProcess:
    """That worker counts as lost without having left. If its process is ours, it must be dead before the commands
    that follow: one that is only frozen could still write into KV blocks that others are given.
    """

    worker_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class Emit:
    """The next output of a request; after one with `finish` nothing more comes."""

    request_id: str
    output: Output


@dataclass(frozen=True, slots=True)
class EmitRun:
    """What one Emit of `token_id` at each of `times` would have said, with indices from `first_index` on: from workers
    that decode in lockstep (`LockstepTokens`), told when the run ends. Before any other output of the request."""

    worker_id: str
    request_id: str
    token_id: int
    first_index: int
    times: array[float]


@dataclass(frozen=True, slots=True)
class Refuse:
    """The answer no: the request that has just arrived is not admitted, or the one to be cancelled is not known."""

    request_id: str
    error: RequestError


@dataclass(frozen=True, slots=True)
class Agree:
    """What the operator asked for is being done: these changes, perhaps none."""

    ticket: str
    changes: tuple[PoolChange, ...]


@dataclass(frozen=True, slots=True)
class Decline:
    """It is not done, and nothing of it: why."""

    ticket: str
    error: RequestError


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start one more worker of that role."""

    role: Role


@dataclass(frozen=True, slots=True)
class Reassign:
    """Should that worker have to be started again, then with this role."""

    worker_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class Retire:
    """That worker, of this role, is not to be started again. It holds nothing, and has been told to end, if it has ever
    joined."""

    worker_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class Record:
    """Write this into the record of requests."""

    ended: EndedRequest


@dataclass(frozen=True, slots=True)
class Note:
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
