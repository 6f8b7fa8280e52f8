"""Any order of events, late and repeated ones too, keeps every block with exactly one owner."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from twinpool.kv_transfer.ledger import OwnershipLedger, ReservationState, Writer
from twinpool.metrics import Counters
from twinpool.request import RequestKey

NUM_BLOCKS = 12
LEASE_S = 5.0
WRITERS = [Writer("prefill-0", "a"), Writer("prefill-0", "b"), Writer("prefill-1", "c")]
LIVE = (ReservationState.OPEN, ReservationState.SEALED)


class AnyOrderOfEvents(RuleBasedStateMachine):
    """A pool of blocks beside the ledger, and a model of each reservation that remembers what it has been
    told.
    """

    fences: Bundle[int] = Bundle("fences")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = OwnershipLedger("incarnation", Counters())
        self.now = 0.0
        self.free = set(range(NUM_BLOCKS))
        self.blocks: dict[int, frozenset[int]] = {}
        self.writer: dict[int, Writer] = {}
        self.live: set[int] = set()
        self.sealed: set[int] = set()
        self.ended: set[int] = set()
        self.receiving: set[int] = set()
        self.writing: set[int] = set()

    @rule(target=fences, writer=st.sampled_from(WRITERS), count=st.integers(0, 4))
    def open(self, writer: Writer, count: int) -> int:
        taken = frozenset(sorted(self.free)[: min(count, len(self.free))])
        fence = self.ledger.open(RequestKey("r", 0), writer, sorted(taken), self.now, LEASE_S)
        assert fence not in self.blocks
        assert fence > max(self.blocks, default=0)
        self.free -= taken
        self.blocks[fence], self.writer[fence] = taken, writer
        self.live.add(fence)
        self.receiving.add(fence)
        self.writing.add(fence)
        return fence

    @rule(fence=fences, writer=st.sampled_from(WRITERS))
    def seal(self, fence: int, writer: Writer) -> None:
        expected = fence in self.live - self.sealed and writer == self.writer[fence]
        assert self.ledger.sealed(fence, writer, self.now) is expected
        if expected:
            self.sealed.add(fence)

    @rule(fence=fences)
    def accept(self, fence: int) -> None:
        if fence in self.live - self.sealed:
            return  # accepting what is not sealed is a bug, and a unit test's business
        blocks = self.ledger.accept(fence)
        assert (blocks is not None) == (fence in self.live)
        if blocks is not None:
            self.live.discard(fence)
            self.take_back(fence, blocks)

    @rule(fence=fences)
    def revoke(self, fence: int) -> None:
        assert self.ledger.revoke(fence, self.now, "test") is (fence in self.live)
        self.live.discard(fence)

    @rule(fence=fences)
    def receive_is_cancelled(self, fence: int) -> None:
        if fence in self.live:
            return
        blocks = self.ledger.receive_cancelled(fence)
        if fence not in self.ended:
            self.receiving.discard(fence)
            self.settle([fence], blocks)

    @rule(fence=fences, writer=st.sampled_from(WRITERS))
    def writer_acknowledges(self, fence: int, writer: Writer) -> None:
        blocks = self.ledger.writer_acknowledged(fence, writer)
        if fence not in self.live | self.ended and writer == self.writer[fence]:
            self.writing.discard(fence)
            self.settle([fence], blocks)
        else:
            assert blocks == ()

    @rule(writer=st.sampled_from(WRITERS))
    def writer_dies(self, writer: Writer) -> None:
        orphans = self.ledger.writer_gone(writer)
        mine = [fence for fence in self.blocks if self.writer[fence] == writer and fence not in self.ended]
        self.writing.difference_update(mine)
        assert set(orphans.fences) == self.live.intersection(mine)
        self.settle([fence for fence in mine if fence not in self.live], orphans.released)

    @rule(seconds=st.floats(0, LEASE_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for fence in self.ledger.expired(self.now):
            assert fence in self.live
            assert self.ledger.revoke(fence, self.now, "expired")
            self.live.discard(fence)

    @rule(fence=fences)
    def renew(self, fence: int) -> None:
        assert self.ledger.renew(fence, self.now) is (fence in self.live)
        if fence in self.live:
            assert fence not in self.ledger.expired(self.now + LEASE_S / 2)

    @rule(fence=consumes(fences))
    def forget_a_fence(self, fence: int) -> None:
        """Lets the others be told about more often."""

    def settle(self, fences: Iterable[int], released: tuple[int, ...]) -> None:
        """Exactly those of the revoked `fences` that nobody can write to any more give their blocks back,
        now.
        """
        done = [fence for fence in fences if fence not in self.receiving | self.writing]
        assert sorted(released) == sorted(block for fence in done for block in self.blocks[fence])
        for fence in done:
            self.take_back(fence, tuple(self.blocks[fence]))

    def take_back(self, fence: int, blocks: tuple[int, ...]) -> None:
        assert fence not in self.ended
        assert self.blocks[fence] == frozenset(blocks)
        assert self.free.isdisjoint(blocks)
        self.ended.add(fence)
        self.free.update(blocks)

    @invariant()
    def every_block_has_one_owner(self) -> None:
        self.ledger.check()
        held = [block for reservation in self.ledger.reservations() for block in reservation.block_ids]
        assert sorted([*held, *self.free]) == list(range(NUM_BLOCKS))
        assert self.ledger.num_reserved + self.ledger.num_quarantined == len(held)
        assert {r.fence for r in self.ledger.reservations() if r.state in LIVE} == self.live

    def teardown(self) -> None:
        """Whatever has happened: revoking all, and hearing of all deaths, gives every block back."""
        for fence in list(self.live):
            self.revoke(fence)
        for fence in list(self.blocks):
            self.receive_is_cancelled(fence)
        for writer in WRITERS:
            self.writer_dies(writer)
        assert self.free == set(range(NUM_BLOCKS))
        assert self.ledger.num_quarantined == 0


AnyOrderOfEvents.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
