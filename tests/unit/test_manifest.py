"""Manifests: what is accepted, and what each refusal names."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from twinpool.errors import DigestMismatch, LayoutMismatch
from twinpool.kv_transfer.connector import KVRegion
from twinpool.kv_transfer.manifest import digests, verify
from twinpool.layout import Dtype, KVLayout
from twinpool.messages import Manifest
from twinpool.request import RequestKey

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=8, dtype=Dtype.FLOAT32)


@pytest.fixture
def region() -> KVRegion:
    memory = bytearray(np.random.default_rng(0).bytes(6 * LAYOUT.block_bytes))
    return KVRegion(memoryview(memory), LAYOUT, 6)


@pytest.fixture
def manifest(region: KVRegion) -> Manifest:
    return Manifest(
        key=RequestKey("r", 0),
        fence=9,
        fingerprint="model-a",
        layout=LAYOUT,
        num_tokens=15,
        block_ids=(4, 1),
        digests=digests(region, (4, 1)),
        first_token=3,
        num_bytes=2 * LAYOUT.block_bytes,
        transfer_s=0.1,
    )


def test_what_was_sent_is_accepted(manifest: Manifest, region: KVRegion) -> None:
    verify(manifest, region, "model-a", [4, 1])


def test_one_flipped_bit_is_found_and_its_block_named(manifest: Manifest, region: KVRegion) -> None:
    region.memory[2 * LAYOUT.block_bytes - 1] ^= 1
    with pytest.raises(DigestMismatch, match=r"1 of 2 KV blocks .* block 1: digest [0-9a-f]{16} wanted"):
        verify(manifest, region, "model-a", [4, 1])


def test_another_model_is_refused(manifest: Manifest, region: KVRegion) -> None:
    with pytest.raises(LayoutMismatch, match="model model-a arrived; this worker serves model-b"):
        verify(manifest, region, "model-b", [4, 1])


def test_another_layout_is_refused(manifest: Manifest, region: KVRegion) -> None:
    other = msgspec.structs.replace(manifest, layout=replace(LAYOUT, block_size=16))
    with pytest.raises(LayoutMismatch, match="block_size is 8 on one side and 16"):
        verify(other, region, "model-a", [4, 1])


def test_other_blocks_than_those_that_were_lent_are_refused(manifest: Manifest, region: KVRegion) -> None:
    with pytest.raises(LayoutMismatch, match=r"under fence 9 lists blocks \[4, 1\]; lent were \[1, 4\]"):
        verify(manifest, region, "model-a", [1, 4])


def test_a_missing_digest_is_refused(manifest: Manifest, region: KVRegion) -> None:
    with pytest.raises(LayoutMismatch, match="1 digests for 2 blocks"):
        verify(msgspec.structs.replace(manifest, digests=(1,)), region, "model-a", [4, 1])
