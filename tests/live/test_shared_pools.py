"""Pools of KV blocks in shared memory: swept after their owner, lost to writers once closed, shut to everyone else."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.transport_desk import DEADLINE_S, DEPLOYMENT, LAYERS, RemotePeer, require
from support.transport_peer import LAYOUT

from twinpool.errors import ConfigError, PeerLost, TransportUnavailable
from twinpool.kv_transfer import shm, shm_pool
from twinpool.kv_transfer.connector import BlockRange, KVRegion, LocalEnd

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


def pools_of(worker_id: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"twinpool.{DEPLOYMENT}.{worker_id}.*"))


@pytest.mark.parametrize("of_any_server", [False, True])
async def test_a_pool_whose_owner_was_killed_is_swept_and_a_living_one_is_not(of_any_server: bool) -> None:
    require("shm")
    living = shm_pool.SharedPool(1 << 16, LocalEnd("decode-1", "c3", DEPLOYMENT))
    dead = await RemotePeer.start("shm", "decode-0")
    await dead.call("listen")
    (pool,) = pools_of("decode-0")
    await dead.kill()
    shm_pool.sweep("*" if of_any_server else DEPLOYMENT)
    assert not pool.exists()
    assert living.path.exists()
    living.close()
    assert not living.path.exists()


async def test_a_pool_closed_while_a_tensor_looks_into_it_is_lost_to_its_writers() -> None:
    require("shm")
    end = LocalEnd("decode-0", "a1", DEPLOYMENT)
    pool = shm_pool.SharedPool(LAYOUT.block_bytes, end)
    tensor = np.frombuffer(pool.memory, dtype=np.uint8)
    region = KVRegion(memoryview(bytearray(LAYOUT.block_bytes)), LAYOUT, 1)
    receiver = shm.ShmReceiver(region, pool)
    sender = shm.ShmSender(receiver.address(), region)
    sender.push(1, BlockRange([0], [0], 0, LAYERS))
    pool.close()
    assert tensor.sum() == 0
    with pytest.raises(PeerLost, match="owner"):
        sender.push(1, BlockRange([0], [0], 0, LAYERS))
    await sender.close()
    with pytest.raises(PeerLost, match="gone"):
        shm.ShmSender(receiver.address(), region)


async def test_a_pool_that_does_not_fit_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    require("shm")
    docker = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: docker)
    with pytest.raises(ConfigError, match=r"100 MB .* 67 MB free"):
        shm_pool.SharedPool(100_000_000, LocalEnd("decode-0", "a1", "test"))


async def test_a_pool_that_others_may_read_or_that_lies_elsewhere_is_not_written_to(tmp_path: Path) -> None:
    require("shm")
    region = KVRegion(memoryview(bytearray(LAYOUT.block_bytes)), LAYOUT, 1)
    pool = shm_pool.SharedPool(LAYOUT.block_bytes, LocalEnd("decode-0", "a1", DEPLOYMENT))
    address = shm.ShmReceiver(region, pool).address()
    assert pool.path.stat().st_mode & 0o777 == 0o600
    pool.path.chmod(0o640)
    with pytest.raises(TransportUnavailable, match=r"is -rw-r----- .* alone may read and write"):
        shm.ShmSender(address, region)
    pool.path.chmod(0o600)
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(LAYOUT.block_bytes))
    link = pool.path.with_name(f"twinpool.{DEPLOYMENT}.decode-0.link")
    link.symlink_to(victim)
    for name in (link.name, str(victim), f"../..{victim}", "twinpool.a.b"):
        with pytest.raises(TransportUnavailable, match=r"cannot be opened|not an address"):
            shm.ShmSender(msgspec.msgpack.encode({"name": name, "num_blocks": 1}), region)
    link.unlink()
    with pytest.raises(TransportUnavailable, match=f"has {LAYOUT.block_bytes} bytes, not"):
        shm.ShmSender(msgspec.msgpack.encode({"name": pool.path.name, "num_blocks": 2}), region)
    pool.close()
