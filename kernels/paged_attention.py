"""Causal attention over a paged KV pool, on packed ragged batches: softmax(q·kᵀ · scale) · v over the keys at or
before each query (Vaswani et al. 2017, arXiv:1706.03762), keys and values read through block tables (Kwon et al.
2023, arXiv:2309.06180) with an online softmax (Dao et al. 2022, arXiv:2205.14135).

Two CPU paths. Few query tokens (decode): a compiled kernel reads the blocks where they lie, each key and value row once
for all query heads that share it. Many (prefill): the matrix kernels of torch, over the sequence's own keys; one
layer of the earlier context is gathered for the duration of the call, which costs O(context) beside O(chunk · context).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from twinpool.kernels.gpu.batch import DeviceBatch
from twinpool.kernels.jit import compiled, exp, flat, load, prefetch, runs_compiled, store
from twinpool.kernels.quantized_kv import dequantize

MAX_DIRECT_TOKENS = 8
"""Up to this many query tokens of one sequence go to the compiled kernel. Measured on one core: ahead of the matrix
path up to about 12 at 1,024 tokens of context, and further at less."""
_TILE = 256
_CACHE_LINE = 64
_NONE = np.float32(-3.0e38)


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
    """
    if batch.on_device is not None:
        from twinpool.kernels.gpu import paged_attention as gpu

        return gpu.paged_attention(query, kv[:, layer], batch.on_device, params)
    out = query.new_empty(query.shape)
    lengths = batch.query_starts[1:] - batch.query_starts[:-1]
    direct = lengths <= MAX_DIRECT_TOKENS if runs_compiled(query) else np.zeros(len(lengths), np.bool_)
    if direct.any():
        _attend_direct(
            flat(query), query.stride(0), query.stride(1), query.shape[1], flat(kv), tuple(kv.shape), layer,
            batch.query_starts, batch.ends, batch.block_tables, batch.table_starts, direct,
            np.float32(params.scale), params.window or 0, np.float32(params.softcap or 0.0), flat(out),
        )  # fmt: skip
    if direct.all():
        return out
    for seq in np.flatnonzero(~direct).tolist():
        rows = slice(int(batch.query_starts[seq]), int(batch.query_starts[seq + 1]))
        _attend_chunk(query[rows], kv[:, layer], batch.table(seq), int(batch.ends[seq]), params, out[rows])
    return out


def _attend_chunk(
    query: torch.Tensor, layer_kv: torch.Tensor, table: np.ndarray[Any, Any], end: int,
    params: AttentionParams, out: torch.Tensor,
) -> None:  # fmt: skip
    """Attention of one chunk: `query` and `out` [tokens, heads, head_dim] at positions [end - tokens, end)."""
    start = end - query.shape[0]
    windowed = params.window is not None and params.window < end
    if windowed or params.softcap is not None:
        _attend_tiles(query, layer_kv, table, end, params, out)
        return
    key, value = gather_kv(layer_kv, table, 0, end).unsqueeze(1)
    rows = query.transpose(0, 1).unsqueeze(0)
    chunk, chunk_lse = _attend_torch(
        rows, key[:, :, start:], value[:, :, start:], params.scale, is_causal=True
    )
    if start == 0:
        out.copy_(chunk[0].transpose(0, 1))
        return
    context, context_lse = _attend_torch(
        rows, key[:, :, :start], value[:, :, :start], params.scale, is_causal=False
    )
    # Two softmaxes over disjoint keys, each with its log-sum-exp, merge exactly.
    share = torch.sigmoid(context_lse - chunk_lse).unsqueeze(-1)
    merged = torch.lerp(chunk.float(), context.float(), share)
    out.copy_(merged[0].transpose(0, 1))


def _attend_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [1, heads, tokens, head_dim] and log-sum-exp [1, heads, tokens] of one dense attention."""
    if query.device.type == "cpu":
        result: tuple[torch.Tensor, torch.Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, is_causal, scale=scale
            )
        )
        return result
    group = query.shape[1] // key.shape[1]
    scores = query.float() @ key.float().repeat_interleave(group, dim=1).transpose(2, 3) * scale
    if is_causal:
        size = scores.shape[-1]
        ahead = torch.ones(size, size, dtype=torch.bool, device=query.device).triu_(1)
        scores = scores.masked_fill_(ahead, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    out = (scores - lse.unsqueeze(-1)).exp_() @ value.float().repeat_interleave(group, dim=1)
    return out.to(query.dtype), lse


def _attend_tiles(
    query: torch.Tensor, layer_kv: torch.Tensor, table: np.ndarray[Any, Any], end: int,
    params: AttentionParams, out: torch.Tensor,
) -> None:  # fmt: skip
    """The windowed or capped case: tiles of queries, each over just the keys that it can see."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = layer_kv.shape[2]
    for low in range(0, num_tokens, _TILE):
        high = min(low + _TILE, num_tokens)
        last = end - num_tokens + high
        first = 0 if params.window is None else max(0, end - num_tokens + low - params.window + 1)
        key, value = gather_kv(layer_kv, table, first, last)
        rows = query[low:high].view(high - low, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = (rows @ key.unsqueeze(1).transpose(2, 3)).float() * params.scale
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        at = torch.arange(end - num_tokens + low, last, device=query.device)[:, None]
        j = torch.arange(first, last, device=query.device)[None, :]
        hidden = (j > at) if params.window is None else (j > at) | (j <= at - params.window)
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1).to(query.dtype)
        attended = (weights @ value.unsqueeze(1)).permute(2, 0, 1, 3)
        out[low:high] = attended.reshape(high - low, num_heads, head_dim)


# The two loops that touch the pool work on slices indexed from 0: only then does LLVM vectorise them.


@compiled
def _score(pool: Any, key: Any, filled: Any, scaled: Any, rows: Any, width: Any, scores: Any) -> None:
    """scores[row, slot] = scaled[row] · key row of the slot, for the block's first `filled` slots."""
    for slot in range(filled):
        keys = pool[key + slot * width : key + (slot + 1) * width]
        for row in range(rows):
            queries = scaled[row * width : (row + 1) * width]
            score = np.float32(0.0)
            for i in range(width):
                score += queries[i] * load(keys, i)
            scores[row, slot] = score


@compiled
def _fold(scores: Any, peak: Any, mass: Any, sums: Any) -> Any:
    """One step of the online softmax: turns `scores` into weights relative to the new peak, and rescales `sums`.

    Returns the new peak and mass. Until a row has seen a key its weights are all 1; the first key makes them void,
    because the sums so far are then scaled by exp(_NONE - highest) = 0.
    """
    highest = peak
    for slot in range(scores.shape[0]):
        highest = max(highest, scores[slot])
    added = np.float32(0.0)
    for slot in range(scores.shape[0]):
        weight = exp(scores[slot] - highest)
        scores[slot] = weight
        added += weight
    if highest != peak:
        shrink = exp(peak - highest)
        mass *= shrink
        for i in range(sums.shape[0]):
            sums[i] *= shrink
    return highest, mass + added


@compiled
def _accumulate(pool: Any, value: Any, filled: Any, weights: Any, rows: Any, width: Any, total: Any) -> None:
    """total[row] += Σ weights[row, slot] · value row of the slot, four slots at a time."""
    for slot in range(0, filled - 3, 4):
        base = value + slot * width
        v0, v1 = pool[base : base + width], pool[base + width : base + 2 * width]
        v2, v3 = pool[base + 2 * width : base + 3 * width], pool[base + 3 * width : base + 4 * width]
        for row in range(rows):
            w0, w1 = weights[row, slot], weights[row, slot + 1]
            w2, w3 = weights[row, slot + 2], weights[row, slot + 3]
            sums = total[row * width : (row + 1) * width]
            for i in range(width):
                sums[i] += (w0 * load(v0, i) + w1 * load(v1, i)) + (w2 * load(v2, i) + w3 * load(v3, i))
    for slot in range(filled - filled % 4, filled):
        values = pool[value + slot * width : value + (slot + 1) * width]
        for row in range(rows):
            weight = weights[row, slot]
            sums = total[row * width : (row + 1) * width]
            for i in range(width):
                sums[i] += weight * load(values, i)


@compiled
def _attend_direct(
    query: Any, token_stride: Any, head_stride: Any, num_heads: Any, pool: Any, shape: Any, layer: Any,
    query_starts: Any, ends: Any, block_tables: Any, table_starts: Any, direct: Any,
    scale: Any, window: Any, softcap: Any, out: Any,
) -> None:  # fmt: skip
    """One pass over each sequence's blocks in memory order, all query rows of the sequence side by side.

    `pool` is flat and `shape` the pool's; `window` and `softcap` 0 are off; sequences with `direct` false are left out.
    Rows are ordered by key/value head, then token, then query head of the group.
    """
    num_layers, num_kv_heads, block_size, width = shape[1], shape[3], shape[4], shape[5]
    head_size = block_size * width
    line = _CACHE_LINE // pool.itemsize
    group = num_heads // num_kv_heads
    most = 1
    for seq in range(ends.shape[0]):
        if direct[seq]:
            most = max(most, query_starts[seq + 1] - query_starts[seq])
    scaled = np.empty(most * num_heads * width, np.float32)
    total = np.empty(most * num_heads * width, np.float32)
    scores = np.empty((most * group, block_size), np.float32)
    peak = np.empty(most * num_heads, np.float32)
    mass = np.empty(most * num_heads, np.float32)
    for seq in range(ends.shape[0]):
        if not direct[seq]:
            continue
        first_token, end = query_starts[seq], ends[seq]
        start = end - (query_starts[seq + 1] - first_token)
        rows = (end - start) * group
        for row in range(rows * num_kv_heads):
            token, head = row % rows // group, row // rows * group + row % group
            source = (first_token + token) * token_stride + head * head_stride
            for i in range(width):
                scaled[row * width + i] = load(query, source + i) * scale
                total[row * width + i] = 0.0
            peak[row] = _NONE
            mass[row] = 0.0
        first_block = max(np.int64(0), start - window + 1) // block_size if window > 0 else np.int64(0)
        last_block = (end - 1) // block_size
        for index in range(first_block, last_block + 1):
            block = block_tables[table_starts[seq] + index]
            if index < last_block:
                # Blocks lie anywhere, so the processor cannot foresee the next one.
                ahead = (block_tables[table_starts[seq] + index + 1] * num_layers + layer) * 2 * num_kv_heads
                for offset in range(0, 2 * num_kv_heads * head_size, line):
                    prefetch(pool, ahead * head_size + offset)
            base = index * block_size
            filled = min(block_size, end - base)
            for kv_head in range(num_kv_heads):
                key = ((block * num_layers + layer) * 2 * num_kv_heads + kv_head) * head_size
                first_row = kv_head * rows
                mine = slice(first_row * width, (first_row + rows) * width)
                _score(pool, key, filled, scaled[mine], rows, width, scores)
                for row in range(rows):
                    at = start + row // group
                    if softcap > 0.0:
                        for slot in range(filled):
                            scores[row, slot] = softcap * np.tanh(scores[row, slot] / softcap)
                    if base + filled > at + 1 or window > 0:
                        for slot in range(filled):
                            if base + slot > at or (window > 0 and base + slot <= at - window):
                                scores[row, slot] = _NONE
                    r = first_row + row
                    sums = total[r * width : (r + 1) * width]
                    peak[r], mass[r] = _fold(scores[row, :filled], peak[r], mass[r], sums)
                _accumulate(pool, key + num_kv_heads * head_size, filled, scores, rows, width, total[mine])
        for row in range(rows * num_kv_heads):
            token, head = row % rows // group, row // rows * group + row % group
            target = ((first_token + token) * num_heads + head) * width
            for i in range(width):
                store(out, target + i, total[row * width + i] / mass[row])
