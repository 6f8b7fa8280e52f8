"""The decoder as one compiled function for the CPU: a whole step, or some of its layers, in one call.

Every rank of a team runs it. Between two parts that need each other's results the ranks meet; a part is shared by rows
where it is cheap (norms, rotation, writing KV), by panels of weights or rows where it is a product, and by heads and
tokens in attention. Nothing is allocated: results go to the step's buffers. Sums are float32; the residual stream and
what enters a product are rounded to the weights' type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from twinpool.engine.models.packed_weights import ABSENT, Part
from twinpool.kernels.attention_cpu import attend
from twinpool.kernels.jit import compiled
from twinpool.kernels.linear import ADD, GATE, NO_BIAS, STORE, multiply
from twinpool.kernels.rms_norm import norm_rows
from twinpool.kernels.rope_kv_write import rope_kv_write_rows
from twinpool.kernels.team import meet
from twinpool.kernels.tiles import PANEL, WORD_BYTES

Array = np.ndarray[Any, Any]


class Shape(NamedTuple):
    """A decoder's sizes in elements, as ModelConfig has them; `windows` int64 [layers], 0 for none."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    eps: Any
    scale: Any
    windows: Array


class Tables(NamedTuple):
    """Cosines and sines, flat float32, head_dim / 2 for each position."""

    cos: Array
    sin: Array


class Step(NamedTuple):
    """A step's inputs, all int64: as `Model.forward` and `PagedBatch` have them; and whether the logits of its rows are
    computed in the same call."""

    token_ids: Array
    positions: Array
    slots: Array
    query_starts: Array
    ends: Array
    block_tables: Array
    table_starts: Array
    rows: Array
    has_head: bool


class Buffers(NamedTuple):
    """Memory for a step's results, flat: one row per token, of whole words, in the weights' type; logits float32.

    `sums` and `scratch`, float32, are the ranks' own, for products and for attention.
    """

    residual: Array
    normed: Array
    qkv: Array
    attended: Array
    gated: Array
    logits: Array
    sums: Array
    scratch: Array


@compiled
def run_layers(
    rank: Any, size: Any, gate: Any, first: Any, end: Any, shape: Any, weights: Any, tables: Any, step: Any,
    pool: Any, pool_shape: Any, pool_strides: Any, buffers: Any,
) -> None:  # fmt: skip
    """Layers [first, end) of a step; the first embeds the tokens, the last one leaves the final hidden states of
    `step.rows` in `buffers.normed`, and their logits in `buffers.logits` if the step has a head.

    After its KV is written, the last layer goes on with those rows alone, and is done if there are none.
    """
    num_rows = step.token_ids.shape[0]
    if first == 0:
        _embed(rank, size, shape, weights, step.token_ids, buffers)
    for layer in range(first, end):
        _write_kv(rank, size, gate, layer, shape, weights, tables, step, pool, pool_strides, buffers)
        if layer == shape.num_layers - 1:
            num_rows = step.rows.shape[0]
            if num_rows == 0:
                break
        attend(
            rank, size, buffers.qkv, _qkv_size(shape), shape.head_dim, shape.num_heads, pool, pool_shape, layer,
            step.query_starts, step.ends, step.block_tables, step.table_starts, shape.scale, shape.windows[layer],
            np.float32(0.0), buffers.scratch, buffers.attended,
        )  # fmt: skip
        meet(size, gate)
        if layer == shape.num_layers - 1:
            if rank == 0:
                _keep(step.rows, shape, buffers)
            meet(size, gate)
        _feed(rank, size, gate, layer, num_rows, shape, weights, buffers)
        if layer == shape.num_layers - 1:
            _norm(rank, size, num_rows, shape, weights.flat, weights.final_norm, buffers)
            meet(size, gate)
            if step.has_head:
                run_head(
                    rank, size, gate, num_rows, shape, weights, buffers.normed, buffers.sums, buffers.logits
                )


@compiled
def run_head(
    rank: Any, size: Any, _gate: Any, num_rows: Any, shape: Any, weights: Any, hidden: Any, sums: Any, logits: Any
) -> None:  # fmt: skip
    """The logits of `num_rows` final hidden states, which lie as in `buffers.normed`."""
    multiply(
        rank, size, hidden, _stride(shape.hidden, weights.flat), num_rows, weights.flat, weights.head, weights.flat,
        NO_BIAS, shape.vocab, STORE, sums, logits, shape.vocab,
    )  # fmt: skip


@compiled
def _stride(width: Any, array: Any) -> Any:
    """Elements from a row of a buffer to the next: `width` in whole words."""
    per_word = WORD_BYTES // array.itemsize
    return (width + per_word - 1) // per_word * per_word


@compiled
def _qkv_size(shape: Any) -> Any:
    return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim


@compiled
def _embed(rank: Any, size: Any, shape: Any, weights: Any, token_ids: Any, buffers: Any) -> None:
    """Each token's column of the packed embedding becomes its row of the residual stream."""
    packed, stride = weights.flat, _stride(shape.hidden, weights.flat)
    per_word = WORD_BYTES // packed.itemsize
    num_tokens = token_ids.shape[0]
    for row in range(num_tokens * rank // size, num_tokens * (rank + 1) // size):
        panel, lane = token_ids[row] // PANEL, token_ids[row] % PANEL
        source = weights.embedding + panel * PANEL * stride + lane * per_word
        for i in range(0, stride, per_word):
            for j in range(per_word):
                buffers.residual[row * stride + i + j] = packed[source + i * PANEL + j]


@compiled
def _norm(rank: Any, size: Any, num_rows: Any, shape: Any, packed: Any, at: Any, buffers: Any) -> None:
    """normed = the norm of the residual stream, the rank's share of the rows."""
    stride = _stride(shape.hidden, packed)
    first, end = num_rows * rank // size, num_rows * (rank + 1) // size
    norm_rows(
        buffers.residual[first * stride :], packed[at : at + shape.hidden], shape.eps,
        buffers.normed[first * stride :], end - first, 1, stride, 0,
    )  # fmt: skip


@compiled
def _write_kv(
    rank: Any, size: Any, gate: Any, layer: Any, shape: Any, weights: Any, tables: Any, step: Any, pool: Any,
    pool_strides: Any, buffers: Any,
) -> None:  # fmt: skip
    """Queries, keys and values of every token: queries rotated in `buffers.qkv`, keys and values in the pool."""
    packed, parts = weights.flat, weights.parts
    num_tokens, width, head_dim = step.token_ids.shape[0], _qkv_size(shape), shape.head_dim
    _norm(rank, size, num_tokens, shape, packed, parts[layer, Part.INPUT_NORM], buffers)
    meet(size, gate)
    multiply(
        rank, size, buffers.normed, _stride(shape.hidden, packed), num_tokens, weights.matrices,
        parts[layer, Part.QKV], packed, parts[layer, Part.QKV_BIAS], width, STORE, buffers.sums, buffers.qkv, width,
    )  # fmt: skip
    meet(size, gate)
    first, end = num_tokens * rank // size, num_tokens * (rank + 1) // size
    query_norm, key_norm, norm_size = parts[layer, Part.QUERY_NORM], parts[layer, Part.KEY_NORM], head_dim
    if query_norm == ABSENT:
        norm_size = 0
    rope_kv_write_rows(
        buffers.qkv[first * width :], shape.num_heads, shape.num_kv_heads,
        packed[query_norm : query_norm + norm_size], packed[key_norm : key_norm + norm_size], shape.eps,
        tables.cos, tables.sin, step.positions[first:end], pool, pool_strides, layer, step.slots[first:end],
    )  # fmt: skip
    meet(size, gate)


@compiled
def _keep(rows: Any, shape: Any, buffers: Any) -> None:
    """Moves the given rows, which ascend, to the front."""
    stride, width = _stride(shape.hidden, buffers.residual), shape.num_heads * shape.head_dim
    for to in range(rows.shape[0]):
        for i in range(stride):
            buffers.residual[to * stride + i] = buffers.residual[rows[to] * stride + i]
        for i in range(width):
            buffers.attended[to * width + i] = buffers.attended[rows[to] * width + i]


@compiled
def _feed(
    rank: Any, size: Any, gate: Any, layer: Any, num_rows: Any, shape: Any, weights: Any, buffers: Any
) -> None:
    """What follows attention: its output map, and the gated feed-forward; both add to the residual stream."""
    packed, parts, sums = weights.flat, weights.parts, buffers.sums
    stride = _stride(shape.hidden, packed)
    multiply(
        rank, size, buffers.attended, shape.num_heads * shape.head_dim, num_rows, weights.matrices,
        parts[layer, Part.OUTPUT], packed, parts[layer, Part.OUTPUT_BIAS], shape.hidden, ADD, sums, buffers.residual,
        stride,
    )  # fmt: skip
    meet(size, gate)
    _norm(rank, size, num_rows, shape, packed, parts[layer, Part.FEED_NORM], buffers)
    meet(size, gate)
    inner = _stride(shape.inner, packed)
    multiply(
        rank, size, buffers.normed, stride, num_rows, weights.matrices, parts[layer, Part.GATE_UP], packed,
        parts[layer, Part.GATE_UP_BIAS], shape.inner, GATE, sums, buffers.gated, inner,
    )  # fmt: skip
    meet(size, gate)
    multiply(
        rank, size, buffers.gated, inner, num_rows, weights.matrices, parts[layer, Part.DOWN], packed,
        parts[layer, Part.DOWN_BIAS], shape.hidden, ADD, sums, buffers.residual, stride,
    )  # fmt: skip
    meet(size, gate)
