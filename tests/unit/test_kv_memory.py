"""The size of the KV pool from memory, weights and settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from twinpool.config import EngineConfig
from twinpool.engine import kv_memory
from twinpool.engine.kv_memory import PoolSize, pool_size
from twinpool.errors import ConfigError
from twinpool.layout import Dtype, KVLayout

GIB = 1 << 30
LAYOUT = KVLayout(
    num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype=Dtype.BFLOAT16
)  # 2 MiB blocks
CONFIG = EngineConfig("model", kv_memory_fraction=0.5)


def test_the_fraction_is_taken_of_the_free_memory() -> None:
    assert pool_size(CONFIG, LAYOUT, 4096, 20 * GIB, 2 * GIB) == PoolSize(5120, 81920, 20)


def test_workers_on_one_host_share_the_memory() -> None:
    shared = replace(CONFIG, workers_on_host=4)
    assert pool_size(shared, LAYOUT, 4096, 20 * GIB, GIB).num_blocks == 1280


def test_kv_takes_no_more_than_the_weights_leave() -> None:
    greedy = replace(CONFIG, kv_memory_fraction=0.9)
    assert pool_size(greedy, LAYOUT, 4096, 20 * GIB, 10 * GIB).num_blocks == int(9.5 * 512)


def test_a_fixed_number_of_blocks_is_taken_as_it_is() -> None:
    assert pool_size(replace(CONFIG, num_blocks=300), LAYOUT, 4096, 0, GIB) == PoolSize(300, 4800, 1)


@pytest.mark.parametrize(
    ("config", "free_bytes", "wanted"),
    [
        (
            CONFIG,
            GIB // 2,
            "--kv-memory-fraction 0.5 of 0.50 GiB free.*takes 256 .0.50 GiB.*lower --max-model-len",
        ),
        (CONFIG, 0, "has 0 blocks"),
        (replace(CONFIG, num_blocks=255), 20 * GIB, "--num-blocks 255.*raise --num-blocks to 256"),
    ],
)
def test_a_pool_without_room_for_the_longest_sequence_says_what_to_change(
    config: EngineConfig, free_bytes: int, wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted):
        pool_size(config, LAYOUT, 4096, free_bytes, GIB // 4)


def test_every_limited_control_group_up_to_the_root_counts(tmp_path: Path) -> None:
    group = tmp_path / "outer" / "inner"
    group.mkdir(parents=True)
    for directory, limit, used, cache in ((group, "max", 5, 0), (group.parent, "1000", 700, 200)):
        (directory / "memory.max").write_text(f"{limit}\n")
        (directory / "memory.current").write_text(f"{used}\n")
        (directory / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    assert kv_memory._cgroup_rooms(group) == [500]
