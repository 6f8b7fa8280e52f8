"""Measured points of other engines: which can be predicted, how, and how the errors are told."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support.public_data import public_data, public_file

from twinpool.planner.measured_points import (
    POINTS,
    ComparedPoint,
    MeasuredPoint,
    PredictedTimes,
    compare,
    main,
    predict,
    read_points,
    table,
)
from twinpool.planner.step_shape import StepShape, of_chunk
from twinpool.planner.times.devices import DEVICES, Precision
from twinpool.planner.times.model_shapes import SHAPES

ROW = {
    "id": "a", "backend": "vllm", "model_path": "meta-llama/Llama-3.1-70B", "system": "h100_sxm", "precision": "fp8",
    "mode": "agg", "isl": "1024", "osl": "512", "gemm_quant_mode": "fp8", "moe_quant_mode": "fp8", "batch_size": "4",
    "tp_size": "4", "pp_size": "1", "attention_dp_size": "1", "moe_tp_size": "4", "moe_ep_size": "1",
    "silicon_ttft_ms": "90", "silicon_tpot_ms": "12", "decode_batch_size": "", "decode_tp_size": "",
    "decode_attention_dp_size": "", "decode_moe_tp_size": "", "decode_moe_ep_size": "", "prefill_tp_size": "",
    "prefill_attention_dp_size": "", "prefill_moe_tp_size": "", "prefill_moe_ep_size": "",
}  # fmt: skip
SPLIT = {
    **ROW, "mode": "disagg", "batch_size": "", "tp_size": "", "decode_batch_size": "6", "decode_tp_size": "8",
    "prefill_tp_size": "2", "prefill_attention_dp_size": "1", "decode_attention_dp_size": "1",
}  # fmt: skip
POINT = MeasuredPoint(
    "a", "vLLM", DEVICES["h100"], SHAPES["llama-3.1-70b"], Precision.FP8, 4, 1_024, 512, 4, 0.09, 0.012
)


def write(folder: Path, rows: list[dict[str, str]]) -> Path:
    (folder / "perf").mkdir(exist_ok=True)
    path = folder / POINTS
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_row_is_read_in_seconds_with_its_layout(tmp_path: Path) -> None:
    assert read_points(write(tmp_path, [ROW]), 8) == ([POINT], {})


def test_prefill_and_decode_workers_of_a_row_are_read_apart(tmp_path: Path) -> None:
    (point,), _ = read_points(write(tmp_path, [SPLIT]), 8)
    assert (point.tp, point.prefill_tp, point.concurrency) == (8, 2, 6)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"batch_size": "16"}, "concurrency (of a decode worker) above 8"),
        ({**SPLIT, "decode_batch_size": "64"}, "concurrency (of a decode worker) above 8"),
        ({**SPLIT, "prefill_attention_dp_size": "4"}, "data-parallel attention"),
        ({"model_path": "someone/Unheard-Of"}, "no shape of Unheard-Of"),
        ({"tp_size": "16"}, "more than 8 devices"),
        ({"attention_dp_size": "4"}, "data-parallel attention"),
        ({"model_path": "openai/gpt-oss-120b", "moe_tp_size": "2"}, "experts on other devices"),
    ],
)
def test_what_cannot_be_predicted_is_counted_with_its_reason(
    changed: dict[str, str], reason: str, tmp_path: Path
) -> None:
    points, left_out = read_points(write(tmp_path, [ROW, {**ROW, **changed}]), 8)
    assert len(points) == 1
    assert [(reason in told, count) for told, count in left_out.items()] == [(True, 1)]


def test_streams_are_held_up_once_by_each_other_request() -> None:
    """A prompt takes 100 ms here, a decode step 10: of 4 streams each waits for 3 prompts in 512 tokens."""

    def step_s(shape: StepShape) -> float:
        return 0.1 if shape.num_chunks else 0.01

    found = predict(step_s, POINT)
    assert found.ttft_alone_s == pytest.approx(0.1)
    assert found.ttft_together_s == pytest.approx(0.25)
    assert found.tpot_s == pytest.approx(0.01 + 3 * 0.1 / 512)


def test_no_prompt_disturbs_streams_of_a_decode_worker() -> None:
    found = predict(lambda _: 0.01, POINT, lambda _: 0.1)
    assert found.ttft_alone_s == pytest.approx(0.1)
    assert found.tpot_s == pytest.approx(0.01)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    seen: list[StepShape] = []

    def step_s(shape: StepShape) -> float:
        seen.append(shape)
        return 1.0

    point = MeasuredPoint(
        "a", "vLLM", DEVICES["h100"], SHAPES["llama-3.1-70b"], Precision.FP8, 4, 10_000, 512, 1, 1.0, 1.0
    )
    assert predict(step_s, point).ttft_alone_s == 2.0
    assert seen[:2] == [of_chunk(8_192), of_chunk(1_808, 8_192)]


def test_errors_are_told_with_and_without_their_signs() -> None:
    floor = PredictedTimes(0.0, 0.0, 0.0)
    compared = [
        ComparedPoint(POINT, PredictedTimes(0.09, 0.18, 0.012 * factor), floor) for factor in (0.5, 1.0, 1.1)
    ]
    rows = table(compared)
    assert rows[2] == "| all | 3 | +0 % (0, 0, 0) | +100 % (100, 100, 100) | +0 % (10, 50, 50) |"
    assert any(row.startswith("| concurrency 4 | 3 |") for row in rows)


def test_the_program_says_where_its_points_are_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--public-data", str(tmp_path)])
    assert "published at github.com/ai-dynamo/aiconfigurator" in capsys.readouterr().err


def test_no_engine_was_measured_below_the_roofline() -> None:
    """If one were, a figure of a data sheet, a model's shape or the floor's arithmetic would be wrong."""
    points, _ = read_points(public_file(POINTS), 8)
    compared, left_out = compare(points, "roofline", public_data())
    assert len(compared) > 400
    assert not left_out
    for each in compared:
        assert each.floor.ttft_alone_s <= each.point.ttft_s, each.point.name
        assert each.floor.tpot_s <= each.point.tpot_s, each.point.name


def test_tpot_of_dense_models_is_within_a_tenth_in_the_middle() -> None:
    points, _ = read_points(public_file(POINTS), 8)
    dense = [point for point in points if point.model.experts is None]
    compared, _ = compare(dense, "roofline", public_data())
    sizes = sorted(abs(each.errors[2]) for each in compared)
    assert sizes[len(sizes) // 2] < 0.1
