"""The roofline: arithmetic that can be done by hand, and what is refused below it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinpool.errors import ConfigError
from twinpool.planner.step_shape import StepShape, of_chunk, of_request, of_sequences
from twinpool.planner.times.devices import DEVICES, GIB, Device, Precision, device_named
from twinpool.planner.times.floor import AboveRoofline, refuse_faster_plan, refuse_faster_times
from twinpool.planner.times.model_shapes import SHAPES, ModelShape
from twinpool.planner.times.phases import Link
from twinpool.planner.times.roofline import Efficiency, Roofline
from twinpool.planner.times.service_times import Overheads

IDEAL = Efficiency(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
"""The data sheet itself."""
ROUND_DEVICE = Device(
    "round", "a device of 2 TB/s", {Precision.BF16: 300e12}, 2e12, 80 * GIB, 300e9, 25e9, "-"
)
"""80 GiB at 2.0 TB/s, as an A100 has, rounded."""
LAYER = 140e9 / 2 / 80
ROUND_70B = ModelShape("70b", 80, 8_192, 64, 8, 128, 1, 1, 4_096, "-", is_gated=False, num_vectors=0)
ROUND_70B = replace(
    ROUND_70B, inner=int((LAYER - ROUND_70B.attention_weights) / 2 / 8_192)
)  # 70e9 parameters in 80 layers, next to none elsewhere


def at(tp: int, efficiency: Efficiency = IDEAL) -> Roofline:
    return Roofline(ROUND_DEVICE, ROUND_70B, tp=tp, efficiency=efficiency)


def test_a_step_of_70b_on_four_devices_reads_its_weights_in_17_5_ms() -> None:
    one = of_sequences([1])
    assert at(4).floor_s(one) == pytest.approx(17.5e-3, rel=1e-3)
    assert at(2).floor_s(one) == pytest.approx(35e-3, rel=1e-3)


@pytest.mark.parametrize(("collective_s", "total_s"), [(15e-6, 19.9e-3), (60e-6, 27.1e-3)])
def test_its_160_collectives_are_not_in_the_floor_but_in_the_step(
    collective_s: float, total_s: float
) -> None:
    times = at(4, replace(IDEAL, collective_s=collective_s))
    assert times.step_s(of_sequences([1])) == pytest.approx(total_s, rel=1e-3)
    assert times.floor_s(of_sequences([1])) == pytest.approx(17.5e-3, rel=1e-3)
    assert at(1, replace(IDEAL, collective_s=collective_s)).step_s(of_sequences([1])) == pytest.approx(
        70e-3, rel=1e-3
    )


@pytest.mark.parametrize(("num_devices", "left"), [(2, 6.8), (4, 39.4)])
def test_70b_leaves_6_8_gib_on_each_of_two_devices_and_39_4_on_each_of_four(
    num_devices: int, left: float
) -> None:
    usable = 0.9 * ROUND_DEVICE.memory_bytes
    assert (usable - ROUND_70B.weight_bytes(2.0) / num_devices) / GIB == pytest.approx(left, abs=0.05)


def test_8b_leaves_57_1_gib_of_80() -> None:
    left = 0.9 * 80 - SHAPES["llama-3.1-8b"].weight_bytes(2.0) / GIB
    assert left == pytest.approx(57.1, abs=0.1)
    assert int(left * GIB / (4_096 * 128 * 1024)) == 114
    assert int(left * GIB / (2_300 * 128 * 1024)) == 203


def test_a_long_prompt_is_bound_by_flops_and_a_token_by_memory() -> None:
    """8,192 tokens: 2 · 70e9 · 8,192 FLOPs in 79 of 80 layers, attention 4 · 64 · 128 · 8,192 · 8,193 / 2 each."""
    flops = 79 / 80 * 2 * 70e9 * 8_192 + 79 * 4 * 64 * 128 * 8_192 * 8_193 / 2
    assert at(1).floor_s(of_chunk(8_192)) == pytest.approx(flops / 300e12, rel=1e-3)
    kv_bytes = 2 * 80 * 8 * 128 * 2
    batch = of_sequences([8_192] * 16)
    assert at(1).floor_s(batch) == pytest.approx((140e9 + 16 * 8_192 * kv_bytes) / 2e12, rel=1e-3)


def test_more_devices_than_kv_heads_read_some_of_them_twice() -> None:
    attention = [
        at(tp).step_s(of_sequences([100_000])) - at(tp).step_s(of_sequences([0])) for tp in (4, 8, 16, 32)
    ]
    assert attention[0] == pytest.approx(2 * attention[1])
    assert attention[2] == pytest.approx(attention[1])
    assert attention[3] == pytest.approx(attention[1])


def test_collectives_move_activations_at_the_links_rate() -> None:
    slow = Roofline(replace(ROUND_DEVICE, scale_up_bytes_per_s=1e9), ROUND_70B, tp=4, efficiency=IDEAL)
    more = slow.step_s(of_chunk(1_000)) - at(4).step_s(of_chunk(1_000))
    ring = 160 * 2 * 3 / 4 * 1_000 * 8_192 * 2
    assert more == pytest.approx(ring / 1e9 - ring / 300e9)


def test_a_window_bounds_what_its_layers_read_and_compute() -> None:
    all_layers = replace(ROUND_70B, window=128, num_window_layers=80)
    windowed, whole = (Roofline(ROUND_DEVICE, model, efficiency=IDEAL) for model in (all_layers, ROUND_70B))
    for long, short in (
        (of_sequences([4_096]), of_sequences([128])),
        (of_sequences([9_000]), of_sequences([128])),
    ):
        assert windowed.step_s(long) == pytest.approx(whole.step_s(short))
    assert windowed.floor_s(of_chunk(8_192)) < whole.floor_s(of_chunk(8_192))


def test_a_mixture_reads_the_experts_that_its_tokens_take() -> None:
    """Of 128 experts one token takes 8, two 15.5 on average, and a thousand all."""
    shape = SHAPES["qwen3-235b-a22b"]
    device = replace(ROUND_DEVICE, flops={Precision.BF16: 1e30}, scale_up_bytes_per_s=1e30)
    times = Roofline(device, shape, tp=4, efficiency=IDEAL)
    expert_s = 94 * shape.expert_weights * 2 / (4 * 2e12)
    steps = [times.step_s(StepShape(num_sequences=n)) for n in (1, 2, 1_000)]
    assert (steps[1] - steps[0]) / expert_s == pytest.approx(7.5)
    assert (steps[2] - steps[0]) / expert_s == pytest.approx(120)


def test_weights_of_fewer_bits_are_computed_in_what_the_device_has() -> None:
    a100, h100 = DEVICES["a100"], DEVICES["h100"]
    assert a100.flops_per_s(Precision.FP8) == a100.flops_per_s(Precision.BF16)
    assert h100.flops_per_s(Precision.FP8) == pytest.approx(2 * h100.flops_per_s(Precision.BF16), rel=1e-3)
    assert h100.flops_per_s(Precision.INT4) == h100.flops_per_s(Precision.BF16)
    with pytest.raises(
        ConfigError, match=r"--precision is 'fp32', and a device of 2 TB/s has no rate for it"
    ):
        Roofline(ROUND_DEVICE, ROUND_70B, precision=Precision.FP32)


def test_devices_go_by_their_usual_names_and_cite_their_data_sheets() -> None:
    assert device_named("H100_SXM") is DEVICES["h100"]
    assert device_named("a100-80gb") is DEVICES["a100"]
    assert {"h100", "h200", "a100", "b200", "mi300x"} <= set(DEVICES)
    assert all("data sheet" in device.source for device in DEVICES.values())
    with pytest.raises(ConfigError, match=r"--gpu is 'h900'; allowed: h100, h200, a100"):
        device_named("h900")


def test_heads_divide_by_the_devices() -> None:
    with pytest.raises(ConfigError, match=r"TP is 3; allowed: a divisor of 70b's 64 query heads"):
        at(3)


@pytest.mark.parametrize("name", ["products", "attention", "bandwidth", "link"])
def test_nothing_is_more_than_wholly_used(name: str) -> None:
    with pytest.raises(ConfigError, match=f"efficiency {name} is 1.1; allowed: a share above 0"):
        Efficiency(**{name: 1.1})


def test_kv_goes_over_the_links_of_all_devices() -> None:
    times = Roofline(ROUND_DEVICE, ROUND_70B, tp=8, link=Link(25e9, share=1.0, start_s=0.0))
    assert times.transfer_s(200 * 10**9) == pytest.approx(1.0)


def test_32768_tokens_of_qwen3_8b_take_about_what_mooncake_measured() -> None:
    """8 × ConnectX-7 of 200 Gb/s: 31.65 ms."""
    num_bytes = 32_768 * SHAPES["qwen3-8b"].kv_elements * 2
    assert num_bytes / GIB == pytest.approx(4.5)
    assert Link(25e9).transfer_s(num_bytes, 8) == pytest.approx(31.65e-3, rel=0.15)


class Claimed:
    """Service times that take no time."""

    name = "a dream"
    overheads = Overheads()

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def step_s(self, shape: StepShape, num_busy: int = 0) -> float:  # noqa: ARG002
        return self._step_s

    def transfer_s(self, num_bytes: int) -> float:  # noqa: ARG002
        return 0.0


def test_times_faster_than_the_data_sheet_are_refused() -> None:
    floor = Roofline(DEVICES["h100"], SHAPES["llama-3.1-8b"])
    refuse_faster_times(floor, floor)
    refuse_faster_times(Claimed(10.0), floor)
    with pytest.raises(
        AboveRoofline, match=r"a dream: a step of 1 sequences at 256 tokens is said to take 1.000 ms"
    ):
        refuse_faster_times(Claimed(1e-3), floor)


def test_a_plan_that_serves_more_than_the_data_sheet_allows_is_refused() -> None:
    """2,000 tokens in and 300 out of 8B take 2 · 8e9 · 2,300 FLOPs and more: 37 ms of an H100 at least."""
    floor = Roofline(DEVICES["h100"], SHAPES["llama-3.1-8b"])
    request = of_request(2_000, 300)
    least = floor.least_accelerator_s(request)
    assert 0.030 < least < 0.045
    refuse_faster_plan(0.99 * 8 / least, 8, floor, request)
    with pytest.raises(AboveRoofline, match=r"take 8.1 × H100 SXM at least .* and the plan has 8"):
        refuse_faster_plan(1.01 * 8 / least, 8, floor, request)


def test_reuse_and_splitting_do_not_get_around_the_floor() -> None:
    floor = Roofline(DEVICES["h100"], SHAPES["llama-3.1-70b"], tp=8)
    one = Roofline(DEVICES["h100"], SHAPES["llama-3.1-70b"], tp=1)
    request = of_request(2_000, 300)
    assert floor.least_accelerator_s(request) == pytest.approx(one.least_accelerator_s(request))
    assert floor.least_accelerator_s(of_request(2_000, 300, 1_200)) < floor.least_accelerator_s(request)
    steps_s = floor.floor_s(of_chunk(2_000)) + sum(
        floor.floor_s(of_sequences([2_000 + i] * 64)) / 64 for i in range(1, 300)
    )
    assert floor.least_accelerator_s(request) <= 8 * steps_s
