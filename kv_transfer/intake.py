"""What a two-sided receiver lets in: which fences are expected, from whom, into which blocks, what is missing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from twinpool.errors import InvariantViolation, TransferError
from twinpool.kv_transfer.connector import KVRegion


@dataclass(slots=True)
class _Expected:
    writer: str
    blocks: frozenset[int]
    missing_bytes: int
    arrived: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Intake:
    """The expected fences of one receiver.

    Whoever writes into the pool holds `lock` from asking `admits` until the bytes are in place, so that a
    fence cancelled under the lock is never written again. `num_dropped` counts pushes that were not
    admitted.
    """

    def __init__(self, region: KVRegion) -> None:
        self.lock = threading.Lock()
        self.num_dropped = 0
        self._region = region
        self._loop = asyncio.get_running_loop()
        self._expected: dict[int, _Expected] = {}

    def expect(self, fence: int, writer: str, block_ids: Sequence[int]) -> None:
        """Lets `writer` write all layers of `block_ids`.

        Raises:
            InvariantViolation: the fence is expected already, or a block is outside the pool.
        """
        check_expected(fence, block_ids, self._region.num_blocks, self._expected)
        expected = _Expected(writer, frozenset(block_ids), len(block_ids) * self._region.layout.block_bytes)
        if not block_ids:
            expected.arrived.set_result(None)
        with self.lock:
            self._expected[fence] = expected

    def admits(self, fence: int, writer: str, block_ids: Sequence[int]) -> bool:
        """Whether `writer` may write into `block_ids` under `fence` now. The caller holds `lock`."""
        expected = self._expected.get(fence)
        return expected is not None and expected.writer == writer and expected.blocks.issuperset(block_ids)

    def landed(self, fence: int, num_bytes: int) -> None:
        """Bytes under an admitted fence are in place. The caller holds `lock`; any thread."""
        expected = self._expected[fence]
        expected.missing_bytes -= num_bytes
        if expected.missing_bytes <= 0:
            self._loop.call_soon_threadsafe(_settle, expected.arrived, None)

    async def arrived(self, fence: int) -> None:
        """Returns when nothing is missing.

        Raises:
            TransferError: the fence is not expected (any more).
        """
        if (expected := self._expected.get(fence)) is None:
            raise TransferError(f"fence {fence} is not expected here")
        await asyncio.shield(expected.arrived)

    def drop(self, fence: int) -> None:
        """Expects nothing under `fence` any more; whoever waits for its arrival gets TransferError."""
        with self.lock:
            expected = self._expected.pop(fence, None)
        if expected is not None:
            _settle(expected.arrived, TransferError(f"fence {fence} was cancelled"))

    def drop_all(self) -> None:
        """Expects nothing at all any more."""
        for fence in list(self._expected):
            self.drop(fence)

    def __len__(self) -> int:
        return len(self._expected)


class TwoSidedReceiver:
    """The bookkeeping half of a `KVReceiver` that sees every write before it happens, and so can refuse it."""

    num_junk = 0

    def __init__(self, region: KVRegion) -> None:
        self._region = region
        self._intake = Intake(region)

    @property
    def num_dropped(self) -> int:
        """Pushes that came under a fence that was not expected."""
        return self._intake.num_dropped

    def expect(self, fence: int, writer: str, block_ids: Sequence[int]) -> None:
        """See `Intake.expect`."""
        self._intake.expect(fence, writer, block_ids)

    async def arrived(self, fence: int) -> None:
        """See `Intake.arrived`."""
        await self._intake.arrived(fence)

    async def cancel(self, fence: int) -> None:
        """Waits for the copy under way; what still comes under `fence` is thrown away."""
        self._intake.drop(fence)

    def forget(self, fence: int) -> None:
        """Drops the bookkeeping of `fence`."""
        self._intake.drop(fence)


def check_expected(fence: int, block_ids: Sequence[int], num_blocks: int, expected: Container[int]) -> None:
    """Raises InvariantViolation if `fence` is among `expected`, or a block is not one of `num_blocks`."""
    if fence in expected:
        raise InvariantViolation(f"fence {fence} is expected twice")
    for block in block_ids:
        if not 0 <= block < num_blocks:
            raise InvariantViolation(f"block {block} under fence {fence} is outside the pool of {num_blocks}")


def _settle(future: asyncio.Future[None], error: TransferError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # nobody may be waiting: mark it as seen
