"""Whatever happens to workers, the router that looks at few of them chooses as one that looks at all."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.coordinator_core import register, stats, submission
from support.exhaustive_routing import Chosen, ExhaustiveRouter

from twinpool.config import Role
from twinpool.coordinator.accounts import Account
from twinpool.coordinator.lifecycle import Leg, LegKind, Request
from twinpool.coordinator.pace import AnswerLengths, PrefillPace
from twinpool.coordinator.registry import Registry
from twinpool.coordinator.routing import Route, Router, prefix_of
from twinpool.coordinator.tenants import ANYONE
from twinpool.coordinator.worker import Departure, Worker
from twinpool.messages import LinkReady
from twinpool.request import RequestKey

QUIET_S = 2.0
LAYOUTS = (
    {Role.COLOCATED: 5},
    {Role.PREFILL: 1, Role.DECODE: 1},
    {Role.PREFILL: 3, Role.DECODE: 6},
    {Role.PREFILL: 4, Role.DECODE: 14},
)


class Site:
    """A router, workers of one layout to which anything happens, and requests that come and go. `untold` are slots that
    workers hold and the registry hears of when it asks."""

    def __init__(self, layout: dict[Role, int], random: Random) -> None:
        self.random = random
        self.now = 10.0
        self.registry, self.pace = Registry(), PrefillPace()
        self.router = Router(self.registry, self.pace, AnswerLengths(), QUIET_S)
        self.plain = ExhaustiveRouter(self.registry, self.pace, QUIET_S, self.router.matched)
        self.registry.foresee = self.tell
        self.untold: dict[str, int] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_requests = self.num_processes = 0
        self.has_all_links = random.random() < 0.5
        for role, number in layout.items():
            for each in range(number):
                self.join(f"{role}-{each}", role)

    def tell(self, worker_id: str) -> None:
        if (num := self.untold.pop(worker_id, 0)) and (worker := self.registry.get(worker_id)) is not None:
            worker.hold(num)

    # ── what can happen ─────────────────────────────────────────────────────────────────────────────────────

    def join(self, worker_id: str, role: Role) -> None:
        self.num_processes += 1
        num_blocks = self.random.choice((64, 64, 40))
        num_seqs = self.random.choice((4, 4, 8))
        incarnation = f"{worker_id}-{self.num_processes}"
        offer = register(worker_id, role, incarnation, num_blocks=num_blocks, max_num_seqs=num_seqs)
        joined = self.registry.join(offer, self.now)
        for other in list(self.registry):
            for prefill, decode in ((joined, other), (other, joined)):
                is_pair = (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
                if is_pair and (self.has_all_links or self.random.random() < 0.6):
                    self.link(prefill, decode)

    def link(self, prefill: Worker, decode: Worker) -> None:
        ready = LinkReady(decode.worker_id, decode.incarnation, "memory", 1.0, 1)
        self.registry.record_link(prefill, ready)

    def ask(self) -> None:
        self.num_requests += 1
        num_prompt, max_tokens = (
            self.random.choice((1, 20, 64, 130, 300, 700)),
            self.random.choice((1, 9, 60)),
        )
        first = 1000 * self.random.randrange(4)
        asked = submission(f"r{self.num_requests}", num_prompt, max_tokens, first=first)
        request = Request(asked, Account(ANYONE))
        request.prefix = prefix_of(asked)
        self.waiting.append(request)

    def leave(self) -> None:
        if self.waiting:
            self.waiting.pop(self.random.randrange(len(self.waiting)))

    def let_go(self) -> None:
        """A worker lets go of something."""
        if self.running:
            request = self.random.choice(self.running)
            leg = self.random.choice(request.legs)
            self.close(leg)

    def close(self, leg: Leg) -> None:
        leg.worker.close(leg)
        leg.request.legs.remove(leg)
        if not leg.request.legs:
            self.running.remove(leg.request)

    def compute(self) -> None:
        """A prompt is computed, and timed or not."""
        legs = [leg for request in self.running for leg in request.legs if leg.pending_tokens]
        if legs:
            leg = self.random.choice(legs)
            if self.random.random() < 0.7:
                self.pace.computed(leg.pending_tokens, self.random.choice((0.001, 0.05, 0.4)))
            leg.worker.prompt_computed(leg)

    def step(self) -> None:
        """A worker's streams get a token each, of which it tells or not."""
        worker = self.any_worker()
        legs = [leg for leg in worker.legs.values() if leg.kind is not LegKind.PREFILL]
        for leg in legs:
            leg.num_tokens += 1
        if self.random.random() < 0.5:
            self.untold[worker.worker_id] = self.untold.get(worker.worker_id, 0) + len(legs)
        else:
            worker.held_tokens += len(legs)

    def fill(self) -> None:
        self.any_worker().full_until = self.now + self.random.choice((0.1, 0.5))

    def pass_time(self) -> None:
        self.now += self.random.choice((0.0, 0.05, 0.3, 1.1))

    def hear(self) -> None:
        """A few workers are heard of, of which one may have had to give up blocks."""
        for worker in self.random.sample(list(self.registry), len(self.registry) // 2 + 1):
            worker.seen_at = self.now
        said = stats()
        if self.random.random() < 0.3:
            said = replace(said, quarantined_blocks=self.random.choice((0, 10, 30)))
        self.any_worker().says(said)

    def depart(self) -> None:
        worker = self.any_worker()
        worker.depart(Departure(None, self.now) if worker.stays else None)

    def die(self) -> None:
        """A worker is lost, and another process takes its place."""
        worker = self.any_worker()
        self.untold.pop(worker.worker_id, None)
        for leg in list(worker.legs.values()):
            self.close(leg)
        self.router.forget(worker)
        self.registry.remove(worker)
        self.join(worker.worker_id, worker.role)

    def any_worker(self) -> Worker:
        return self.random.choice(list(self.registry))

    # ── the choice ──────────────────────────────────────────────────────────────────────────────────────────

    def route(self) -> int:
        """Sends on whoever can go, the first that waits first. Says how many went."""
        num_sent = 0
        while self.waiting:
            request = self.waiting[0]
            found = self.router.choose(request, self.now)
            for worker in self.registry:
                self.tell(worker.worker_id)
            assert _chosen(found) == self.plain.choose(request, self.now)
            for loads in self.registry.loads.values():
                loads.check()
            if found is None:
                break
            self.start(self.waiting.pop(0), found)
            num_sent += 1
        return num_sent

    def start(self, request: Request, route: Route) -> None:
        request.attempt += 1
        uncached = request.num_tokens - self.router.matched(request, route.prefill)
        kinds = ((LegKind.PREFILL, route.prefill, uncached), (LegKind.DECODE, route.decode, 0))
        if route.is_colocated:
            kinds = ((LegKind.GENERATE, route.prefill, uncached),)
        for kind, worker, pending in kinds:
            key = RequestKey(request.request_id, request.attempt)
            leg = Leg(kind, key, worker, request, request.num_tokens, pending)
            request.legs.append(leg)
            worker.open(leg)
        self.running.append(request)
        self.router.dispatched(request, route)


def _chosen(route: Route | None) -> Chosen | None:
    return route and Chosen(route.prefill.worker_id, route.decode.worker_id, route.candidates)


COMMON = (
    Site.ask,
    Site.ask,
    Site.ask,
    Site.let_go,
    Site.let_go,
    Site.compute,
    Site.step,
    Site.step,
    Site.hear,
)
RARE = (Site.leave, Site.fill, Site.pass_time, Site.depart, Site.die)


@settings(max_examples=40, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), seed=st.integers(0, 1 << 32))
def test_the_choice_is_that_of_looking_at_all_workers(layout: dict[Role, int], seed: int) -> None:
    random = Random(seed)
    site = Site(layout, random)
    for _ in range(150):
        happens = random.choice(COMMON if random.random() < 0.8 else RARE)
        happens(site)
        site.route()


def test_what_the_property_compares_are_choices_and_waits() -> None:
    """The operations above lead to many of both, or nothing would be shown."""
    random = Random(1)
    site = Site(LAYOUTS[2], random)
    num_sent = num_waits = 0
    for _ in range(1000):
        random.choice(COMMON if random.random() < 0.8 else RARE)(site)
        num_sent += site.route()
        num_waits += len(site.waiting) > 0
    assert num_sent > 100
    assert num_waits > 100
