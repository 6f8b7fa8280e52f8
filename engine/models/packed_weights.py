"""A decoder's weights for the compiled stack: everything in one flat array, and where in it each part begins.

Matrices may be rounded to int8, with a scale for each column, in a second array. Not the embedding and the head: of the
default model the head is a fifth of the bytes of a step and almost half of the tokens that rounding would change.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch

from twinpool.engine.model_config import ModelConfig
from twinpool.engine.weights import Weights
from twinpool.kernels.jit import flat
from twinpool.kernels.linear import (
    aligned,
    interleaved,
    pack,
    pack_bias,
    pack_integers,
    packed_size,
)
from twinpool.kernels.tiles import PANEL

ABSENT = -1
"""Where a part begins that the model does not have."""


class Part(IntEnum):
    """The parts of a layer; matrices are packed, query, key and value maps as one, gate and up maps interleaved."""

    INPUT_NORM = 0
    QKV = 1
    QKV_BIAS = 2
    QUERY_NORM = 3
    KEY_NORM = 4
    OUTPUT = 5
    OUTPUT_BIAS = 6
    FEED_NORM = 7
    GATE_UP = 8
    GATE_UP_BIAS = 9
    DOWN = 10
    DOWN_BIAS = 11


_MATRICES = (Part.QKV, Part.OUTPUT, Part.GATE_UP, Part.DOWN)


class PackedWeights(NamedTuple):
    """All weights of a model: flat, bfloat16 as bits. A tied head is also the embedding: there is one copy of it.

    `matrices` are those of the layers, int8, or else `flat` itself, which has everything else. `parts` int64 [layers,
    parts] is where each part of a layer begins in the array that it is in, or ABSENT; the embedding and the head are
    packed like any matrix.
    """

    flat: np.ndarray[Any, Any]
    matrices: np.ndarray[Any, Any]
    parts: np.ndarray[Any, np.dtype[np.int64]]
    embedding: int
    final_norm: int
    head: int


class _Store:
    """An array that parts are put into, one after the other."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.array = aligned(size, dtype)
        self._end = 0

    def put(self, part: torch.Tensor) -> int:
        """Returns where it begins."""
        begin, self._end = self._end, self._end + _whole(part.numel())
        self.array[begin : begin + part.numel()] = flat(part.contiguous())
        return begin


def pack_weights(
    config: ModelConfig, weights: Weights, dtype: torch.dtype, *, as_integers: bool = False
) -> PackedWeights:
    """Reads and packs all weights, a part at a time; `as_integers`: the layers' matrices rounded to int8.

    Raises:
        ModelError: a tensor is absent or has another shape than config.json says.
    """
    hidden, vocab = config.hidden_size, (config.vocab_size, config.hidden_size)
    others_size, matrices_size = _sizes(config, dtype, as_integers)
    plain = _Store(others_size + (0 if as_integers else matrices_size), dtype)
    matrices = _Store(matrices_size, torch.int8) if as_integers else plain
    parts = np.full((config.num_layers, len(Part)), ABSENT, np.int64)
    embedding = plain.put(pack(weights.get("model.embed_tokens.weight", vocab)))
    head = embedding if config.tied_embeddings else plain.put(pack(weights.get("lm_head.weight", vocab)))
    final_norm = plain.put(weights.get("model.norm.weight", (hidden,)))
    for index in range(config.num_layers):
        for part, tensor in _layer(config, weights, index):
            if part in _MATRICES:
                packed = pack_integers(tensor) if as_integers else pack(tensor)
                parts[index, part] = matrices.put(packed)
            else:
                parts[index, part] = plain.put(tensor)
    return PackedWeights(plain.array, matrices.array, parts, embedding, final_norm, head)


def packed_bytes(config: ModelConfig, dtype: torch.dtype, *, as_integers: bool) -> int:
    """What `pack_weights` will take."""
    others_size, matrices_size = _sizes(config, dtype, as_integers)
    return others_size * dtype.itemsize + matrices_size * (1 if as_integers else dtype.itemsize)


def _layer(config: ModelConfig, weights: Weights, index: int) -> Iterator[tuple[Part, torch.Tensor]]:
    """The parts of one layer; its biases are packed."""
    hidden, inner, at = config.hidden_size, config.intermediate_size, f"model.layers.{index}"
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv, sizes = [f"{at}.self_attn.{name}_proj" for name in "qkv"], [query_size, kv_size, kv_size]
    output, down = f"{at}.self_attn.o_proj", f"{at}.mlp.down_proj"
    gate, up = f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"
    yield Part.INPUT_NORM, weights.get(f"{at}.input_layernorm.weight", (hidden,))
    yield Part.QKV, weights.fused([f"{name}.weight" for name in qkv], sizes, hidden)
    if config.qkv_bias:
        yield Part.QKV_BIAS, pack_bias(weights.fused_bias([f"{name}.bias" for name in qkv], sizes))
    if config.qk_norm:
        yield Part.QUERY_NORM, weights.get(f"{at}.self_attn.q_norm.weight", (config.head_dim,))
        yield Part.KEY_NORM, weights.get(f"{at}.self_attn.k_norm.weight", (config.head_dim,))
    yield Part.OUTPUT, weights.get(f"{output}.weight", (hidden, query_size))
    if config.output_bias:
        yield Part.OUTPUT_BIAS, pack_bias(weights.get(f"{output}.bias", (hidden,)))
    yield Part.FEED_NORM, weights.get(f"{at}.post_attention_layernorm.weight", (hidden,))
    gates, ups = (weights.get(f"{name}.weight", (inner, hidden)) for name in (gate, up))
    yield Part.GATE_UP, interleaved(gates, ups)
    if config.mlp_bias:
        gates, ups = (weights.get(f"{name}.bias", (inner,)) for name in (gate, up))
        yield Part.GATE_UP_BIAS, pack_bias(interleaved(gates, ups))
    yield Part.DOWN, weights.get(f"{down}.weight", (hidden, inner))
    if config.mlp_bias:
        yield Part.DOWN_BIAS, pack_bias(weights.get(f"{down}.bias", (hidden,)))


def _sizes(config: ModelConfig, dtype: torch.dtype, as_integers: bool) -> tuple[int, int]:
    """Elements of all parts but the layers' matrices, and of those; each begins at a multiple of a panel's columns."""
    hidden, query_size = config.hidden_size, config.num_heads * config.head_dim
    qkv_size = query_size + 2 * config.num_kv_heads * config.head_dim
    gate_up = 2 * _whole(config.intermediate_size)  # at least as many columns as `interleaved` gives
    matrices = sum(
        packed_size(columns, width, dtype, as_integers=as_integers)
        for columns, width in (
            (qkv_size, hidden),
            (hidden, query_size),
            (gate_up, hidden),
            (hidden, config.intermediate_size),
        )
    )
    vectors = (
        2 * _whole(hidden)
        + (2 * _whole(config.head_dim) if config.qk_norm else 0)
        + (_whole(qkv_size) if config.qkv_bias else 0)
        + (_whole(hidden) if config.output_bias else 0)
        + (gate_up + _whole(hidden) if config.mlp_bias else 0)
    )
    num_vocab = 1 if config.tied_embeddings else 2
    ends = packed_size(config.vocab_size, hidden, dtype) * num_vocab + _whole(hidden)
    return ends + config.num_layers * vectors, config.num_layers * matrices


def _whole(size: int) -> int:
    return -(-size // PANEL) * PANEL
