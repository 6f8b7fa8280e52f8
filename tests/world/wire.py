"""A KV transport in memory that takes its time: bytes are read late, and written later still."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.errors import DigestMismatch, TwinpoolError
from twinpool.kv_transfer.manifest import digests, verify
from twinpool.messages import Manifest
from twinpool.worker.core import (
    BlockPush,
    FinishPush,
    PushFailed,
    PushFinished,
    PushStopped,
    ReceiveCancelled,
    Verified,
)
from world.story import Broken

if TYPE_CHECKING:
    from world.worker import Identity, WorkerProcess

LOOK_S = 0.05
"""How often a receiver looks whether what it waits for is there."""


@dataclass(slots=True)
class _Expected:
    writer: Identity
    block_ids: tuple[int, ...]
    missing: set[int]


class Receiver:
    """A decode process's side. A one-sided one cannot refuse a write: it lands wherever the writer says."""

    def __init__(
        self, owner: WorkerProcess, is_one_sided: bool, may_write: Callable[[int, int], bool]
    ) -> None:
        """`may_write(fence, block_id)`: whether the ledger keeps that block for the writer of that fence."""
        self._owner = owner
        self.is_one_sided = is_one_sided
        self._may_write = may_write
        self._expected: dict[int, _Expected] = {}
        self._verifying: dict[int, tuple[Manifest, float]] = {}

    @property
    def is_expecting(self) -> bool:
        """Whether any reservation is open here."""
        return bool(self._expected or self._verifying)

    def expect(self, fence: int, writer: Identity, block_ids: tuple[int, ...]) -> None:
        """Lets `writer` write blocks under `fence`."""
        self._expected[fence] = _Expected(writer, block_ids, set(block_ids))

    def cancel(self, fence: int) -> None:
        """Expects nothing more under `fence`, some time from now on."""
        self._owner.later(lambda: self._cancel(fence))

    def _cancel(self, fence: int) -> None:
        self._expected.pop(fence, None)
        if self._verifying.pop(fence, None):
            self._owner.take_later(Verified(fence, 0.0, "cancelled"))
        self._owner.handle(ReceiveCancelled(fence))

    def land(self, fence: int, writer: Identity, block_id: int, content: bytes) -> None:
        """A block's bytes arrive."""
        expected = self._expected.get(fence)
        is_admitted = expected is not None and expected.writer == writer and block_id in expected.block_ids
        if self.is_one_sided or is_admitted:
            if not self._may_write(fence, block_id):
                raise Broken(
                    "I2", f"{writer} writes block {block_id} of {self._owner.name} under old fence {fence}"
                )
            self._owner.kv.write(block_id, content)
        if expected is not None:
            expected.missing.discard(block_id)

    def verify(self, manifest: Manifest, timeout_s: float) -> None:
        """Waits for all blocks of the manifest, at most `timeout_s`, and looks at them."""
        self._verifying[manifest.fence] = manifest, self._owner.schedule.now + timeout_s
        self._owner.later(lambda: self._look(manifest.fence))

    def _look(self, fence: int) -> None:
        if fence not in self._verifying:
            return
        manifest, deadline = self._verifying[fence]
        expected = self._expected.get(fence)
        is_late = self._owner.schedule.now > deadline
        if not self.is_one_sided and expected and expected.missing and not is_late:
            self._owner.schedule.after(LOOK_S, self._owner, lambda: self._look(fence))
            return
        del self._verifying[fence]
        error, num_mismatched = "", 0
        try:
            if not self.is_one_sided and expected and expected.missing:
                raise TwinpoolError("the sealed KV has not arrived")
            block_ids = expected.block_ids if expected else ()
            verify(manifest, self._owner.kv.region, manifest.fingerprint, block_ids)
            self._expected.pop(fence, None)
        except DigestMismatch as exc:
            error, num_mismatched = str(exc), exc.num_blocks
        except TwinpoolError as exc:
            error = str(exc)
        self._owner.take_later(Verified(fence, 0.0, error, num_mismatched))


@dataclass(slots=True, eq=False)
class _Item:
    fence: int
    source: int
    target: int
    content: bytes | None = None


class Wire:
    """A prefill process's link to one decode process.

    Source blocks are pinned from the push until they are read, or the stop has taken effect: nobody may write to them.
    A one-sided writer reads and writes by itself: frozen, it writes when it goes on; dead, never. Bytes of a two-sided
    one that have left it arrive whatever becomes of it. `slowness` stretches all times; `num_to_corrupt` blocks get one
    byte flipped on their way, `num_to_lose` vanish. With `freeze_s` the sender stands still for so long when it has
    read the next block.
    """

    def __init__(self, sender: WorkerProcess, peer: WorkerProcess, is_one_sided: bool) -> None:
        self._sender = sender
        self._peer = peer
        self.is_one_sided = is_one_sided
        self._items: dict[_Item, None] = {}
        self._finishing: dict[int, FinishPush] = {}
        self.lost = ""
        self.slowness = 1.0
        self.num_to_corrupt = 0
        self.num_to_lose = 0
        self.freeze_s = 0.0

    @property
    def peer(self) -> WorkerProcess:
        """The process at the other end."""
        return self._peer

    @property
    def is_busy(self) -> bool:
        """Whether bytes are under way, or an answer is owed."""
        return bool(self._items or self._finishing)

    def push(self, push: BlockPush) -> bool:
        """Takes blocks to send; False if the link is lost."""
        if self.lost:
            return False
        for source, target in zip(push.source_blocks, push.target_blocks, strict=True):
            item = _Item(push.fence, source, target)
            self._items[item] = None
            self._sender.kv.pinned[source] += 1
            self._sender.schedule.after(self._delay(), self._sender, lambda item=item: self._read(item))
        return True

    def finish(self, command: FinishPush) -> None:
        """Answers once all blocks of the fence are handed over."""
        self._finishing[command.fence] = command
        self._end_finished()

    def stop(self, fence: int) -> None:
        """Forgets, some time later, everything of the fence that has not landed by then."""
        self._sender.later(lambda: self._stop(fence))

    def break_off(self, reason: str) -> None:
        """The link is lost, with all that is on it."""
        self.lost = reason
        for item in list(self._items):
            self._drop(item)
        self._end_finished()

    def _delay(self) -> float:
        return self.slowness * self._sender.random.uniform(0.0002, 0.004)

    def _read(self, item: _Item) -> None:
        if item not in self._items:
            return
        item.content = self._sender.kv.read(item.source)
        self._sender.kv.pinned[item.source] -= 1
        lander = self._sender if self.is_one_sided else self._peer
        self._sender.schedule.after(self._delay(), lander, lambda: self._land(item))
        self._end_finished()
        if self.freeze_s:
            self._sender.freeze(self.freeze_s)
            self.freeze_s = 0.0

    def _land(self, item: _Item) -> None:
        if item not in self._items or item.content is None:
            return
        del self._items[item]
        content = item.content
        if self.num_to_corrupt:
            self.num_to_corrupt -= 1
            content = bytes([content[0] ^ 0x15, *content[1:]])
        if self.num_to_lose and not self.is_one_sided:
            self.num_to_lose -= 1
        elif self._peer.has_another_role and self.is_one_sided:
            raise Broken(
                "I2",
                f"{self._sender.identity} writes block {item.target} of {self._peer.name}, now of another role",
            )
        elif self._peer.is_alive:
            self._peer.receiver.land(item.fence, self._sender.identity, item.target, content)
        self._end_finished()

    def _drop(self, item: _Item) -> None:
        if item.content is None:
            self._sender.kv.pinned[item.source] -= 1
        del self._items[item]

    def _stop(self, fence: int) -> None:
        for item in [item for item in self._items if item.fence == fence]:
            self._drop(item)
        self._finishing.pop(fence, None)
        self._sender.handle(PushStopped(fence))

    def _end_finished(self) -> None:
        if not self._finishing:
            return
        busy = {item.fence for item in self._items if self.is_one_sided or item.content is None}
        for fence in [fence for fence in self._finishing if fence not in busy]:
            command = self._finishing.pop(fence)
            if self.lost:
                self._sender.take_later(PushFailed(fence, self.lost))
                continue
            found = digests(self._sender.kv.region, command.source_blocks)
            self._sender.take_later(PushFinished(fence, found, 8 * len(found), 0.001))
