"""Measuring a link through the very connector that will carry KV.

The sender fills a few of its free blocks with a pattern, pushes them layer group by layer group into blocks
that the receiver has reserved, and seals them with their digests; the receiver verifies. What is measured
is the transfer alone: messages and digests are not part of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twinpool.errors import TransferError
from twinpool.kv_transfer.connector import BlockRange, KVReceiver, KVRegion, KVSender
from twinpool.kv_transfer.manifest import check_digests, digests

PROBE_BYTES = 4 << 20
"""What the blocks set aside for probes hold together, unless a single one is larger."""

FIRST_PROBE_FENCE = 1 << 62
"""Fences from here on are for probes, which borrow blocks set aside for them; the ledger's stay far below."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the sender measured, and the digests that the receiver must find."""

    num_bytes: int
    seconds: float
    digests: tuple[int, ...]

    @property
    def gb_per_s(self) -> float:
        """The rate in 1e9 bytes per second."""
        return self.num_bytes / max(self.seconds, 1e-9) / 1e9


async def send_probe(
    sender: KVSender,
    region: KVRegion,
    fence: int,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    timeout_s: float,
) -> ProbeResult:
    """Overwrites `source_blocks` (which the caller must own) with a pattern and moves them. Prefill side.

    Raises:
        PeerLost: the receiver is gone.
        TransferError: it takes longer than `timeout_s`.
    """
    size, layout = region.layout.block_bytes, region.layout
    for block in source_blocks:
        pattern = np.random.default_rng((fence, block)).bytes(size)
        region.memory[block * size : (block + 1) * size] = pattern
    found = await asyncio.to_thread(digests, region, source_blocks)
    try:
        async with asyncio.timeout(timeout_s):
            for first in range(0, layout.num_layers, sender.layer_group):
                last = min(first + sender.layer_group, layout.num_layers)
                sender.push(fence, BlockRange(source_blocks, target_blocks, first, last))
            report = await sender.finish(fence)
    except TimeoutError as exc:
        await sender.stop(fence)
        raise TransferError(f"a probe by {sender.name} took over {timeout_s} s") from exc
    return ProbeResult(report.num_bytes, report.seconds, found)


async def check_probe(
    receiver: KVReceiver,
    region: KVRegion,
    fence: int,
    block_ids: Sequence[int],
    wanted: Sequence[int],
    timeout_s: float,
) -> None:
    """Waits for a sealed probe and compares its bytes. Decode side; the caller forgets or cancels the fence.

    Raises:
        DigestMismatch: other bytes arrived than were sent.
        PeerLost: the sender is gone.
        TransferError: the bytes have not all arrived within `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await receiver.arrived(fence)
    except TimeoutError as exc:
        raise TransferError(f"a probe by {receiver.name} has not arrived within {timeout_s} s") from exc
    await asyncio.to_thread(check_digests, region, block_ids, wanted)
