"""One worker as the coordinator knows it: what it is, and what it holds for requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinpool.config import Role
from twinpool.coordinator.lifecycle import Leg, LegKind
from twinpool.coordinator.loads import Loads
from twinpool.messages import Register, WorkerStats
from twinpool.request import RequestKey
from twinpool.step_pace import LEAST_CHUNK_TOKENS, StepPace, prompt_limit_s

LEAST_PREFILL_CHUNK_TOKENS = 64
"""A prefill worker takes no stream that would leave its prompts smaller chunks than this."""


@dataclass(slots=True)
class Departure:
    """A worker's way out of its pool: it gets nothing new. It becomes a worker of `role`, or ends (None). What still
    runs there at `hand_on_at` is handed on, and when it holds nothing it is told to go, at `told_at`."""

    role: Role | None
    hand_on_at: float
    told_at: float | None = None

    @property
    def purpose(self) -> str:
        """What becomes of the worker, as the end of a sentence about it."""
        return "is drained" if self.role is None else f"becomes a {self.role} worker"


@dataclass(slots=True, eq=False)
class Worker:
    """One live worker process and what it holds for requests.

    `legs` are the attempts that it has not let go of, of which `num_sequences` generate here, or will; `pending_tokens`
    are their prompt tokens that are still to be computed, `held_tokens` the KV slots that they are predicted to fill.
    `num_slots` are those of the whole pool, `usable_slots` those not in quarantine by the last heartbeat, one block's
    at least; it may hold `most_sequences`: those that it decodes together, and a few that follow when one ends. The
    clients of those few have their first token and wait for the second, so they are only an eighth of the others, and
    at least one. `seen_at` is when it was last heard of; until `full_until` it gets nothing new; `has_left`: it said
    itself that it ends. `departure`: it is to leave its pool. It has been in the pool since `joined_at`. `loads` are
    those of its pool.
    """

    info: Register
    seen_at: float
    loads: Loads
    stats: WorkerStats | None = None
    legs: dict[RequestKey, Leg] = field(default_factory=dict)
    cancelled: dict[RequestKey, Leg] = field(default_factory=dict)
    """Legs that it was told to cancel and has not let go of, the one that waits for longest first."""
    pending_tokens: int = 0
    held_tokens: int = 0
    num_sequences: int = 0
    has_left: bool = False
    full_until: float = 0.0
    departure: Departure | None = None
    joined_at: float = 0.0

    worker_id: str = field(init=False)
    incarnation: str = field(init=False)
    role: Role = field(init=False)
    num_slots: int = field(init=False)
    usable_slots: int = field(init=False)
    max_num_seqs: int = field(init=False)
    most_sequences: int = field(init=False)

    def __post_init__(self) -> None:
        info = self.info
        self.worker_id, self.incarnation, self.role = info.worker_id, info.incarnation, info.role
        self.num_slots = self.usable_slots = info.num_blocks * info.layout.block_size
        self.max_num_seqs = info.max_num_seqs
        self.most_sequences = info.max_num_seqs + max(1, info.max_num_seqs // 8)

    def says(self, stats: WorkerStats) -> None:
        """Takes what its heartbeat says."""
        self.stats = stats
        num_usable = max(1, self.info.num_blocks - stats.quarantined_blocks)
        usable_slots = num_usable * self.info.layout.block_size
        if usable_slots != self.usable_slots:
            self.usable_slots = usable_slots
            self.loads.fell(self)

    def depart(self, departure: Departure | None) -> None:
        """Puts the worker on its way out of its pool, or (None) lets it stay after all."""
        self.departure = departure
        self.loads.stays_changed()

    @property
    def stays(self) -> bool:
        """Whether it gets new work in its pool."""
        return self.departure is None

    @property
    def keeps_cache(self) -> bool:
        """Whether its process goes on in another role, and finds there what it has found here."""
        departure = self.departure
        return departure is not None and departure.role is not None and departure.told_at is not None

    @property
    def pace(self) -> StepPace | None:
        """How long a hybrid's steps take, by its last heartbeat."""
        return None if self.stats is None else self.stats.pace

    def prompt_tokens_beside(self, num_sequences: int) -> int:
        """Prompt tokens of a hybrid's step within its budget, beside so many sequences; 0 if it takes none or nothing
        is known of its pace."""
        if self.pace is None or self.info.itl_budget_s is None:
            return 0
        return self.pace.prompt_tokens_within(prompt_limit_s(self.info.itl_budget_s), num_sequences)

    def has_room_for_whole(self, num_sequences: int) -> bool:
        """Whether a hybrid's budget leaves room for one more request whole, prompt and answer, beside so many."""
        if self.role is Role.DECODE:
            return self.prompt_tokens_beside(num_sequences) >= LEAST_CHUNK_TOKENS
        return self.prompt_tokens_beside(num_sequences + 1) >= LEAST_PREFILL_CHUNK_TOKENS

    @property
    def generates(self) -> bool:
        """Whether sequences are decoded here: by all but prefill workers, and by those that are hybrids."""
        return self.role is not Role.PREFILL or self.info.itl_budget_s is not None

    def pending_before(self, num_tokens: int) -> int:
        """Prompt tokens that wait here and go before a prompt with so many to compute: those of prompts with no more,
        for the shortest goes first."""
        return sum(leg.pending_tokens for leg in self.legs.values() if leg.pending_tokens <= num_tokens)

    def open(self, leg: Leg) -> None:
        """Counts `leg` as held here."""
        self.legs[leg.key] = leg
        if leg.kind is not LegKind.PREFILL:
            self.num_sequences += 1
            self.loads.num_sequences += 1
        self.pending_tokens += leg.pending_tokens
        self.held_tokens += leg.num_tokens

    def prompt_computed(self, leg: Leg) -> None:
        """The prompt of `leg` needs no more computing."""
        if leg.pending_tokens:
            self.pending_tokens -= leg.pending_tokens
            leg.pending_tokens = 0
            self.loads.fell(self)

    def grew(self, leg: Leg) -> None:
        """Counts one KV slot more as filled by `leg`."""
        leg.num_tokens += 1
        self.held_tokens += 1

    def hold(self, num_tokens: int) -> None:
        """So many KV slots more are filled than it has told; or (below 0) it tells of them now, and as many are counted
        before anybody looks."""
        self.held_tokens += num_tokens

    @property
    def cancelled_since(self) -> float | None:
        """When it was told to cancel what it has not let go of, the first of that; None if there is nothing."""
        for leg in self.cancelled.values():
            return leg.cancelled_at
        return None

    def cancel(self, leg: Leg, now: float) -> None:
        """The worker is told to let go of `leg`."""
        leg.cancelled_at = now
        self.cancelled[leg.key] = leg

    def close(self, leg: Leg) -> None:
        """`leg` holds nothing here any more."""
        del self.legs[leg.key]
        self.cancelled.pop(leg.key, None)
        if leg.kind is not LegKind.PREFILL:
            self.num_sequences -= 1
            self.loads.num_sequences -= 1
        self.pending_tokens -= leg.pending_tokens
        leg.pending_tokens = 0
        self.held_tokens -= leg.num_tokens
        self.loads.fell(self)
