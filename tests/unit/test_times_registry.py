"""Service times by name: what is loaded, and what a wrong name is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.made_measurements import made_measurements, splitwise_rows, write_splitwise
from support.public_data import public_data, public_file

from twinpool.errors import ConfigError
from twinpool.planner.step_shape import StepShape, of_chunk, of_sequences, together
from twinpool.planner.times.coefficients import DYNAMO_H200, Coefficients, DecodeTerms, fit_dynamo
from twinpool.planner.times.curves import Curve, never_falling
from twinpool.planner.times.devices import Precision
from twinpool.planner.times.floor import refuse_faster_times
from twinpool.planner.times.model_shapes import SHAPES
from twinpool.planner.times.registry import (
    KINDS,
    Conditions,
    device_of,
    precision_of,
    roofline,
    service_times,
)
from twinpool.planner.times.service_times import ServiceTimes
from twinpool.planner.times.tables import splitwise

LLAMA_2 = SHAPES["llama-2-70b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_measurements(tmp_path_factory.mktemp("measurements"))


def load(spec: str, model: str, folder: Path | None, tp: int = 1) -> ServiceTimes:
    return service_times(spec, SHAPES[model], Conditions(tp=tp, public_data=folder))


def test_each_says_model_hardware_and_who_measured(folder: Path) -> None:
    names = [
        load("roofline:b200", "qwen3-8b", None).name,
        load("splitwise:h100", "llama-2-70b", folder, 4).name,
        load("distserve:opt-66b", "opt-66b", folder, 4).name,
        load("dynamo:h200", "llama-3.1-8b", None).name,
    ]
    assert names == [
        "qwen3-8b in bf16 on 1 × B200 SXM, roofline",
        "llama-2-70b in bf16 on 4 × H100 SXM, splitwise",
        "opt-66b in fp16 on 4 × A100 SXM 80 GB, distserve",
        "llama-3.1-8b in fp8 on 1 × H200 SXM, dynamo",
    ]


@pytest.mark.parametrize(
    ("spec", "model", "tp", "message"),
    [
        ("magic:h100", "llama-2-70b", 1, r"--times is 'magic:h100'; allowed: roofline:GPU .*dynamo:h200.*profile:FILE"),
        ("roofline:h1", "llama-2-70b", 1, r"--gpu is 'h1'; allowed: h100, h200, a100, b200"),
        ("splitwise:h100", "opt-13b", 2, r"--model is 'opt-13b'; splitwise has llama-2-70b, bloom-176b"),
        ("splitwise:h100", "llama-2-70b", 3, r"TP is 3; splitwise has llama-2-70b on h100 at 2, 4, 8"),
        ("splitwise:h100-80gb-pcap", "llama-2-70b", 2, r"h100-80gb-pcap was derived from h100, not measured"),
        ("distserve:opt-66b", "opt-66b", 8, r"TP is 8; distserve has opt-66b at 4"),
        ("distserve:opt-66b", "opt-13b", 4, r"'distserve:opt-66b' and --model is 'opt-13b'; wanted: one model"),
        ("distserve:opt-175b", "opt-175b", 8, r"--model is 'opt-175b'; distserve has opt-13b, opt-66b"),
        ("dynamo:h100", "llama-3.1-8b", 1, r"--times is 'dynamo:h100'; allowed: dynamo:h200"),
        ("dynamo:h200", "llama-3.1-8b", 2, r"TP 2; dynamo:h200 is llama-3.1-8b at TP 1"),
        ("profile:nowhere.json", "smollm2-135m", 1, r"profile 'nowhere.json' cannot be read"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_told_with_what_is(
    spec: str, model: str, tp: int, message: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(spec, model, folder, tp)


def test_weights_are_held_as_they_were_measured_unless_one_says_otherwise() -> None:
    assert precision_of("dynamo:h200", Conditions()) is Precision.FP8
    assert precision_of("distserve:opt-13b", Conditions()) is Precision.FP16
    assert precision_of("roofline:h200", Conditions()) is Precision.BF16
    assert precision_of("roofline:h200", Conditions(precision=Precision.FP4)) is Precision.FP4


def test_another_precision_than_the_measured_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--precision is 'bf16'; dynamo measured llama-3.1-8b in fp8"):
        service_times("dynamo:h200", SHAPES["llama-3.1-8b"], Conditions(precision=Precision.BF16))


def test_without_the_public_folder_one_is_told_where_its_file_is_published(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(ConfigError, match=r"published at github.com/Mutinifni/splitwise-sim"):
            load("splitwise:h100", "llama-2-70b", folder, 2)


def test_every_kind_but_a_profile_is_of_a_device() -> None:
    specs = ["roofline:mi300x", "splitwise:a100", "distserve:opt-13b", "dynamo:h200", "profile:x.json"]
    found = [device_of(spec) for spec in specs]
    assert [device and device.name for device in found] == ["mi300x", "a100", "a100", "h200", None]
    assert {spec.partition(":")[0] for spec in specs} <= set(KINDS)


def test_a_link_of_the_users_replaces_the_data_sheets(folder: Path) -> None:
    for spec, model, tp in (("roofline:h100", "llama-2-70b", 4), ("splitwise:h100", "llama-2-70b", 4)):
        conditions = Conditions(tp=tp, public_data=folder, link_bytes_per_s=100e9)
        times = service_times(spec, SHAPES[model], conditions)
        assert times.transfer_s(28 * 10**9) == pytest.approx(1e-3 + 0.1)


def test_splitwises_table_is_followed_at_its_points(folder: Path) -> None:
    times = load("splitwise:h100", "llama-2-70b", folder, 4)
    assert times.step_s(of_chunk(1_024)) == pytest.approx(20e-3 + 0.3e-3 * 1_024 / 4)
    assert times.step_s(of_chunk(1_536)) == pytest.approx(20e-3 + 0.3e-3 * 1_536 / 4)
    assert times.step_s(of_sequences([576] * 16)) == pytest.approx(34e-3, rel=0.01)
    assert times.step_s(of_sequences([576])) == pytest.approx(30e-3, rel=0.01)


def test_a_row_whose_prompt_was_not_computed_is_left_out(folder: Path) -> None:
    assert splitwise(folder, "h100", LLAMA_2, 2).num_failed == 1
    assert splitwise(folder, "h100", LLAMA_2, 4).num_failed == 0
    times = load("splitwise:h100", "llama-2-70b", folder, 2)
    assert times.step_s(of_chunk(64 * 512)) > times.step_s(of_chunk(32 * 512)) > 2.0


def test_derived_rows_change_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "perf").mkdir()
    write_splitwise(tmp_path, [row for row in splitwise_rows() if "pcap" not in str(row[1])])
    both = [
        load("splitwise:h100", "llama-2-70b", root, 8).step_s(of_chunk(700)) for root in (folder, tmp_path)
    ]
    assert both[0] == both[1]


def test_distserves_formula_in_seconds(folder: Path) -> None:
    times = load("distserve:opt-13b", "opt-13b", folder)
    assert times.step_s(of_chunk(512)) == pytest.approx((18.0 + 0.1 * 512 + 7e-6 * 512**2) / 1e3)
    assert times.step_s(of_sequences([500] * 10)) == pytest.approx((20.0 + 6e-4 * 5_000 + 0.04 * 10) / 1e3)
    assert times.step_s(of_sequences([500] * 200)) == pytest.approx((7.0 + 5e-4 * 100_000 + 0.16 * 200) / 1e3)


def test_chunks_of_a_prompt_sum_to_the_prompt_but_for_fixed_costs(folder: Path) -> None:
    times = load("distserve:opt-13b", "opt-13b", folder)
    whole = times.step_s(of_chunk(2_000))
    chunks = sum(times.step_s(of_chunk(500, start)) for start in range(0, 2_000, 500))
    assert chunks == pytest.approx(whole + 3 * 18e-3)


def test_a_step_of_both_pays_for_weights_once(folder: Path) -> None:
    times = load("distserve:opt-13b", "opt-13b", folder)
    prompts, sequences = of_chunk(512), of_sequences([500] * 10)
    apart = times.step_s(prompts) + times.step_s(sequences)
    assert times.step_s(together(prompts, sequences)) == pytest.approx(apart - 20e-3)


def test_where_the_next_sum_begins_lower_the_last_one_holds() -> None:
    times = Coefficients(
        0.0, 0.0, 0.0, (DecodeTerms(0.02, 1e-3, 0.0), DecodeTerms(0.0, 1e-3, 0.0, from_batch=10))
    )
    steps = [times.sequences_s(StepShape(num_sequences=batch)) for batch in (9, 10, 28, 29, 30)]
    assert steps == pytest.approx([0.029, 0.029, 0.029, 0.029, 0.030])


@pytest.mark.parametrize(
    "decode",
    [(), (DecodeTerms(1.0, 0.0, 0.0, 2),), (DecodeTerms(1.0, -1.0, 0.0),)],
    ids=["none", "late", "negative"],
)
def test_coefficients_that_make_no_sense_are_refused(decode: tuple[DecodeTerms, ...]) -> None:
    with pytest.raises(ConfigError, match="coefficients"):
        Coefficients(0.0, 0.0, 0.0, decode)


def test_a_curve_never_falls_and_goes_on_as_steeply_as_at_its_end() -> None:
    curve = Curve([(1, 5.0), (2, 4.0), (3, 6.0), (3, 8.0), (3, 7.0), (4, 9.0)])
    assert curve.points == [(1, 4.5), (2, 4.5), (3, 7.0), (4, 9.0)]
    assert [curve(x) for x in (0, 1, 2.5, 4, 6)] == pytest.approx([4.5, 4.5, 5.75, 9.0, 13.5])
    assert never_falling([3.0, 2.0, 1.0, 5.0]) == [2.0, 2.0, 2.0, 5.0]
    for points in ([], [(1.0, 0.0)]):
        with pytest.raises(ConfigError, match="a curve needs points above 0"):
            Curve(points)


def test_the_built_in_coefficients_of_an_h200_are_what_a_fit_to_nvidias_curves_finds() -> None:
    public_file("perf/dynamo_h200_prefill.npz")
    public_file("perf/dynamo_h200_decode.npz")
    found = fit_dynamo(public_data())
    built_in = DYNAMO_H200
    assert found.prompt_fixed_s == pytest.approx(built_in.prompt_fixed_s, rel=1e-3)
    assert found.prompt_token_s == pytest.approx(built_in.prompt_token_s, rel=1e-3)
    assert found.prompt_square_s == pytest.approx(built_in.prompt_square_s, rel=1e-3)
    assert found.decode[0].fixed_s == pytest.approx(built_in.decode[0].fixed_s, rel=1e-3)
    assert found.decode[0].sequence_s == pytest.approx(built_in.decode[0].sequence_s, rel=1e-3)
    assert found.decode[0].context_token_s == pytest.approx(built_in.decode[0].context_token_s, rel=1e-3)


@pytest.mark.parametrize(
    ("spec", "model", "tp", "precision"),
    [
        *(("splitwise:a100", "llama-2-70b", tp, Precision.BF16) for tp in (2, 4, 8)),
        *(("splitwise:h100", "llama-2-70b", tp, Precision.BF16) for tp in (2, 4, 8)),
        ("splitwise:a100", "bloom-176b", 8, Precision.BF16),
        ("splitwise:h100", "bloom-176b", 8, Precision.BF16),
        *(("distserve:opt-13b", "opt-13b", tp, Precision.FP16) for tp in (1, 2, 4)),
        *(("distserve:opt-66b", "opt-66b", tp, Precision.FP16) for tp in (2, 4, 8)),
        ("dynamo:h200", "llama-3.1-8b", 1, Precision.FP8),
    ],
)  # fmt: skip
def test_nothing_that_was_measured_is_faster_than_the_data_sheet(
    spec: str, model: str, tp: int, precision: Precision
) -> None:
    public_file("perf/splitwise_a100_h100.csv")
    public_file("perf/distserve_a100.json")
    conditions = Conditions(tp=tp, public_data=public_data())
    device = device_of(spec)
    assert device is not None
    floor = roofline(device.name, SHAPES[model], Conditions(tp=tp, precision=precision))
    refuse_faster_times(service_times(spec, SHAPES[model], conditions), floor)
