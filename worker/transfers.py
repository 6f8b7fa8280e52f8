"""Carries out a core's transfer commands over the links, and answers each with its event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from twinpool.errors import PeerLost, TransferError, TwinpoolError
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
from twinpool.worker.links import IncomingLinks, LocalPool
from twinpool.worker.step_thread import StepThread

TransferCommand = Push | FinishPush | StopPush | PostReceive | CancelReceive | Verify
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


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
        self._pushes: dict[int, list[asyncio.Task[None]]] = {}
        self._expected: dict[int, tuple[KVReceiver, tuple[int, ...]]] = {}

    def carry_out(self, command: TransferCommand) -> None:
        """Begins `command`; its event comes later."""
        match command:
            case Push(push):
                self._pushes.setdefault(push.fence, []).append(self._spawn(self._push(push)))
            case FinishPush():
                self._spawn(self._finish_push(command))
            case StopPush():
                self._spawn(self._stop_push(command))
            case PostReceive():
                self._post_receive(command)
            case CancelReceive(fence):
                self._spawn(self._cancel_receive(fence))
            case Verify(manifest, timeout_s):
                self._spawn(self._verify(manifest, timeout_s))

    # ── prefill's side ────────────────────────────────────────────────────────────────────────────────────

    async def _push(self, push: BlockPush) -> None:
        try:
            await self._steps.push(push)
        except PeerLost as exc:
            self._emit(PushFailed(push.fence, str(exc)))

    async def _finish_push(self, command: FinishPush) -> None:
        await self._pushes_done(command.fence)
        if (sender := self._senders.get(command.worker_id)) is None:
            self._emit(PushFailed(command.fence, f"no link to {command.worker_id}"))
            return
        hashing = asyncio.to_thread(digests, self._pool.region, command.source_blocks)
        report, found = await asyncio.gather(sender.finish(command.fence), hashing, return_exceptions=True)
        if isinstance(found, BaseException):
            raise found
        if isinstance(report, TransferError):
            self._emit(PushFailed(command.fence, str(report)))
        elif isinstance(report, BaseException):
            raise report
        else:
            self._emit(PushFinished(command.fence, found, report.num_bytes, report.seconds))

    async def _stop_push(self, command: StopPush) -> None:
        await self._pushes_done(command.fence)
        if (sender := self._senders.get(command.worker_id)) is not None:
            await sender.stop(command.fence)
        self._emit(PushStopped(command.fence))

    async def _pushes_done(self, fence: int) -> None:
        for task in self._pushes.pop(fence, ()):
            await task

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
        error = ""
        try:
            if receiver is not None:
                async with asyncio.timeout(timeout_s):
                    await receiver.arrived(fence)
            await asyncio.to_thread(verify, manifest, self._pool.region, self._pool.fingerprint, blocks)
        except TimeoutError:
            error = f"the sealed KV has not arrived within {timeout_s:.1f} s"
        except TwinpoolError as exc:
            error = str(exc)
        if not error and receiver is not None and self._expected.pop(fence, None) is not None:
            receiver.forget(fence)
        self._emit(Verified(fence, loop.time() - started, error))
