"""Nonsense from coordinator and peers, between real work: no worker core breaks, and in the end everything is free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import junk
from support.jobs import done

from twinpool.colocated_pool.core import ColocatedCore
from twinpool.colocated_pool.hybrid import HybridCore, HybridDecodeCore, HybridPrefillCore
from twinpool.config import Role, SchedulerConfig
from twinpool.decode_pool.core import DecodeCore
from twinpool.layout import Dtype, KVLayout
from twinpool.messages import (
    Cancel,
    Dropped,
    Generate,
    Granted,
    Message,
    Prefill,
    PushTo,
    Renew,
    Reserve,
    Revoke,
    RevokeAck,
    Seal,
    SealAck,
    decode,
    encode,
)
from twinpool.metrics import WorkerMetric
from twinpool.prefill_pool.core import PrefillCore
from twinpool.request import Job, RequestKey
from twinpool.worker.core import (
    CancelReceive,
    Command,
    Event,
    FinishPush,
    FromCoordinator,
    FromPeer,
    PeerGone,
    PeerLinked,
    PushFailed,
    PushFinished,
    PushStopped,
    ReceiveCancelled,
    SendCoordinator,
    StepPlan,
    StopPush,
    Tick,
    Verified,
    Verify,
)

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype=Dtype.FLOAT32)
NUM_BLOCKS = 8
CONFIG = SchedulerConfig(token_budget=4, max_num_seqs=2, headroom_tokens=2)
PEERS = {Role.PREFILL: ("decode-0", "life-1"), Role.DECODE: ("prefill-0", "life-1")}

TOLD: dict[Role, tuple[type[Message], ...]] = {
    Role.PREFILL: (Prefill, Prefill, PushTo, PushTo, Cancel),
    Role.DECODE: (Reserve, Reserve, Reserve, Cancel),
    Role.COLOCATED: (Generate, Generate, Cancel),
}
KINDS = [(role, False) for role in Role] + [(Role.PREFILL, True), (Role.DECODE, True)]
HEARD = {Role.PREFILL: (SealAck, Revoke), Role.DECODE: (Seal, Seal, Renew, RevokeAck)}


Pick = Callable[[list[Any]], Any]


class Bench:
    """A worker's core, what its shell still has to answer, and what the test knows of its fences."""

    def __init__(self, role: Role, is_hybrid: bool) -> None:
        self.role = role
        self.peer = PEERS.get(role)
        self.core: PrefillCore | DecodeCore | ColocatedCore | HybridCore
        match role:
            case Role.PREFILL if is_hybrid:
                self.core = HybridPrefillCore(NUM_BLOCKS, LAYOUT, "model", CONFIG)
            case Role.DECODE if is_hybrid:
                self.core = HybridDecodeCore(NUM_BLOCKS, LAYOUT, "model", CONFIG, "life-1")
            case Role.PREFILL:
                self.core = PrefillCore(NUM_BLOCKS, LAYOUT, "model", CONFIG)
            case Role.DECODE:
                self.core = DecodeCore(NUM_BLOCKS, LAYOUT, "model", CONFIG, "life-1")
            case Role.COLOCATED:
                self.core = ColocatedCore(NUM_BLOCKS, LAYOUT, CONFIG)
        self.now = 0.0
        self.plan: StepPlan | None = None
        self.owed: deque[Command] = deque()
        self.jobs: dict[RequestKey, Job] = {}
        self.keys: set[RequestKey] = set()
        self.grants: dict[int, Granted] = {}
        self.pushes: list[int] = []
        if self.peer is not None:
            self.feed(PeerLinked(*self.peer, "memory"))

    def feed(self, event: Event) -> None:
        """One event; the books are checked after it."""
        match event:
            case FromCoordinator(Prefill(job) | Reserve(job) | Generate(job)):
                self.jobs.setdefault(job.key, job)
                self.keys.add(job.key)
        for command in self.core.handle(event, self.now):
            match command:
                case FinishPush() | StopPush() | CancelReceive() | Verify():
                    self.owed.append(command)
                case SendCoordinator(Granted() as granted):
                    self.grants[granted.fence] = granted
                case SendCoordinator(Dropped(key)):
                    self.jobs.pop(key, None)
                    self.grants = {f: granted for f, granted in self.grants.items() if granted.key != key}
        self.core.check()

    def answer(self, goes_well: bool) -> None:
        """The shell answers the oldest command that it owes an answer."""
        match self.owed.popleft():
            case FinishPush(fence, _, blocks) if goes_well:
                self.feed(PushFinished(fence, (7,) * len(blocks), 64, 0.1))
            case FinishPush(fence):
                self.feed(PushFailed(fence, "the link is lost"))
            case StopPush(fence):
                self.feed(PushStopped(fence))
            case CancelReceive(fence):
                self.feed(ReceiveCancelled(fence))
            case Verify(manifest):
                self.feed(Verified(manifest.fence, 0.1, "" if goes_well else "a digest differs"))

    def step(self, goes_well: bool = True) -> None:
        """A step begins, or the one that runs ends: of its sequences the first may be unable to go on."""
        if self.plan is None:
            self.plan = self.core.next_step(self.now)
            self.core.check()
            return
        plan, self.plan = self.plan, None
        self.feed(done(plan, 5, () if goes_well else (plan.batch.slices[0].key,)))

    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.feed(Tick())

    def nearly_right(self, message: Message, pick: Pick) -> Message:
        """The message with values that fit what is here, all but perhaps one of them."""
        fitting = self._fitting(message, pick)
        if not fitting:
            return message
        wrong = pick([*fitting, "", "", ""])
        values = {name: value for name, value in fitting.items() if name != wrong}
        if isinstance(message, Seal):
            return Seal(msgspec.structs.replace(message.manifest, **values))
        if isinstance(message, PushTo):
            # More cached than granted is no message: it is refused where it is made.
            cached = values.get("num_cached_blocks", message.num_cached_blocks)
            values["num_cached_blocks"] = min(cached, len(values.get("block_ids", message.block_ids)))
        return msgspec.structs.replace(message, **values)

    def _fitting(self, message: Message, pick: Pick) -> dict[str, Any]:
        match message:
            case Reserve():
                return {"prefill_worker": "prefill-0", "prefill_incarnation": "life-1"}
            case PushTo() if self.jobs:
                job = pick(list(self.jobs.values()))
                self.pushes.append(message.fence)
                return {
                    "key": job.key, "decode_worker": "decode-0", "decode_incarnation": "life-1",
                    "block_ids": tuple(range(-(-len(job.token_ids) // LAYOUT.block_size))), "num_cached_blocks": 0,
                }  # fmt: skip
            case SealAck() | Revoke() if self.pushes:
                return {"fence": pick(self.pushes)}
        if not self.grants:
            return {}
        granted = pick(list(self.grants.values()))
        match message:
            case Seal():
                blocks = granted.block_ids[granted.num_cached_blocks :]
                return {
                    "key": granted.key, "fence": granted.fence, "fingerprint": "model", "layout": LAYOUT,
                    "num_tokens": len(self.jobs[granted.key].token_ids), "block_ids": blocks,
                    "digests": (7,) * len(blocks),
                }  # fmt: skip
            case Renew():
                return {"fences": (*message.fences, granted.fence)}
            case RevokeAck():
                return {"key": granted.key, "fence": granted.fence}
        return {}

    def end(self) -> None:
        """Everybody cancels and leaves; the shell answers all."""
        for key in sorted(self.keys):
            self.feed(FromCoordinator(Cancel(key)))
        if self.peer is not None:
            self.feed(PeerGone(*self.peer))
        for _ in range(50):
            while self.owed:
                self.answer(goes_well=True)
            if self.plan is not None:
                self.step()
            self.tick(20.0)
        assert not self.owed

    def assert_free(self) -> None:
        """Nothing is held any more."""
        stats = self.core.stats()
        assert stats.free_blocks + stats.cached_blocks == NUM_BLOCKS, stats
        assert stats.waiting == stats.running == stats.leased_blocks == stats.quarantined_blocks == 0, stats


@pytest.mark.parametrize(("role", "is_hybrid"), KINDS)
@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_no_nonsense_breaks_a_worker(role: Role, is_hybrid: bool, data: st.DataObject) -> None:
    bench = Bench(role, is_hybrid)

    def pick(choices: list[Any]) -> Any:
        return choices[data.draw(st.integers(0, len(choices) - 1))]

    told = junk.messages(*TOLD[role], *([Generate, Generate] if is_hybrid else []))
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.integers(0, 9)):
            case 0 | 1 | 2:
                message = bench.nearly_right(data.draw(told), pick)
                bench.feed(FromCoordinator(decode(encode(message))))
            case 3 | 4 if bench.peer is not None:
                message = bench.nearly_right(data.draw(junk.messages(*HEARD[role])), pick)
                bench.feed(FromPeer(*bench.peer, decode(encode(message))))
            case 5 if bench.owed:
                bench.answer(goes_well=data.draw(st.booleans()))
            case 6 | 7:
                bench.step(goes_well=data.draw(st.integers(0, 4)) > 0)
            case 8:
                bench.tick(data.draw(st.sampled_from((0.1, 3.0, 11.0))))
            case 9:
                bench.feed(FromCoordinator(data.draw(junk.messages())))
                if bench.peer is not None:
                    bench.feed(FromPeer("ghost", "life-9", data.draw(junk.messages())))
    bench.end()
    bench.assert_free()
    assert bench.core.counters[WorkerMetric.INVARIANT_VIOLATIONS] == 0
