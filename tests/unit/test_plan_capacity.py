"""Worked numbers of capacity and cost, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinpool.errors import ConfigError
from twinpool.layout import Dtype, KVLayout
from twinpool.planner.plan.capacity import GIB, DeviceMemory, device_block_bytes, fewest_devices, kv_capacity
from twinpool.planner.plan.cost import RequestWork, cost

SMALL = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype=Dtype.BFLOAT16)
"""Of an 8B model with 8 KV heads, like Llama 3.1."""
LARGE = KVLayout(num_layers=80, num_kv_heads=8, head_dim=128, block_size=16, dtype=Dtype.BFLOAT16)
LARGE_WEIGHTS = 140_000_000_000
"""70e9 parameters of 2 bytes."""
DEVICE = DeviceMemory(80 * GIB)

WORK = RequestWork(2000 / 12_500, 300 / 1600)
"""12,500 prompt tokens/s, and 1,600 output tokens/s from 32 streams in steps of 20 ms."""


def test_80_gib_hold_57_gib_of_kv_beside_8b_weights_114_sequences_of_4096_or_203_of_2300() -> None:
    found = kv_capacity(SMALL, int(14.9 * GIB), 1, DEVICE, longest=4096)
    assert SMALL.token_bytes == 131_072
    assert found.kv_bytes / GIB == pytest.approx(57.1)
    assert found.num_sequences(4096) == 114
    assert found.num_sequences(2300) == 203
    assert found.num_tokens == found.num_blocks * 16
    assert str(found).startswith("72.0 GiB usable − 14.9 GiB of weights = 57.1 GiB of KV on each device")


@pytest.mark.parametrize(("degree", "left_gib"), [(2, 6.8), (4, 39.4)])
def test_a_70b_model_leaves_6_8_gib_on_each_of_2_devices_and_39_4_on_each_of_4(
    degree: int, left_gib: float
) -> None:
    found = kv_capacity(LARGE, LARGE_WEIGHTS, degree, DEVICE, longest=4096)
    assert found.kv_bytes / GIB == pytest.approx(left_gib, abs=0.05)


def test_each_device_holds_the_kv_of_its_own_heads_and_never_less_than_one_head() -> None:
    assert device_block_bytes(SMALL, 1) == SMALL.block_bytes
    assert device_block_bytes(SMALL, 4) * 4 == SMALL.block_bytes
    assert device_block_bytes(SMALL, 8) == device_block_bytes(SMALL, 16) == SMALL.block_bytes // 8


def test_what_does_not_fit_says_on_how_many_devices_it_would() -> None:
    words = r"130\.4 GiB of weights .* do not fit on 1 device .*: TP2 in a layout, --tp 2 of"
    with pytest.raises(ConfigError, match=words):
        kv_capacity(LARGE, LARGE_WEIGHTS, 1, DEVICE, longest=4096)
    assert fewest_devices(LARGE, LARGE_WEIGHTS, DEVICE, longest=4096) == 2
    # 6.8 GiB on each of two devices are 42,000 tokens of 163,840 bytes: a longer sequence needs four.
    assert fewest_devices(LARGE, LARGE_WEIGHTS, DEVICE, longest=100_000) == 4


def test_no_number_of_devices_holds_a_sequence_whose_one_head_is_too_long_for_one() -> None:
    with pytest.raises(ConfigError, match="no number of such devices"):
        kv_capacity(LARGE, LARGE_WEIGHTS, 1, DeviceMemory(GIB), longest=1_000_000)


def test_a_reserve_is_taken_off_what_is_usable() -> None:
    assert DeviceMemory(80 * GIB, 0.9, 2 * GIB).usable_bytes == 70 * GIB


def test_2000_tokens_in_and_300_out_take_0_3475_s_so_2_88_requests_per_s() -> None:
    assert WORK.total_s == pytest.approx(0.3475)
    assert 1 / WORK.total_s == pytest.approx(2.88, abs=0.005)


def test_at_4_dollars_an_hour_a_request_is_0_000386_and_a_thousand_at_40_percent_use_0_97() -> None:
    assert cost(4.0, WORK, 2000, 300).per_request == pytest.approx(0.000386, abs=5e-7)
    at_40 = cost(4.0, WORK, 2000, 300, use=0.4)
    assert at_40.per_thousand_requests == pytest.approx(0.97, abs=0.005)
    # What the tokens bear is what the request costs.
    of_tokens = (2000 * at_40.per_million_input + 300 * at_40.per_million_output) / 1e6
    assert of_tokens == pytest.approx(at_40.per_request)


def test_1200_of_2000_prompt_tokens_reused_make_3_98_requests_per_s() -> None:
    assert 1 / replace(WORK, prefill_s=800 / 12_500).total_s == pytest.approx(3.98, abs=0.005)


@pytest.mark.parametrize("use", [0.0, 1.5])
def test_a_use_that_is_no_share_is_refused(use: float) -> None:
    with pytest.raises(ConfigError, match="use is"):
        cost(4.0, RequestWork(0.1, 0.1), 100, 100, use)
