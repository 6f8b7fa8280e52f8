"""Blocks of the pool to and from contiguous memory: what a transfer between devices stages."""

from __future__ import annotations

import torch


def block_runs(pool: torch.Tensor) -> torch.Tensor:
    """The pool as bytes that belong together: uint8 [block, layer, k|v, bytes], the same memory.

    `pool` is the pool, [block, layer, k|v, kv_head, slot, head_dim], or a run of its layers or heads: `kv[:, 4:8]`,
    `kv[:, :, :, 2:4]`. The scales of an int8 pool are within its bytes.
    """
    item = pool.element_size()
    size = (*pool.shape[:3], pool.shape[3] * pool.stride(3) * item)
    strides = (*(stride * item for stride in pool.stride()[:3]), 1)
    bytes_of_pool = torch.empty(0, dtype=torch.uint8, device=pool.device)
    return bytes_of_pool.set_(pool.untyped_storage(), pool.storage_offset() * item, size, strides)


def gather_blocks(runs: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """staging[i] = runs[block_ids[i]].

    `runs` are `block_runs`; `block_ids` [blocks], int64, on their device; `staging` uint8 [blocks, layer, k|v, bytes],
    contiguous.
    """
    if runs.is_cuda:
        from twinpool.kernels.gpu import block_copy as gpu

        gpu.gather_blocks(runs, block_ids, staging)
        return
    torch.index_select(runs, 0, block_ids, out=staging)


def scatter_blocks(staging: torch.Tensor, runs: torch.Tensor, block_ids: torch.Tensor) -> None:
    """runs[block_ids[i]] = staging[i], shapes as `gather_blocks`; the ids are distinct."""
    if runs.is_cuda:
        from twinpool.kernels.gpu import block_copy as gpu

        gpu.scatter_blocks(staging, runs, block_ids)
        return
    runs.index_copy_(0, block_ids, staging)
