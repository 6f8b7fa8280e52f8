"""Causal attention over a paged KV pool, on packed ragged batches: softmax(q·kᵀ · scale) · v over the keys at or
before each query (Vaswani et al. 2017, arXiv:1706.03762), keys and values read through block tables (Kwon et al.
2023, arXiv:2309.06180) with an online softmax (Dao et al. 2022, arXiv:2205.14135).

Here are the shapes, the plain reference and the dispatch; `attention_cpu.py` and `gpu/paged_attention.py` do the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from twinpool.kernels.attention_cpu import attend, scratch_size
from twinpool.kernels.gpu.batch import DeviceBatch
from twinpool.kernels.jit import flat, runs_compiled
from twinpool.kernels.quantized_kv import dequantize
from twinpool.kernels.tiles import WORD_BYTES


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Where each sequence of a packed batch has its queries and its KV.

    Sequence s has the query tokens [query_starts[s], query_starts[s + 1]) of the packed rows, which stand at the end of
    its `ends[s]` tokens; token j's KV is in block block_tables[table_starts[s] + j // block_size]. All int64 arrays;
    `slots` and `positions` [tokens] are tensors on the model's device. `on_device` is the same for the GPU's kernels,
    and there on a GPU only.
    """

    query_starts: np.ndarray[Any, np.dtype[np.int64]]
    ends: np.ndarray[Any, np.dtype[np.int64]]
    block_tables: np.ndarray[Any, np.dtype[np.int64]]
    table_starts: np.ndarray[Any, np.dtype[np.int64]]
    slots: torch.Tensor
    positions: torch.Tensor
    on_device: DeviceBatch | None = None

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.ends)

    def table(self, seq: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The block ids of one sequence, in order."""
        return self.block_tables[self.table_starts[seq] : self.table_starts[seq + 1]]


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How one layer attends: the factor on q·k; the window in positions, the query's own included (None: all);
    and the bound c of c · tanh(score / c) (None: no bound)."""

    scale: float
    window: int | None = None
    softcap: float | None = None


def gather_kv(layer_kv: torch.Tensor, table: np.ndarray[Any, Any], first: int, end: int) -> torch.Tensor:
    """Copies the KV of positions [first, end) of one sequence: [k|v, kv_heads, end - first, head_dim]."""
    block_size = layer_kv.shape[3]
    first_block = first // block_size
    blocks = torch.from_numpy(table[first_block : -(-end // block_size)]).to(layer_kv.device)
    gathered = layer_kv[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)
    start = first - first_block * block_size
    return gathered[:, :, start : start + end - first]


def paged_attention_reference(
    query: torch.Tensor, kv: torch.Tensor, layer: int, batch: PagedBatch, params: AttentionParams
) -> torch.Tensor:
    """The formula, one sequence at a time, in float32. Shapes as `paged_attention`."""
    layer_kv = kv[:, layer] if kv.element_size() > 1 else dequantize(kv[:, layer])
    out = torch.empty_like(query)
    group = query.shape[1] // layer_kv.shape[2]
    for seq in range(batch.num_seqs):
        rows = slice(int(batch.query_starts[seq]), int(batch.query_starts[seq + 1]))
        end = int(batch.ends[seq])
        key, value = gather_kv(layer_kv, batch.table(seq), 0, end).float().repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,hjd->htj", query[rows].float(), key) * params.scale
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        at = torch.arange(end - (rows.stop - rows.start), end, device=query.device)[:, None]
        j = torch.arange(end, device=query.device)[None, :]
        hidden = (j > at) if params.window is None else (j > at) | (j <= at - params.window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[rows] = torch.einsum("htj,hjd->thd", weights, value).to(query.dtype)
    return out


def paged_attention(
    query: torch.Tensor, kv: torch.Tensor, layer: int, batch: PagedBatch, params: AttentionParams
) -> torch.Tensor:
    """Attention of every query token of the batch over its own sequence.

    `query` [tokens, heads, head_dim] may be a slice of wider rows; `kv` is the pool, [block, layer, k|v, kv_head, slot,
    head_dim], in whose `layer` the KV of the query tokens is already written. Returns [tokens, heads, head_dim],
    contiguous.

    Raises:
        ValueError: the tensors are on a GPU, and the batch is not.
    """
    if batch.on_device is not None:
        from twinpool.kernels.gpu import paged_attention as gpu

        return gpu.paged_attention(query, kv[:, layer], batch.on_device, params)
    if query.is_cuda:
        raise ValueError("queries on a GPU come with a PagedBatch that has `on_device`; this one has none")
    if not runs_compiled(query) or query.shape[2] * query.element_size() % WORD_BYTES:
        return paged_attention_reference(query, kv, layer, batch, params)
    out = query.new_empty(query.shape)
    attend(
        0, 1, flat(query), query.stride(0), query.stride(1), query.shape[1], flat(kv), tuple(kv.shape), layer,
        batch.query_starts, batch.ends, batch.block_tables, batch.table_starts, np.float32(params.scale),
        params.window or 0, np.float32(params.softcap or 0.0),
        np.empty(scratch_size(query.shape[1], kv.shape[3], kv.shape[5], kv.element_size()), np.float32), flat(out),
    )  # fmt: skip
    return out
