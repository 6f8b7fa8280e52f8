"""Where a worker's KV pool lies, from one role to the next."""

from __future__ import annotations

import logging
import time

from twinpool.config import Role, TransportName, WorkerConfig
from twinpool.engine.block_pool import BlockPool
from twinpool.engine.host_memory import host_memory
from twinpool.engine.kv_memory import free_host_memory
from twinpool.engine.model_runner import ModelRunner
from twinpool.errors import ConfigError
from twinpool.kv_transfer import shm_pool
from twinpool.kv_transfer.connector import LocalEnd
from twinpool.kv_transfer.shm_pool import SharedPool

log = logging.getLogger(__name__)


class PoolMemory:
    """The memory of one process's pool: `shared`, which others of this host can map, where it is to receive by shared
    memory; else the process's own. Once shared it stays so, whatever the role."""

    def __init__(self, config: WorkerConfig, end: LocalEnd) -> None:
        """`end` is the worker as it is when the pool is allocated."""
        self._config = config
        self._end = end
        self.shared: SharedPool | None = None

    def allocate(self, num_bytes: int) -> memoryview:
        """The memory of a new pool. Raises ConfigError if it cannot be had."""
        if wants_shared_memory(self._config, self._config.role):
            self.shared = SharedPool(num_bytes, self._end)
            return self.shared.memory
        return host_memory(num_bytes)

    def fit(self, role: Role, end: LocalEnd, runner: ModelRunner, cache: BlockPool) -> None:
        """Moves the pool to where `role` needs it, with the blocks that `cache` can find, if it does not lie there. For
        that time there are two; no step runs, and nobody reads or writes.

        Raises:
            ConfigError: there is no room for a second one.
        """
        if self.shared is not None or not wants_shared_memory(self._config, role):
            return
        started, num_bytes = time.monotonic(), len(runner.memory)
        if (free := free_host_memory()) < num_bytes:
            raise ConfigError(
                f"the KV pool of {num_bytes / 1e6:.0f} MB moves to shared memory, and {free / 1e6:.0f} MB are free"
            )
        shared = SharedPool(num_bytes, end)
        kept = cache.cached_block_ids
        try:
            runner.move_pool(shared.memory, kept)
        except BaseException:
            shared.close()
            raise
        self.shared = shared
        log.info(
            "the KV pool of %.2f GB is in shared memory now, with %d cached blocks: %.2f s",
            num_bytes / 1e9, len(kept), time.monotonic() - started,
        )  # fmt: skip

    def close(self) -> None:
        """Lets go of shared memory. Calling it twice is fine."""
        if self.shared is not None:
            self.shared.close()


def wants_shared_memory(config: WorkerConfig, role: Role) -> bool:
    """Whether the pool of a worker with that role is to be in shared memory. Raises ConfigError if it must be, and this
    machine has none."""
    if role is not Role.DECODE or config.transfer.transport not in (TransportName.AUTO, TransportName.SHM):
        return False
    missing = shm_pool.why_unavailable()
    if missing and config.transfer.transport is TransportName.SHM:
        raise ConfigError(f"--transport is shm; {missing}")
    return missing is None
