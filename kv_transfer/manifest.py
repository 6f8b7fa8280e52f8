"""Digests of KV blocks, and the check of a manifest against the bytes that arrived.

Digests are xxh3 over whole blocks, about as fast as memory, without the interpreter lock: callers run these
functions in an executor.
"""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from twinpool.errors import DigestMismatch, LayoutMismatch
from twinpool.kv_transfer.connector import KVRegion
from twinpool.kv_transfer.plan import compatible
from twinpool.messages import Manifest


def digests(region: KVRegion, block_ids: Sequence[int]) -> tuple[int, ...]:
    """The 64-bit xxh3 of each block's bytes, all layers, in the order of `block_ids`."""
    size = region.layout.block_bytes
    return tuple(xxh3_64_intdigest(region.memory[block * size : (block + 1) * size]) for block in block_ids)


def check_digests(region: KVRegion, block_ids: Sequence[int], wanted: Sequence[int]) -> None:
    """Compares blocks with the digests that their sender computed.

    Raises:
        DigestMismatch: a block differs; the message names the first one and how many there are.
        LayoutMismatch: there are not as many digests as blocks.
    """
    if len(block_ids) != len(wanted):
        raise LayoutMismatch(f"{len(wanted)} digests for {len(block_ids)} blocks")
    found = digests(region, block_ids)
    wrong = [i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b]
    if wrong:
        i = wrong[0]
        raise DigestMismatch(
            f"{len(wrong)} of {len(found)} KV blocks differ from what was sent, first block {block_ids[i]}: "
            f"digest {wanted[i]:016x} wanted, {found[i]:016x} found",
            num_blocks=len(wrong),
        )


def verify(manifest: Manifest, region: KVRegion, fingerprint: str, block_ids: Sequence[int]) -> None:
    """Checks that what the manifest tells of lies in `block_ids` of `region`, the blocks lent under its
    fence.

    The caller has made sure that the fence is live (`OwnershipLedger.sealed`) and that the bytes have
    arrived.

    Raises:
        LayoutMismatch: another model, another layout, or other blocks than those that were lent.
        DigestMismatch: a block's bytes are not the bytes that were sent.
    """
    if manifest.fingerprint != fingerprint:
        raise LayoutMismatch(f"KV of model {manifest.fingerprint} arrived; this worker serves {fingerprint}")
    compatible(region.layout, manifest.layout)
    if tuple(manifest.block_ids) != tuple(block_ids):
        raise LayoutMismatch(
            f"the manifest under fence {manifest.fence} lists blocks {_short(manifest.block_ids)}; "
            f"lent were {_short(block_ids)}"
        )
    check_digests(region, block_ids, manifest.digests)


def _short(block_ids: Sequence[int]) -> str:
    listed = ", ".join(map(str, block_ids[:8]))
    return f"[{listed}, … {len(block_ids)} in all]" if len(block_ids) > 8 else f"[{listed}]"
