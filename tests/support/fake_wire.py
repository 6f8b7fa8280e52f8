"""A KV transport in memory that takes its time: bytes are read late, and written later still."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from support.fake_model import Cells, FakeKV, digest
from twinpool.messages import Manifest
from twinpool.worker.core import BlockPush, Event, FinishPush, PushFailed, PushFinished, PushStopped

CORRUPTED_TOKEN = 1_000_000


class Receiver:
    """A decode worker's side. A one-sided one cannot refuse a write: it lands wherever the writer says."""

    def __init__(self, kv: FakeKV, is_one_sided: bool) -> None:
        self._kv = kv
        self._is_one_sided = is_one_sided
        self._missing: dict[int, set[int]] = {}
        self._fence_of_block: dict[int, int] = {}
        self._verifying: dict[int, tuple[Manifest, float]] = {}

    @property
    def is_expecting(self) -> bool:
        """Whether any reservation is open here."""
        return bool(self._missing or self._verifying)

    def expect(self, fence: int, block_ids: tuple[int, ...]) -> None:
        """Lets blocks in under `fence`."""
        self._missing[fence] = set(block_ids)
        self._fence_of_block.update(dict.fromkeys(block_ids, fence))

    def cancel(self, fence: int) -> None:
        """Expects nothing more under `fence`, which may be complete already."""
        self._missing.pop(fence, None)
        self._verifying.pop(fence, None)

    def verify(self, manifest: Manifest, deadline: float) -> None:
        """Starts to wait for all blocks of the manifest."""
        self._verifying[manifest.fence] = manifest, deadline

    def land(self, fence: int, block_id: int, cells: Cells) -> None:
        """A block's bytes arrive, never in a block that was lent to somebody else since."""
        missing = self._missing.get(fence)
        if missing is not None or self._is_one_sided:
            assert self._fence_of_block[block_id] == fence, f"a late write of fence {fence} hits a new owner"
            self._kv.write(block_id, cells)
        if missing is not None:
            missing.discard(block_id)

    def due(self, now: float) -> list[tuple[Manifest, bool]]:
        """The manifests that are complete or whose time is up (then with True), each once."""
        due = []
        for fence, (manifest, deadline) in list(self._verifying.items()):
            if not self._missing[fence] or now > deadline:
                late = bool(self._missing[fence])
                del self._verifying[fence]
                if not late:
                    del self._missing[fence]
                due.append((manifest, late))
        return due


class Wire:
    """A prefill worker's link to one decode worker.

    `later(call)` makes a call some time later, `take(event)` gives an event to the sender's core. Source blocks are
    pinned from the push until they are read or the stop has taken effect: nobody may write to them.
    """

    def __init__(
        self,
        source: FakeKV,
        receiver: Receiver,
        later: Callable[[Callable[[], None]], None],
        take: Callable[[Event], None],
    ) -> None:
        self._source = source
        self._receiver = receiver
        self._later = later
        self._take = take
        self._queued: list[tuple[int, int, int]] = []  # fence, source block, target block: not read yet
        self._flying: list[tuple[int, int, Cells]] = []  # fence, target block, contents: not landed yet
        self._finishing: dict[int, FinishPush] = {}
        self._is_broken = False
        self.num_to_corrupt = 0

    @property
    def is_busy(self) -> bool:
        """Whether bytes are under way."""
        return bool(self._queued or self._flying)

    def push(self, push: BlockPush) -> None:
        """Takes blocks to send."""
        if not self._is_broken:
            pairs = zip(push.source_blocks, push.target_blocks, strict=True)
            self._queued += [(push.fence, source, target) for source, target in pairs]
            self._source.pinned.update(push.source_blocks)

    def finish(self, command: FinishPush) -> None:
        """Answers once all blocks of the fence are read."""
        self._finishing[command.fence] = command
        self._end_finished()

    def stop(self, fence: int) -> None:
        """Forgets, some time later, everything of the fence that has not landed by then."""
        self._later(lambda: self._stop(fence))

    def _stop(self, fence: int) -> None:
        self._unpin([source for of, source, _ in self._queued if of == fence])
        self._queued = [item for item in self._queued if item[0] != fence]
        self._flying = [item for item in self._flying if item[0] != fence]
        self._finishing.pop(fence, None)
        self._take(PushStopped(fence))

    def break_off(self) -> None:
        """The other side has died."""
        self._is_broken = True
        self._unpin([source for _, source, _ in self._queued])
        self._queued.clear()
        self._flying.clear()
        self._end_finished()

    def _unpin(self, source_blocks: list[int]) -> None:
        self._source.pinned.subtract(source_blocks)

    def _answer(self, event: Event) -> None:
        self._later(lambda: self._take(event))

    def move(self, random: Random) -> None:
        """One block is read, or lands; any of them may be next."""
        chosen = random.randrange(len(self._queued) + len(self._flying))
        if chosen < len(self._queued):
            fence, source, target = self._queued.pop(chosen)
            self._flying.append((fence, target, self._source.read(source)))
            self._unpin([source])
            self._end_finished()
            return
        fence, target, cells = self._flying.pop(chosen - len(self._queued))
        if self.num_to_corrupt:
            self.num_to_corrupt -= 1
            cells = (CORRUPTED_TOKEN, *cells[1:])
        self._receiver.land(fence, target, cells)

    def _end_finished(self) -> None:
        reading = {fence for fence, _, _ in self._queued}
        for fence, command in list(self._finishing.items()):
            if fence in reading:
                continue
            del self._finishing[fence]
            if self._is_broken:
                self._answer(PushFailed(fence, "the other side is gone"))
                continue
            digests = tuple(digest(self._source.read(block)) for block in command.source_blocks)
            self._answer(PushFinished(fence, digests, 4 * len(digests), 0.001))
