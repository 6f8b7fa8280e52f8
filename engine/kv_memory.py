"""How many KV blocks fit: what memory is free, what the weights leave, and what one worker may take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.config import EngineConfig
from twinpool.errors import ConfigError
from twinpool.layout import KVLayout

if TYPE_CHECKING:
    import torch

_CGROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
MOST_OF_THE_REST = 0.95
"""Share of the memory beside the weights that KV may take at most: activations and the process need some."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool in blocks, and what that is in tokens and in sequences of the maximum length."""

    num_blocks: int
    num_tokens: int
    num_max_len_seqs: int


def pool_size(
    config: EngineConfig,
    layout: KVLayout,
    max_model_len: int,
    free_bytes: int,
    weight_bytes: int,
    *,
    num_sharing: int | None = None,
    mirror_bytes: int | None = None,
) -> PoolSize:
    """The KV pool of one worker.

    `free_bytes` is what the device had free before the weights were loaded, `weight_bytes` what they take. Each of the
    `num_sharing` workers there (None: `workers_on_host`) has an equal share of the free memory: KV takes
    `kv_memory_fraction` of it, but no more than the weights leave. With a pool on a GPU whose blocks pass through a
    mirror in host memory, `mirror_bytes` are free there, and the mirror has to fit in this worker's share of them. A
    fixed `num_blocks` is taken as it is.

    Raises:
        ConfigError: not even one sequence of `max_model_len` tokens fits.
    """
    needed = layout.num_blocks(max_model_len)
    num_sharing = num_sharing or config.workers_on_host
    share = free_bytes // num_sharing
    if config.num_blocks is not None:
        blocks, reason = config.num_blocks, f"--num-blocks {config.num_blocks}"
        remedy = f"raise --num-blocks to {needed} or more, or lower --max-model-len"
    else:
        room = min(share * config.kv_memory_fraction, (share - weight_bytes) * MOST_OF_THE_REST)
        reason = (
            f"--kv-memory-fraction {config.kv_memory_fraction} of {_gib(free_bytes)} free, shared by "
            f"{num_sharing} worker(s), beside {_gib(weight_bytes)} of weights"
        )
        if mirror_bytes is not None:
            room = min(room, mirror_bytes / config.workers_on_host * MOST_OF_THE_REST)
            reason += f", with a mirror in {_gib(mirror_bytes)} of host memory"
        blocks = max(0, int(room) // layout.block_bytes)
        remedy = "lower --max-model-len or the number of workers, or raise --kv-memory-fraction"
    if blocks < needed:
        raise ConfigError(
            f"the KV pool has {blocks} blocks of {layout.block_size} tokens ({reason}), but one sequence of "
            f"{max_model_len} tokens takes {needed} ({_gib(needed * layout.block_bytes)}); {remedy}"
        )
    return PoolSize(blocks, blocks * layout.block_size, blocks // needed)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on `device` now."""
    if device.type != "cuda":
        return free_host_memory()
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def free_host_memory() -> int:
    """Bytes of the host that this process can still get: no more than its control groups' limits leave."""
    return min([_available_memory(), *_cgroup_rooms(_own_cgroup())])


def _available_memory() -> int:
    """Bytes that the system says are free or can be freed."""
    if _MEMINFO.exists():
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    import psutil  # not on every machine whose engine is on a GPU; those have Linux

    return int(psutil.virtual_memory().available)


def _own_cgroup() -> Path:
    """This process's control group (version 2), or the root where there are none."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return _CGROUPS
    path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    return _CGROUPS / path.lstrip("/")


def _cgroup_rooms(group: Path) -> list[int]:
    """What each limited control group from `group` up to the root leaves, in bytes; its file cache counts as free."""
    rooms = []
    for directory in (group, *group.parents):
        limit, used = directory / "memory.max", directory / "memory.current"
        if limit.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
            rooms.append(max(0, int(text) - int(used.read_text(encoding="ascii")) + _file_cache(directory)))
    return rooms


def _file_cache(group: Path) -> int:
    lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
