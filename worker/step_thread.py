"""The one thread that runs the model, and pushes KV layer by layer as the model writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from twinpool.engine.batch import LayerGroupsDone, StepBatch, StepOutput
from twinpool.errors import PeerLost
from twinpool.kv_transfer.connector import BlockRange, KVSender
from twinpool.request import Job, RequestKey
from twinpool.worker.core import BlockPush, PlanAhead, StepPlan

T = TypeVar("T")


class Grammars(Protocol):
    """What jobs with a grammar need of a model runner. Any thread may use it."""

    def prepare(self, job: Job) -> None:
        """Does ahead of its steps what the job's grammar takes, on any thread. May raise; a step then finds out by
        itself, and tells it as `StepOutput.failed`."""
        ...

    def forget(self, key: RequestKey) -> None:
        """Gives up what was prepared for that job, if its steps have not come for it."""
        ...

    def get_ahead(self) -> bool:
        """Does a piece of what the first job with a grammar would wait for, on any thread; returns whether all is done.
        Other threads may stand still in it. May raise."""
        ...


class Runner(Protocol):
    """What the step thread, and the worker around it, need of a model runner."""

    @property
    def grammars(self) -> Grammars:
        """Where what jobs' grammars need is prepared."""
        ...

    def run(self, batch: StepBatch, on_layer_done: Callable[[int], None] | None = None) -> StepOutput:
        """Runs one step; calls `on_layer_done(layer)` when that layer's KV of the whole batch is final in memory, and
        of `LayerGroupsDone` after its layers at least."""
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, the fences whose pushes failed in it, with the reason, and the step that runs since."""

    plan: StepPlan
    output: StepOutput
    failed: dict[int, str]
    following: StepPlan | None


class LayerPusher:
    """Hands each finished layer of a plan's blocks to the senders, in groups as large as each sender likes.

    `senders[i]` is the link of `pushes[i]`, None if there is none any more.
    """

    def __init__(
        self, pushes: Sequence[BlockPush], senders: Sequence[KVSender | None], num_layers: int
    ) -> None:
        self._links = list(zip(pushes, senders, strict=True))
        self._num_layers = num_layers
        self.failed = {push.fence: no_link(push) for push, sender in self._links if sender is None}

    @property
    def last_layers(self) -> frozenset[int]:
        """The layers that end a group of one of the senders: after the others there is nothing to hand over."""
        groups = {sender.layer_group for _, sender in self._links if sender is not None}
        ends = {end - 1 for group in groups for end in range(group, self._num_layers, group)}
        return frozenset(ends | {self._num_layers - 1})

    def layer_done(self, layer: int) -> None:
        """Layer `layer` is final; pushes the group that it completes, if it does."""
        done = layer + 1
        for push, sender in self._links:
            if sender is None or push.fence in self.failed:
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

    When a step ends, what the newest plan ahead makes of its tokens begins at once; `on_result` gets the results on the
    event loop, in order, each while the next step runs.

    `senders` maps a decode worker's id to the link that pushes to it; the owner keeps it up to date, on the event
    loop. A link is looked up there, when a push is asked for, never later: a fence is only good for the process that
    gave it, and another process may have taken that worker's name by the time the push runs.
    """

    def __init__(
        self,
        runner: Runner,
        num_layers: int,
        senders: Mapping[str, KVSender],
        on_result: Callable[[StepResult], None],
    ) -> None:
        self._runner = runner
        self._num_layers = num_layers
        self._senders = senders
        self._on_result = on_result
        self._loop = asyncio.get_running_loop()
        self._ahead: PlanAhead | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")

    async def run(self, plan: StepPlan) -> None:
        """Runs one plan after everything submitted before it, and those that follow it without a gap. Ends after the
        first result with nothing `following`. Raises what the runner raises."""
        pusher = None
        if plan.pushes:
            senders = [self._senders.get(push.worker_id) for push in plan.pushes]
            pusher = LayerPusher(plan.pushes, senders, self._num_layers)
        await self._submit(lambda: self._run(plan, pusher))

    def offer(self, ahead: PlanAhead | None) -> None:
        """Takes the plan of the step after the running one, in place of what was offered before. It comes too late, and
        has no effect, if the step that it follows has ended."""
        self._ahead = ahead

    def _run(self, plan: StepPlan | None, pusher: LayerPusher | None) -> None:
        while plan is not None:
            layer_done = LayerGroupsDone(pusher.last_layers, pusher.layer_done) if pusher else None
            output = self._runner.run(plan.batch, layer_done)
            # Read once: the event loop may put another in its place at any moment.
            ahead = self._ahead
            following = ahead.resolve(plan, output) if ahead is not None else None
            result = StepResult(plan, output, pusher.failed if pusher else {}, following)
            self._loop.call_soon_threadsafe(self._on_result, result)
            plan, pusher = following, None

    def push(self, push: BlockPush) -> Awaitable[None]:
        """Pushes all layers of blocks that are filled already, after everything submitted before.

        Raises:
            PeerLost: the link is gone; raised here, or by what is returned.
        """
        if (sender := self._senders.get(push.worker_id)) is None:
            raise PeerLost(no_link(push))
        blocks = BlockRange(push.source_blocks, push.target_blocks, 0, self._num_layers)
        return self._submit(lambda: sender.push(push.fence, blocks))

    def _submit(self, function: Callable[[], T]) -> Awaitable[T]:
        return self._loop.run_in_executor(self._executor, function)

    def close(self) -> None:
        """Lets the running step end and takes no more."""
        self._ahead = None
        self._executor.shutdown(wait=True, cancel_futures=True)


def no_link(push: BlockPush) -> str:
    """Why a push without a link fails."""
    return f"no link to {push.worker_id}"
