"""The one thread that runs the model, and pushes KV layer by layer as the model writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from twinpool.engine.batch import StepBatch, StepOutput
from twinpool.errors import PeerLost
from twinpool.kv_transfer.connector import BlockRange, KVSender
from twinpool.worker.core import BlockPush, StepPlan

T = TypeVar("T")


class Runner(Protocol):
    """What the step thread needs of a model runner."""

    def run(self, batch: StepBatch, on_layer_done: Callable[[int], None] | None = None) -> StepOutput:
        """Runs one step; calls `on_layer_done(layer)` when that layer's KV of the whole batch is final in memory."""
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, and the fences whose pushes failed in it, with the reason."""

    output: StepOutput
    failed: dict[int, str]


class LayerPusher:
    """Hands each finished layer of a plan's blocks to the senders, in groups as large as each sender likes."""

    def __init__(self, pushes: Sequence[BlockPush], senders: Mapping[str, KVSender], num_layers: int) -> None:
        self._pushes = pushes
        self._senders = senders
        self._num_layers = num_layers
        self.failed: dict[int, str] = {}

    def layer_done(self, layer: int) -> None:
        """Layer `layer` is final; pushes the group that it completes, if it does."""
        done = layer + 1
        for push in self._pushes:
            if push.fence in self.failed:
                continue
            sender = self._senders.get(push.worker_id)
            if sender is None:
                self.failed[push.fence] = f"no link to {push.worker_id}"
                continue
            into_group = done % sender.layer_group
            if into_group and done < self._num_layers:
                continue
            first = done - (into_group or sender.layer_group)
            try:
                sender.push(push.fence, BlockRange(push.source_blocks, push.target_blocks, first, done))
            except PeerLost as exc:
                self.failed[push.fence] = str(exc)


class StepThread:
    """Runs steps and pushes, one after the other, off the event loop.

    `senders` maps a decode worker's id to the link that pushes to it; the owner keeps it up to date.
    """

    def __init__(self, runner: Runner, num_layers: int, senders: Mapping[str, KVSender]) -> None:
        self._runner = runner
        self._num_layers = num_layers
        self._senders = senders
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")

    async def call(self, function: Callable[[], T]) -> T:
        """Runs `function` after everything submitted before it."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    async def step(self, plan: StepPlan) -> StepResult:
        """Runs one plan."""
        return await self.call(lambda: self._step(plan))

    async def push(self, push: BlockPush) -> None:
        """Pushes all layers of blocks that are filled already. Raises PeerLost."""
        await self.call(lambda: self._push(push))

    def _step(self, plan: StepPlan) -> StepResult:
        if not plan.pushes:
            return StepResult(self._runner.run(plan.batch), {})
        pusher = LayerPusher(plan.pushes, self._senders, self._num_layers)
        return StepResult(self._runner.run(plan.batch, pusher.layer_done), pusher.failed)

    def _push(self, push: BlockPush) -> None:
        sender = self._senders.get(push.worker_id)
        if sender is None:
            raise PeerLost(f"no link to {push.worker_id}")
        sender.push(push.fence, BlockRange(push.source_blocks, push.target_blocks, 0, self._num_layers))

    def close(self) -> None:
        """Lets the running step end and takes no more."""
        self._executor.shutdown(wait=True, cancel_futures=True)
