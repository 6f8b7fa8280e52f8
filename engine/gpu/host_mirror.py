"""A pool's mirror in host memory: the same blocks at the same places, for transports that cannot reach the device's.

Blocks pass through it, each copied when it is to travel or has arrived. So the rest of a transfer (transports, probes,
digests, shared memory between workers) works on host memory as it does without a GPU, under the same block ids.

Each run of layers of a block is contiguous on both sides, so it is one copy of the device's copy engine from place to
place; gathering it first would take less launching, and a further pass of the host over all bytes.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from twinpool.kernels.block_copy import block_runs

log = logging.getLogger(__name__)


def copy_runs(block_ids: Sequence[int], whole_blocks: bool) -> list[tuple[int, int]]:
    """(first block, number of blocks) of each contiguous copy. Only whole blocks that follow each other lie together.

    >>> copy_runs([4, 5, 6, 9], whole_blocks=True)
    [(4, 3), (9, 1)]
    """
    found: list[tuple[int, int]] = []
    for block in block_ids:
        first, count = found[-1] if found else (block, 0)
        if found and whole_blocks and first + count == block:
            found[-1] = (first, count + 1)
        else:
            found.append((block, 1))
    return found


class HostMirror:
    """The mirror of `kv`, [block, layer, …] on a device, in `memory`, which has the pool's bytes and must outlive it.

    Copies go through a stream of their own, beside the model's kernels. Several threads may use it at once, for
    different blocks.
    """

    def __init__(self, kv: torch.Tensor, memory: memoryview) -> None:
        self._kv = block_runs(kv)
        self._host = torch.frombuffer(memory, dtype=torch.uint8)[: self._kv.numel()].view(self._kv.shape)
        stream: Any = torch.cuda.Stream  # torch leaves its constructor untyped
        self._stream = stream(kv.device) if kv.device.type == "cuda" else None
        self.is_pinned = self._stream is not None and self._pin(memory.nbytes)

    def fetch(self, block_ids: Sequence[int], first_layer: int, last_layer: int) -> None:
        """Copies layers [first_layer, last_layer) of these blocks from the device; returns when they are here. The
        kernels that write them must have finished."""
        layers = slice(first_layer, last_layer)
        with self._copying():
            for block, count in copy_runs(block_ids, last_layer - first_layer == self._kv.shape[1]):
                blocks = slice(block, block + count)
                self._host[blocks, layers].copy_(self._kv[blocks, layers], non_blocking=True)

    def store(self, block_ids: Sequence[int]) -> None:
        """Copies these blocks to the device; returns when whatever is launched from then on finds them there."""
        with self._copying():
            for block, count in copy_runs(block_ids, whole_blocks=True):
                blocks = slice(block, block + count)
                self._kv[blocks].copy_(self._host[blocks], non_blocking=True)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _pin(self, num_bytes: int) -> bool:
        """Locks the memory for the device's copy engine, as long as this object lives. Copies are right without, but
        slower by half and more: the driver then copies them once again."""
        load: Any = torch.cuda.cudart  # torch leaves it untyped
        runtime, address = load(), self._host.data_ptr()
        code = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if code != 0:
            with suppress(
                RuntimeError
            ):  # CUDA keeps the error, and the next launch would report it as its own
                torch.zeros(1, device=self._kv.device)
            log.warning(
                "%.1f GB of host memory cannot be pinned (CUDA error %d; see ulimit -l): KV is copied slower",
                num_bytes / 1e9, code,
            )  # fmt: skip
            return False
        weakref.finalize(self, runtime.cudaHostUnregister, address)
        return True
