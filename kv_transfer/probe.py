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
from twinpool.layout import KVLayout

PROBE_BYTES = 4 << 20


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


def probe_blocks(layout: KVLayout, num_blocks: int) -> int:
    """How many blocks to probe with: about `PROBE_BYTES`, at least one, at most a quarter of a pool of
    `num_blocks`.
    """
    return max(1, min(PROBE_BYTES // layout.block_bytes, num_blocks // 4))


async def send_probe(
    sender: KVSender,
    region: KVRegion,
    fence: int,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    timeout_s: float,
) -> ProbeResult:
    """Overwrites `source_blocks` (which the caller must own) with a pattern and moves them. Prefill side.

