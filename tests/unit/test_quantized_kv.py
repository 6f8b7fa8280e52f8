"""8-bit pools: where their scales lie, and that mirrors and layouts count them."""

from __future__ import annotations

import pytest
import torch

from twinpool.engine.gpu.host_mirror import HostMirror
from twinpool.kernels.kv_write import kv_write_reference
from twinpool.kernels.quantized_kv import dequantize, int8_scales, pool_view, quantize
from twinpool.layout import Dtype, KVLayout

TYPES = [Dtype.FLOAT16, Dtype.FLOAT8_E4M3FN, Dtype.INT8]


def pool_of(dtype: Dtype) -> tuple[torch.Tensor, torch.Tensor, KVLayout]:
    """The bytes of 3 blocks of zeros, and the pool in them."""
    layout = KVLayout(num_layers=2, num_kv_heads=3, head_dim=24, block_size=16, dtype=dtype)
    memory = torch.zeros(3 * layout.block_bytes, dtype=torch.uint8)
    return memory, pool_view(memory, (3, 2, 2, 3, 16, 24), getattr(torch, dtype.value)), layout


def write(pool: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """Writes random keys and values to layer 1; returns them, [k|v, token, head, dim]."""
    vectors = torch.randn(2, len(slots), 3, 24).to(torch.float16)
    kv_write_reference(pool, 1, vectors[0], vectors[1], torch.tensor(slots))
    return vectors


@pytest.mark.parametrize("dtype", TYPES)
def test_a_block_and_a_layer_of_it_are_the_bytes_that_the_layout_says(dtype: Dtype) -> None:
    memory, pool, layout = pool_of(dtype)
    write(pool, [16, 30])
    start, length = layout.layer_range(1, 1, 2)
    assert memory[start : start + length].any()
    memory[start : start + length] = 0
    assert not memory.any()


def test_scales_lie_behind_the_vectors_of_their_head() -> None:
    memory, pool, layout = pool_of(Dtype.INT8)
    vectors = write(pool, [16, 30])
    head = layout.layer_range(1, 1, 2)[0] + 2 * layout.head_bytes
    scales = memory[head + 16 * 24 : head + layout.head_bytes].view(torch.float32)
    assert torch.equal(scales[[0, 14]], vectors[0, :, 2].float().abs().amax(dim=-1) / 127)
    assert torch.equal(int8_scales(pool[1, 1, 0, 2:])[0], scales)


def test_zeros_stay_zeros_and_the_largest_element_is_exact() -> None:
    steps, scales = quantize(torch.tensor([[0.0, 0.0], [3.0, -1.0], [1e-20, 1e-25]]))
    assert steps.tolist() == [[0, 0], [127, -42], [127, 0]]
    assert (steps[1, 0] * scales[1]).item() == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_mirror_moves_blocks_with_all_that_belongs_to_them(dtype: Dtype) -> None:
    """Over to a second pool, as a transfer does, whole and layer by layer."""
    memory, pool, layout = pool_of(dtype)
    write(pool, list(range(48)))
    host = bytearray(len(memory))
    HostMirror(pool, memoryview(host)).fetch([0, 2], 1, 2)
    _, other, _ = pool_of(dtype)
    HostMirror(other, memoryview(host)).store([2, 0])
    wanted = dequantize(pool)
    wanted[1] = 0
    assert torch.equal(dequantize(other), wanted)
    start, length = layout.layer_range(2, 1, 2)
    assert bytes(host[start : start + length]) == bytes(memory[start : start + length].tolist())
