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
        self._verifying: dict[int, tuple[Manifest, float]] = {}

    @property
    def is_expecting(self) -> bool:
        """Whether any reservation is open here."""
        return bool(self._missing or self._verifying)

    def expect(self, fence: int, block_ids: tuple[int, ...]) -> None:
        """Lets blocks in under `fence`."""
        self._missing[fence] = set(block_ids)

    def cancel(self, fence: int) -> None:
        """Expects nothing more under `fence`, which may be complete already."""
        self._missing.pop(fence, None)
        self._verifying.pop(fence, None)

    def verify(self, manifest: Manifest, deadline: float) -> None:
        """Starts to wait for all blocks of the manifest."""
        self._verifying[manifest.fence] = manifest, deadline

    def land(self, fence: int, block_id: int, cells: Cells) -> None:
        """A block's bytes arrive."""
        missing = self._missing.get(fence)
        if missing is not None or self._is_one_sided:
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
    """A prefill worker's link to one decode worker. `answer` tells the sender's core, some time later."""

    def __init__(self, source: FakeKV, receiver: Receiver, answer: Callable[[Event], None]) -> None:
        self._source = source
        self._receiver = receiver
        self._answer = answer
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

    def finish(self, command: FinishPush) -> None:
        """Answers once all blocks of the fence are read."""
        self._finishing[command.fence] = command
        self._end_finished()

    def stop(self, fence: int) -> None:
        """Forgets everything of the fence that has not landed."""
        self._queued = [item for item in self._queued if item[0] != fence]
        self._flying = [item for item in self._flying if item[0] != fence]
        self._finishing.pop(fence, None)
        self._answer(PushStopped(fence))

    def break_off(self) -> None:
        """The other side has died."""
        self._is_broken = True
        self._queued.clear()
        self._flying.clear()
        self._end_finished()

    def move(self, random: Random) -> None:
        """One block is read, or lands; any of them may be next."""
        chosen = random.randrange(len(self._queued) + len(self._flying))
        if chosen < len(self._queued):
            fence, source, target = self._queued.pop(chosen)
            self._flying.append((fence, target, self._source.read(source)))
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
