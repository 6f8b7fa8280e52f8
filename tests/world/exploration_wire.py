"""The one-sided wire of the explored protocol: blocks that are read late and land later, in any order of fences."""

from __future__ import annotations

from twinpool.messages import Manifest
from twinpool.worker.core import BlockPush, PushFinished, Verified
from world.exploration_state import Broken, D, P, State


class Wired(State):
    """What is on its way from prefill's blocks to decode's, and who waits for it."""

    def _read(self, of: str) -> None:
        """The next block of a fence is read: of one fence the wire keeps the order, of several it does not."""
        item = next(item for item in self.unread if item[0] == int(of))
        fence, request, source, target = item
        if fence not in self.frozen_fences and source not in (held := self._view(P).lent.get(fence, ())):
            raise Broken(f"prefill's block {source} is read under fence {fence}, whose job has {held}")
        self.unread = tuple(other for other in self.unread if other != item)
        self.flying = (*self.flying, (fence, request, target))
        self._answer_finished()

    def _land(self, of: str) -> None:
        item = next(item for item in self.flying if item[0] == int(of))
        fence, request, target = item
        self.flying = tuple(other for other in self.flying if other != item)
        if self.processes[D] is None or target not in self._view(D).lent.get(fence, ()):
            raise Broken(f"I2: a late write of {request} under fence {fence} hits decode's block {target}")
        self.contents = (*self.contents[:target], request, *self.contents[target + 1 :])
        if fence in self.missing:
            self.missing[fence] = tuple(block for block in self.missing[fence] if block != target)
            self._answer_verified(fence)

    def _reaches_decode(self, link: str) -> bool:
        return self.processes[D] is not None and link == self._life(D)

    def _push(self, push: BlockPush, link: str) -> None:
        if self._reaches_decode(link):
            request = self._view(P).job_of[push.fence].request_id
            pairs = zip(push.source_blocks, push.target_blocks, strict=True)
            self.unread += tuple((push.fence, request, source, target) for source, target in pairs)

    def _answer_finished(self) -> None:
        unread = {item[0] for item in self.unread}
        for fence in [fence for fence in self.finishing if fence not in unread]:
            digests = (0,) * self.finishing.pop(fence)
            self._answer_later(P, PushFinished(fence, digests, 0, 0.0))

    def _answer_verified(self, fence: int) -> None:
        if fence in self.verifying and not self.missing.get(fence):
            manifest: Manifest = self.cast.things[self.verifying.pop(fence)]
            wanted = manifest.key.request_id
            is_right = all(self.contents[block] == wanted for block in manifest.block_ids)
            self._answer_later(D, Verified(fence, 0.0, "" if is_right else "a digest differs"))

    def _give_up_verifying(self) -> None:
        for fence in self.verifying:
            self._answer_later(D, Verified(fence, 0.0, "not all has arrived"))
        self.verifying.clear()
