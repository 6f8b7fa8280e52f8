"""Carries out a core's transfer commands over the links, and answers each with its event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from twinpool.errors import DigestMismatch, PeerLost, TransferError, TwinpoolError
from twinpool.kv_transfer.connector import KVReceiver, KVSender
from twinpool.kv_transfer.manifest import digests, verify
from twinpool.messages import Manifest
from twinpool.worker.core import (
    BlockPush,
    CancelReceive,
    Event,
    FinishPush,
    PostReceive,
    Push,
    PushFailed,
    PushFinished,
    PushStopped,
    ReceiveCancelled,
    StopPush,
    Verified,
    Verify,
)
from twinpool.worker.incoming import IncomingLinks
from twinpool.worker.links import LocalPool, Spawn
from twinpool.worker.step_thread import StepThread

TransferCommand = Push | FinishPush | StopPush | PostReceive | CancelReceive | Verify


class Transfers:
    """The transfers of one worker. `emit` takes the events; it is never called from within `carry_out`.

    `senders` is the live map from a decode worker's id to its link; `incoming` are a decode worker's links.
    """

    def __init__(
        self,
        pool: LocalPool,
        steps: StepThread,
        senders: Mapping[str, KVSender],
        incoming: IncomingLinks | None,
        emit: Callable[[Event], None],
        spawn: Spawn,
    ) -> None:
        self._pool = pool
        self._steps = steps
        self._senders = senders
        self._incoming = incoming
        self._emit = emit
        self._spawn = spawn
        self._pushes: dict[int, set[asyncio.Task[None]]] = {}
        self._expected: dict[int, tuple[KVReceiver, tuple[int, ...]]] = {}

    def carry_out(self, command: TransferCommand) -> None:
        """Begins `command`; its event comes later."""
        match command:
            case Push(push):
                self._push(push)
            case FinishPush(fence, worker_id, source_blocks):
                self._spawn(self._finish_push(fence, self._senders.get(worker_id), source_blocks))
            case StopPush(fence, worker_id):
                self._spawn(self._stop_push(fence, self._senders.get(worker_id)))
            case PostReceive():
                self._post_receive(command)
            case CancelReceive(fence):
                self._spawn(self._cancel_receive(fence))
            case Verify(manifest, timeout_s):
                self._spawn(self._verify(manifest, timeout_s))

    # ── prefill's side ────────────────────────────────────────────────────────────────────────────────────

    def _push(self, push: BlockPush) -> None:
        try:
            pushing = self._steps.push(push)
        except PeerLost as exc:
            self._spawn(self._push_failed(push.fence, exc))
        else:
            task = self._spawn(self._await_push(push.fence, pushing))
            self._pushes.setdefault(push.fence, set()).add(task)
            task.add_done_callback(lambda task: self._push_ended(push.fence, task))

    async def _await_push(self, fence: int, pushing: Awaitable[None]) -> None:
        try:
            await pushing
        except PeerLost as exc:
            await self._push_failed(fence, exc)

    def _push_ended(self, fence: int, task: asyncio.Task[None]) -> None:
        self._pushes[fence].discard(task)
        if not self._pushes[fence]:
            del self._pushes[fence]

    async def _push_failed(self, fence: int, exc: TransferError) -> None:
        self._emit(PushFailed(fence, str(exc)))

    async def _finish_push(self, fence: int, sender: KVSender | None, source_blocks: tuple[int, ...]) -> None:
        await self._pushes_done(fence)
        if sender is None:
            await self._push_failed(fence, PeerLost("the link to the decode worker is gone"))
            return
        hashing = asyncio.to_thread(digests, self._pool.region, source_blocks)
        report, found = await asyncio.gather(sender.finish(fence), hashing, return_exceptions=True)
        if isinstance(found, BaseException):
            raise found
        if isinstance(report, TransferError):
            await self._push_failed(fence, report)
        elif isinstance(report, BaseException):
            raise report
        else:
            self._emit(PushFinished(fence, found, report.num_bytes, report.seconds))

    async def _stop_push(self, fence: int, sender: KVSender | None) -> None:
        await self._pushes_done(fence)
        if sender is not None:
            await sender.stop(fence)
        self._emit(PushStopped(fence))

    async def _pushes_done(self, fence: int) -> None:
        if pushes := self._pushes.get(fence):
            await asyncio.wait(pushes)

    # ── decode's side ─────────────────────────────────────────────────────────────────────────────────────

    def _post_receive(self, command: PostReceive) -> None:
        writer = f"{command.writer}/{command.writer_incarnation}"
        if self._incoming is None:
            raise TwinpoolError("only a decode worker receives KV")
        try:
            receiver = self._incoming.receiver_of(writer)
        except PeerLost:
            return  # its PeerGone is on the way, and ends the reservation
        receiver.expect(command.fence, writer, command.block_ids)
        self._expected[command.fence] = (receiver, command.block_ids)

    async def _cancel_receive(self, fence: int) -> None:
        if (expected := self._expected.pop(fence, None)) is not None:
            await expected[0].cancel(fence)
        self._emit(ReceiveCancelled(fence))

    async def _verify(self, manifest: Manifest, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        started, fence = loop.time(), manifest.fence
        receiver, blocks = self._expected.get(fence, (None, ()))
        error, num_mismatched = "", 0
        try:
            if receiver is not None:
                async with asyncio.timeout(timeout_s):
                    await receiver.arrived(fence)
            await asyncio.to_thread(verify, manifest, self._pool.region, self._pool.fingerprint, blocks)
            if self._pool.mirror is not None:
                await asyncio.to_thread(self._pool.mirror.store, blocks)
        except TimeoutError:
            error = f"the sealed KV has not arrived within {timeout_s:.1f} s"
        except DigestMismatch as exc:
            error, num_mismatched = str(exc), exc.num_blocks
        except TwinpoolError as exc:
            error = str(exc)
        if not error and receiver is not None and self._expected.pop(fence, None) is not None:
            receiver.forget(fence)
        self._emit(Verified(fence, loop.time() - started, error, num_mismatched))
