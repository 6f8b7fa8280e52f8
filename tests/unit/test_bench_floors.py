"""Floors by hand: what one step of a small decoder moves and computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinpool.bench.engine.floors import (
    Ceilings,
    Piece,
    Shape,
    Work,
    attention,
    elementwise,
    linear,
    requests,
    step,
    total,
)

# Two layers of 8 wide rows, two query heads on one key/value head of 4, 16 inner, a vocabulary of 10, two bytes each.
TINY = Shape(8, 2, 1, 4, 16, 10, (None, None), 2)
KV_PRODUCTS = 2 * 4 * 8
OTHER_PRODUCTS = 8 * 8 + 8 * 8 + 3 * 8 * 16
LAYER = KV_PRODUCTS + OTHER_PRODUCTS + 2 * 8
SMOLLM2 = Shape(576, 9, 3, 64, 1536, 49152, (None,) * 30, 2)


def test_a_decode_step_reads_every_weight_once_and_the_cache_and_writes_one_token() -> None:
    work = step(TINY, [Piece(5, 1)])
    kv_elements = 2 * 2 * 4 * (5 + 1)
    assert work.num_bytes == 2 * (2 * LAYER + 10 * 8 + 8 + 8 + kv_elements)
    products = 2 * (KV_PRODUCTS + OTHER_PRODUCTS) + 8 * 10
    assert work.flops == 2 * products + 2 * 4 * 6 * 8


def test_a_batch_shares_the_weights_and_not_the_cache() -> None:
    one, four = step(TINY, [Piece(5, 1)]), step(TINY, [Piece(5, 1)] * 4)
    assert four.flops == 4 * one.flops
    own_elements = 2 * 2 * 4 * 6 + 8
    assert four.num_bytes - one.num_bytes == 2 * 3 * own_elements


def test_of_the_last_layer_only_the_sampled_row_needs_more_than_its_keys_and_values() -> None:
    work = step(TINY, [Piece(0, 3)])
    products = 3 * (KV_PRODUCTS + OTHER_PRODUCTS) + 3 * KV_PRODUCTS + OTHER_PRODUCTS + 10 * 8
    keys = (1 + 2 + 3) + 3
    assert work.flops == 2 * products + 4 * keys * 8


def test_a_chunk_that_samples_nothing_needs_no_head_and_no_attention_in_the_last_layer() -> None:
    work = step(TINY, [Piece(0, 3, is_sampled=False)])
    assert work.flops == 2 * (3 * (KV_PRODUCTS + OTHER_PRODUCTS) + 3 * KV_PRODUCTS) + 4 * (1 + 2 + 3) * 8


def test_a_prompt_in_two_chunks_computes_as_much_as_in_one() -> None:
    whole = step(SMOLLM2, [Piece(0, 512)])
    parts = total([step(SMOLLM2, [Piece(0, 200, is_sampled=False)]), step(SMOLLM2, [Piece(200, 312)])])
    assert parts.flops == whole.flops
    assert parts.num_bytes > whole.num_bytes


@pytest.mark.parametrize("window", [1, 3, 4, 100])
def test_a_window_bounds_the_keys_that_are_read_and_attended_to(window: int) -> None:
    windowed = replace(TINY, windows=(window, window))
    seen = [min(position + 1, window) for position in range(2, 8)]
    assert attention(windowed, [Piece(2, 6)]).flops == 2 * 4 * sum(seen) * 8
    before = min(2, window - 1)
    assert attention(windowed, [Piece(2, 6)]).num_bytes == 2 * 2 * (2 * 4 * (before + 6) + 2 * 8 * 6)


def test_biases_and_head_norms_count_as_weights() -> None:
    more = replace(TINY, has_qkv_bias=True, has_output_bias=True, has_mlp_bias=True, has_head_norms=True)
    extra = (8 + 2 * 4) + 8 + (2 * 16 + 8) + 2 * 4
    assert step(more, [Piece(0, 1)]).num_bytes - step(TINY, [Piece(0, 1)]).num_bytes == 2 * 2 * extra


def test_the_default_model_reads_its_269_megabytes_and_what_is_in_the_cache() -> None:
    work = step(SMOLLM2, [Piece(512, 1)])
    assert work.num_bytes == pytest.approx(2 * 134_515_008 + 23_040 * 513, rel=1e-4)


def test_many_requests_are_one_prefill_and_then_a_decode_step_per_token() -> None:
    work = requests(TINY, 3, 4, 2)
    assert work == step(TINY, [Piece(0, 4)] * 3) + step(TINY, [Piece(4, 1)] * 3)


def test_the_slower_of_memory_and_arithmetic_is_the_floor() -> None:
    limits = Ceilings(bytes_per_s=10.0, flops_per_s=100.0)
    assert limits.floor_s(Work(20, 100)) == 2.0
    assert limits.is_bound_by_memory(Work(20, 100))
    assert limits.floor_s(Work(20, 400)) == 4.0
    assert not limits.is_bound_by_memory(Work(20, 400))


def test_operations_count_what_they_read_and_write() -> None:
    assert linear(3, 8, 5, 2) == Work(2 * (40 + 3 * 13), 240.0)
    assert elementwise(6, 2, 4) == Work(32)
    assert Work(3, 4) * 2 == Work(6, 8)
