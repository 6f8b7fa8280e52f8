"""Pools on devices exchange KV through their mirrors in host memory; here the devices are a CPU's tensors."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinpool.engine.gpu.host_mirror import HostMirror, copy_runs
from twinpool.kv_transfer.connector import BlockRange, KVRegion, LocalEnd
from twinpool.kv_transfer.loopback import LoopbackReceiver, LoopbackSender
from twinpool.kv_transfer.manifest import check_digests, digests
from twinpool.kv_transfer.mirrored import MirroredSender
from twinpool.kv_transfer.probe import check_probe, send_probe
from twinpool.layout import Dtype, KVLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=Dtype.BFLOAT16)
NUM_BLOCKS = 12


class Worker:
    """A pool of random KV, and its mirror."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_BLOCKS, LAYOUT.num_layers, 2, LAYOUT.num_kv_heads, LAYOUT.block_size, LAYOUT.head_dim)
        self.kv = torch.randn(shape, generator=generator).to(torch.bfloat16)
        self.memory = memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes))
        self.mirror = HostMirror(self.kv, self.memory)
        self.region = KVRegion(self.memory, LAYOUT, NUM_BLOCKS)


@given(st.lists(st.integers(0, 30), unique=True), st.booleans())
def test_runs_of_copies_cover_each_block_once_in_order(block_ids: list[int], whole: bool) -> None:
    runs = copy_runs(block_ids, whole)
    assert [block + i for block, count in runs for i in range(count)] == block_ids
    assert whole or all(count == 1 for _, count in runs)
    if whole:
        assert all(a + n != b for (a, n), (b, _) in pairwise(runs))


def test_a_fetch_copies_its_layers_and_nothing_else() -> None:
    worker = Worker(0)
    worker.mirror.fetch([7, 2], 1, 3)
    host = torch.frombuffer(worker.memory, dtype=torch.bfloat16).view(worker.kv.shape)
    assert torch.equal(host[[7, 2], 1:], worker.kv[[7, 2], 1:])
    assert host.count_nonzero() == 2 * 2 * LAYOUT.layer_bytes // 2


async def test_blocks_travel_from_pool_to_pool_with_digests_that_agree() -> None:
    prefill, decode = Worker(1), Worker(2)
    before = decode.kv.clone()
    receiver = LoopbackReceiver(decode.region)
    end = LocalEnd("prefill-0", "a")
    sender = MirroredSender(LoopbackSender(receiver.address(), prefill.region, end), prefill.mirror)
    source, target = (3, 4, 9), (10, 0, 1)
    receiver.expect(5, end.writer, target)
    for first in range(0, LAYOUT.num_layers, sender.layer_group):
        sender.push(5, BlockRange(source, target, first, first + sender.layer_group))
    report = await sender.finish(5)
    await receiver.arrived(5)
    check_digests(decode.region, target, digests(prefill.region, source))
    assert torch.equal(decode.kv, before)
    decode.mirror.store(target)
    assert torch.equal(decode.kv[list(target)], prefill.kv[list(source)])
    untouched = [block for block in range(NUM_BLOCKS) if block not in target]
    assert torch.equal(decode.kv[untouched], before[untouched])
    assert report.num_bytes == 3 * LAYOUT.block_bytes
    receiver.forget(5)
    await sender.close()
    assert sender.lost == "the link was closed"
    await receiver.close()


async def test_a_probe_measures_the_link_and_leaves_both_pools_alone() -> None:
    prefill, decode = Worker(3), Worker(4)
    pools = prefill.kv.clone(), decode.kv.clone()
    receiver = LoopbackReceiver(decode.region)
    end = LocalEnd("prefill-0", "a")
    sender = MirroredSender(LoopbackSender(receiver.address(), prefill.region, end), prefill.mirror)
    fence = 1 << 62
    receiver.expect(fence, end.writer, (11,))
    result = await send_probe(sender, prefill.region, fence, (10,), (11,), 5.0)
    await check_probe(receiver, decode.region, fence, (11,), result.digests, 5.0)
    assert torch.equal(prefill.kv, pools[0])
    assert torch.equal(decode.kv, pools[1])
    receiver.forget(fence)
    await sender.close()
    await receiver.close()


def test_a_mirror_has_the_pools_size() -> None:
    worker = Worker(0)
    with pytest.raises(RuntimeError, match="shape"):
        HostMirror(worker.kv, worker.memory[: LAYOUT.block_bytes])
