"""Who is in the pools: the workers, their loads, and the links between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from twinpool.config import Role
from twinpool.coordinator.loads import Loads
from twinpool.coordinator.worker import Worker
from twinpool.messages import PROTOCOL_VERSION, LinkFailed, LinkReady, PeerInfo, Peers, Register

MAX_REMEMBERED_POOLS = 1024
OTHER_ROLE = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
SEQUENCE_COST_TOKENS = 32
"""What a sequence of a colocated worker adds to its load: it takes part in every step."""
GROWTH_TOKENS = 64
"""KV slots that a sequence should find free beyond those that it begins with."""


class Registry:
    """All live workers and the links between them.

    `loads` has those of each role in the order of what a new request would meet there, as routing counts it: prompt
    tokens, those of colocated workers with `SEQUENCE_COST_TOKENS` for each sequence; of decode workers the share that
    is taken of sequences or of KV slots, the larger. `foresee` is told the name of each worker before its `held_tokens`
    are looked at for that, and may tell of more (`Worker.hold`).
    """

    def __init__(self) -> None:
        self.foresee: Callable[[str], None] | None = None
        self.loads = {
            Role.PREFILL: Loads(_pending_tokens),
            Role.DECODE: Loads(self._share_taken),
            Role.COLOCATED: Loads(_pending_with_sequences),
        }
        self._workers: dict[str, Worker] = {}
        self._by_role: dict[Role, tuple[Worker, ...]] = dict.fromkeys(Role, ())
        self._by_incarnation: dict[str, Worker] = {}
        self._hybrids: tuple[Worker, ...] = ()
        self._peers: dict[Role, Peers] = {}
        self._links: dict[tuple[str, str], LinkReady | LinkFailed] = {}
        self._linked: dict[str, dict[str, Worker]] = {}
        self._num_links = 0
        """That have ever been told of."""
        self._readiness: tuple[bool, str] | None = None
        self._most_in_flight: int | None = None
        self._past_num_blocks: dict[str, int] = {}
        self.changing: dict[str, Worker] = {}
        """Those that have left their pool for the other, and have not come there yet, as they were when they left."""
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

    def of_incarnation(self, incarnation: str) -> Worker | None:
        """This very process, if it is live."""
        return self._by_incarnation.get(incarnation)

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
        worker = Worker(offer, now, self.loads[offer.role], joined_at=now)
        worker.loads.add(worker)
        self.changing.pop(offer.worker_id, None)
        self._workers[offer.worker_id] = worker
        self._by_role[worker.role] = (*self._by_role[worker.role], worker)
        self._members_changed()
        return worker

    def _members_changed(self) -> None:
        self._hybrids = tuple(w for w in self if w.info.itl_budget_s is not None)
        self._by_incarnation = {worker.incarnation: worker for worker in self}
        self._peers.clear()
        self._readiness = self._most_in_flight = None

    def remove(self, worker: Worker) -> None:
        """The worker is gone, and all its links with it. One that takes another role comes back."""
        del self._workers[worker.worker_id]
        if worker.keeps_cache and worker.has_left:
            self.changing[worker.worker_id] = worker
        worker.loads.remove(worker)
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
        self._num_links += 1
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

    def is_linked(self, worker: Worker) -> bool:
        """Whether requests can go to it: it has a link with a worker that stays, or needs none."""
        if worker.role is Role.COLOCATED:
            return True
        if worker.role is Role.PREFILL:
            return any(decode.stays for decode in self.linked_to(worker).values())
        prefills = self.of_role(Role.PREFILL)
        return any(prefill.stays and worker.incarnation in self.linked_to(prefill) for prefill in prefills)

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
        return min((loads.most_slots for loads in self.loads.values() if loads.most_slots), default=0)

    def least_pending_tokens(self) -> int:
        """Prompt tokens that wait at the prefill or colocated worker where the fewest wait."""
        return min((w.pending_tokens for w in self if w.role is not Role.DECODE), default=0)

    def in_flight(self) -> int:
        """Attempts that decode (or will) on some worker."""
        return sum([loads.num_sequences for loads in self.loads.values()])

    def num_falls(self) -> int:
        """How often something has happened that may have made room for a request: loads that fell, workers and links
        that came or went."""
        return self._num_links + sum([loads.num_falls for loads in self.loads.values()])

    def look_ahead(self, worker: Worker) -> None:
        """The worker's `held_tokens` will be looked at."""
        if self.foresee is not None:
            self.foresee(worker.worker_id)

    def _share_taken(self, worker: Worker) -> float:
        self.look_ahead(worker)
        return share_taken(worker, 0)

    def default_in_flight(self) -> int:
        """How many sequences all workers together may hold."""
        if self._most_in_flight is None:
            self._most_in_flight = sum(worker.most_sequences for worker in self if worker.generates)
        return self._most_in_flight


def share_taken(worker: Worker, num_tokens: int) -> float:
    """What a decode worker has taken once a sequence of so many tokens has joined: of its sequences or of its KV slots,
    whichever share is larger."""
    sequences = (len(worker.legs) + 1) / worker.max_num_seqs
    slots = (worker.held_tokens + (num_tokens + GROWTH_TOKENS)) / worker.usable_slots
    return sequences if sequences > slots else slots


def _pending_tokens(worker: Worker) -> float:
    return worker.pending_tokens


def _pending_with_sequences(worker: Worker) -> float:
    return worker.pending_tokens + SEQUENCE_COST_TOKENS * len(worker.legs)
