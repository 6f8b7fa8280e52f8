"""Who is in the pools: the workers, the links between them, their leases, and what each of them holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from twinpool.config import Role
from twinpool.coordinator.lifecycle import Leg, LegKind
from twinpool.messages import PROTOCOL_VERSION, LinkFailed, LinkReady, PeerInfo, Peers, Register, WorkerStats
from twinpool.request import RequestKey
from twinpool.step_pace import LEAST_CHUNK_TOKENS, StepPace, prompt_limit_s

MAX_REMEMBERED_POOLS = 1024
LEAST_PREFILL_CHUNK_TOKENS = 64
"""A prefill worker takes no stream that would leave its prompts smaller chunks than this."""
OTHER_ROLE = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(slots=True)
class Departure:
    """A worker's way out of its pool: it gets nothing new. It becomes a worker of `role`, or ends (None). What still
    runs there at `hand_on_at` is handed on, and when it holds nothing it is told to go, at `told_at`."""

    role: Role | None
    hand_on_at: float
    told_at: float | None = None

    @property
    def purpose(self) -> str:
        """What the worker does, in words."""
        return "is drained" if self.role is None else f"becomes a {self.role} worker"


@dataclass(slots=True, eq=False)
class Worker:
    """One live worker process and what it holds for requests.

    `legs` are the attempts that it has not let go of, of which `num_sequences` generate here, or will; `pending_tokens`
    are their prompt tokens that are still to be computed, `held_tokens` the KV slots that they are predicted to fill.
    `num_slots` are those of the whole pool, `usable_slots` those not in quarantine by the last heartbeat, one block's
    at least; it may hold `most_sequences`: those that it decodes together, and a few that follow when one ends. The
    clients of those few have their first token and wait for the second, so they are only an eighth of the others, and
    at least one. `seen_at` is when it was last
    heard of; until `full_until` it gets nothing new; `has_left`: it said itself that it ends. `departure`: it is to
    leave its pool. It has been in the pool since `joined_at`.
    """

    info: Register
    seen_at: float
    stats: WorkerStats | None = None
    legs: dict[RequestKey, Leg] = field(default_factory=dict)
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
        self.usable_slots = num_usable * self.info.layout.block_size

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
        """Whether it can."""
        return self.role is not Role.PREFILL or self.info.itl_budget_s is not None

    @property
    def num_cancelled(self) -> int:
        """Legs that it was told to cancel and has not let go of."""
        return sum(leg.cancelled_at is not None for leg in self.legs.values())

    def pending_before(self, num_tokens: int) -> int:
        """Prompt tokens that wait here and go before a prompt with so many to compute: those of prompts with no more,
        for the shortest goes first."""
        return sum(leg.pending_tokens for leg in self.legs.values() if leg.pending_tokens <= num_tokens)

    def open(self, leg: Leg) -> None:
        """Counts `leg` as held here."""
        self.legs[leg.key] = leg
        self.num_sequences += leg.kind is not LegKind.PREFILL
        self.pending_tokens += leg.pending_tokens
        self.held_tokens += leg.num_tokens

    def prompt_computed(self, leg: Leg) -> None:
        """The prompt of `leg` needs no more computing."""
        self.pending_tokens -= leg.pending_tokens
        leg.pending_tokens = 0

    def grew(self, leg: Leg) -> None:
        """`leg` fills one slot more."""
        leg.num_tokens += 1
        self.held_tokens += 1

    def close(self, leg: Leg) -> None:
        """`leg` holds nothing here any more."""
        del self.legs[leg.key]
        self.num_sequences -= leg.kind is not LegKind.PREFILL
        self.prompt_computed(leg)
        self.held_tokens -= leg.num_tokens


class Registry:
    """All live workers and the links between them."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._by_role: dict[Role, tuple[Worker, ...]] = dict.fromkeys(Role, ())
        self._hybrids: tuple[Worker, ...] = ()
        self._peers: dict[Role, Peers] = {}
        self._links: dict[tuple[str, str], LinkReady | LinkFailed] = {}
        self._linked: dict[str, dict[str, Worker]] = {}
        self._readiness: tuple[bool, str] | None = None
        self._most_in_flight: int | None = None
        self._past_num_blocks: dict[str, int] = {}
        self.terms: Register | None = None
        """The first worker that joined: all later ones must agree with it, as long as the coordinator lives."""

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def of_role(self, role: Role) -> tuple[Worker, ...]:
        """The live workers of one pool."""
        return self._by_role[role]

    @property
    def hybrids(self) -> tuple[Worker, ...]:
        """The live workers that also run requests whole."""
        return self._hybrids

    def get(self, worker_id: str) -> Worker | None:
        """The live process of this name."""
        return self._workers.get(worker_id)

    def live(self, worker_id: str, incarnation: str) -> Worker | None:
        """This very process, if it is live."""
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.incarnation == incarnation else None

    def refusal(self, offer: Register) -> str | None:
        """Why this worker must not join, naming both sides' values; None if it may."""
        me = f"worker {offer.worker_id}"
        if offer.protocol != PROTOCOL_VERSION:
            return (
                f"{me} speaks protocol {offer.protocol}, the coordinator {PROTOCOL_VERSION}; "
                "install the same version of twinpool on both"
            )
        if "/" in offer.worker_id or not offer.worker_id:
            return f"worker id is {offer.worker_id!r}; give a name without '/'"
        for worker in self:
            differs = worker.role is not offer.role and worker.worker_id != offer.worker_id
            if differs and Role.COLOCATED in (worker.role, offer.role):
                return (
                    f"{me} is {offer.role}, {worker.worker_id} is {worker.role}; "
                    "start prefill and decode workers, or colocated ones, not both"
                )
        if self.terms is None:
            return None
        for name, mine, theirs in (
            ("fingerprint", offer.fingerprint, self.terms.fingerprint),
            ("dtype", offer.layout.dtype.value, self.terms.layout.dtype.value),
            ("block size", offer.layout.block_size, self.terms.layout.block_size),
            ("KV layout", offer.layout, self.terms.layout),
            ("max_model_len", offer.max_model_len, self.terms.max_model_len),
        ):
            if mine != theirs:
                return (
                    f"{me} has {name} {mine}, this deployment (first joined by {self.terms.worker_id}) "
                    f"has {theirs}; start all workers with one model and the same settings"
                )
        return None

    def join(self, offer: Register, now: float) -> Worker:
        """Takes the worker in. Its predecessor of that name must be removed before."""
        if self.terms is None:
            self.terms = offer
        worker = Worker(offer, now, joined_at=now)
        self._workers[offer.worker_id] = worker
        self._by_role[worker.role] = (*self._by_role[worker.role], worker)
        self._members_changed()
        return worker

    def _members_changed(self) -> None:
        self._hybrids = tuple(w for w in self if w.info.itl_budget_s is not None)
        self._peers.clear()
        self._readiness = self._most_in_flight = None

    def remove(self, worker: Worker) -> None:
        """The worker is gone, and all its links with it."""
        del self._workers[worker.worker_id]
        self._by_role[worker.role] = tuple(w for w in self._by_role[worker.role] if w is not worker)
        self._past_num_blocks[worker.worker_id] = worker.info.num_blocks
        while len(self._past_num_blocks) > MAX_REMEMBERED_POOLS:
            del self._past_num_blocks[next(iter(self._past_num_blocks))]
        self._links = {pair: link for pair, link in self._links.items() if worker.incarnation not in pair}
        self._linked.pop(worker.incarnation, None)
        for decodes in self._linked.values():
            decodes.pop(worker.incarnation, None)
        self._members_changed()

    def past_num_blocks(self, worker_id: str) -> int | None:
        """The KV pool of the last process of this name that is gone, in blocks; None if there was none."""
        return self._past_num_blocks.get(worker_id)

    def expired(self, now: float, lease_s: float) -> list[Worker]:
        """Workers that were not heard of for `lease_s`."""
        return [w for w in self if now - w.seen_at > lease_s]

    def record_link(self, prefill: Worker, report: LinkReady | LinkFailed) -> bool:
        """Notes what `prefill` says about its link; false if that decode process is not live."""
        decode = self.live(report.decode_worker, report.decode_incarnation)
        if decode is None:
            return False
        self._links[prefill.incarnation, report.decode_incarnation] = report
        decodes = self._linked.setdefault(prefill.incarnation, {})
        if isinstance(report, LinkReady):
            decodes[decode.incarnation] = decode
        else:
            decodes.pop(decode.incarnation, None)
        self._readiness = None
        return True

    def link(self, prefill: Worker, decode: Worker) -> LinkReady | None:
        """The link over which `prefill` can push to `decode`, or None."""
        link = self._links.get((prefill.incarnation, decode.incarnation))
        return link if isinstance(link, LinkReady) else None

    def linked_to(self, prefill: Worker) -> Mapping[str, Worker]:
        """The decode workers that `prefill` can push to, by incarnation."""
        return self._linked.get(prefill.incarnation, {})

    def links(self) -> Iterator[tuple[Worker, Worker, LinkReady]]:
        """All usable links, as (prefill worker, decode worker, what the probe measured)."""
        for prefill in self.of_role(Role.PREFILL):
            for decode in self.of_role(Role.DECODE):
                if (link := self.link(prefill, decode)) is not None:
                    yield prefill, decode, link

    def peers_of(self, worker: Worker) -> Peers:
        """The workers that `worker` may exchange KV with."""
        if worker.role not in OTHER_ROLE:
            return Peers(())
        role = OTHER_ROLE[worker.role]
        if (peers := self._peers.get(role)) is None:
            infos = (w.info for w in self.of_role(role))
            peers = Peers(tuple(PeerInfo(i.worker_id, i.incarnation, i.role, i.endpoint) for i in infos))
            self._peers[role] = peers
        return peers

    def ready(self) -> tuple[bool, str]:
        """Whether a request can be executed now, and what is missing if not."""
        if self._readiness is None:
            self._readiness = self._find_out()
        return self._readiness

    def _find_out(self) -> tuple[bool, str]:
        if colocated := self.of_role(Role.COLOCATED):
            return True, f"{len(colocated)} colocated worker(s)"
        prefill, decode = self.of_role(Role.PREFILL), self.of_role(Role.DECODE)
        if not prefill and not decode:
            return False, "no worker has registered yet, or all are lost"
        if not prefill:
            return False, "the prefill pool is empty"
        if not decode:
            return False, "the decode pool is empty"
        linked = sum(1 for _ in self.links())
        if linked == 0:
            failed = [link.reason for link in self._links.values() if isinstance(link, LinkFailed)]
            why = f": {failed[0]}" if failed else " yet"
            return False, f"no prefill worker is linked to a decode worker{why}"
        return True, f"{len(prefill)} prefill and {len(decode)} decode worker(s), {linked} link(s)"

    def can_run(self) -> tuple[bool, str]:
        """As `ready`, but where a pool is missing a hybrid that can run requests whole is enough."""
        is_ready, why = self.ready()
        if is_ready:
            return is_ready, why
        wholes = sum(worker.has_room_for_whole(0) for worker in self)
        return (True, f"{why}; {wholes} hybrid(s) run requests whole") if wholes else (is_ready, why)

    def max_model_len(self) -> int | None:
        """The longest sequence that every worker can hold, in tokens; None before the first has joined."""
        return None if self.terms is None else self.terms.max_model_len

    def largest_pool_tokens(self) -> int:
        """KV slots of the sequence that fits on at least one worker of each pool, in tokens."""
        pools = [
            [worker.num_slots for worker in workers if worker.departure is None]
            for workers in self._by_role.values()
        ]
        return min((max(slots) for slots in pools if slots), default=0)

    def least_pending_tokens(self) -> int:
        """Prompt tokens that wait at the prefill or colocated worker where the fewest wait."""
        return min((w.pending_tokens for w in self if w.role is not Role.DECODE), default=0)

    def in_flight(self) -> int:
        """Attempts that decode (or will) on some worker."""
        return sum([worker.num_sequences for worker in self._workers.values()])

    def default_in_flight(self) -> int:
        """How many sequences all workers together may hold."""
        if self._most_in_flight is None:
            self._most_in_flight = sum(worker.most_sequences for worker in self if worker.generates)
        return self._most_in_flight
