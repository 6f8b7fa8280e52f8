"""What is computed from samples, what is compared with a baseline, and the plot: pure, or files only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from twinpool.bench.engine import baseline, ceilings
from twinpool.bench.engine.baseline import Reached
from twinpool.bench.engine.floors import Ceilings, Work
from twinpool.bench.engine.measuring import Bench
from twinpool.bench.engine.perftest import Perftest
from twinpool.bench.engine.plot import draw, on_the_roofline
from twinpool.bench.engine.report import EngineReport, Measurement, cells, duration
from twinpool.bench.engine.timing import CpuTimer, spread
from twinpool.errors import ConfigError, TransferError

LIMITS = Ceilings(bytes_per_s=1e10, flops_per_s=1e11)
ROW = Measurement(
    "decode", "batch 1", (0.2, 0.3, 0.9), (0.1, 0.1, 0.3), "memory", Work(1e9, 2e9), 5, "tokens"
)


def report(*rows: Measurement) -> EngineReport:
    return EngineReport({"cpu": "a CPU", "class": "x86"}, {"what": "a model"}, {"1 thread": LIMITS}, rows)


def of_ratio(ratio: float, name: str = "batch 1") -> EngineReport:
    return report(replace(ROW, name=name, seconds=(ratio,), floor_s=(1.0,)))


def test_each_duration_is_divided_by_the_floor_of_its_own_round() -> None:
    assert ROW.ratios == pytest.approx((2.0, 3.0, 3.0))
    assert ROW.ratio == pytest.approx(3.0)
    assert ROW.rate == pytest.approx(5 / 0.3)


def test_the_spread_is_the_middle_half_over_the_median_and_wide_ones_are_named() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert spread([7.0]) == 0.0
    noisy, quiet = ROW, replace(ROW, name="batch 2", seconds=(0.2,) * 3, floor_s=(0.1,) * 3)
    words = "\n".join(report(noisy, quiet).words())
    assert "measure again: decode: batch 1" in words
    assert "batch 2" not in words


def test_an_operation_without_a_floor_has_no_ratio_and_its_durations_tell_the_spread() -> None:
    alone = Measurement("start", "process", (1.0, 2.0, 3.0))
    assert alone.ratio is None
    assert alone.rate is None
    assert alone.spread == pytest.approx(0.5)


def test_one_sample_has_no_spread_and_the_words_below_the_table_name_the_ceilings_that_count() -> None:
    assert cells(Measurement("start", "process", (1.0,)))[-1] == "–"
    found = EngineReport({}, {}, {"1 thread": LIMITS, "2 threads": LIMITS}, (ROW,), failed={"start": "why"})
    words = "\n".join(found.words())
    assert "ratio: the median of the rounds' ratios" in words
    assert "ceiling, 1 thread" in words
    assert "2 threads" not in words
    assert "FAILED, start: why" in words


def test_json_has_every_sample_and_what_follows_from_them() -> None:
    values = json.loads(report(ROW).to_json())
    (row,) = values["measurements"]
    assert row["seconds"] == [0.2, 0.3, 0.9]
    assert row["work"] == {"num_bytes": 1e9, "flops": 2e9}
    assert row["ratio"] == pytest.approx(3.0)
    assert values["ceilings"]["1 thread"]["flops_per_s"] == 1e11


@pytest.mark.parametrize(
    ("seconds", "shown"), [(12.34, "12.3 s"), (0.5, "500 ms"), (1.234e-3, "1.23 ms"), (4.2e-8, "42.0 ns")]
)
def test_durations_have_three_digits(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


class Counting:
    """Limits that count how often they are asked."""

    def __init__(self) -> None:
        self.asked = 0

    def measure(self) -> Ceilings:
        self.asked += 1
        return LIMITS


def test_limits_are_measured_before_every_run_and_the_first_run_does_not_count() -> None:
    limits, runs = Counting(), []
    bench = Bench(CpuTimer(), limits, rounds=5, most_s=60.0)
    bench.operation("group", "name", lambda: runs.append(limits.asked), Work(1e10, 0))
    assert runs == [0, 1, 2, 3, 4, 5]
    (row,) = bench.measurements
    assert row.floor_s == (1.0,) * 5
    assert row.floor == "memory"


def test_a_slow_operation_is_measured_less_often_but_not_just_once() -> None:
    bench = Bench(CpuTimer(), Counting(), rounds=9, most_s=0.0)
    bench.operation("group", "name", lambda: None, Work(0, 1e11))
    assert len(bench.measurements[0].seconds) == 3
    assert bench.measurements[0].floor == "arithmetic"


def test_what_is_read_to_measure_memory_is_far_more_than_the_cache_holds_and_bounded() -> None:
    assert ceilings.read_bytes(0) == 256 << 20
    assert ceilings.read_bytes(100 << 20) == 400 << 20
    assert ceilings.read_bytes(1 << 40) == 1 << 30


# ── baseline ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_baseline_is_the_middle_of_several_runs_and_as_wide_as_they_differed() -> None:
    made = baseline.made_of([of_ratio(2.0), of_ratio(1.9), of_ratio(2.3)])
    assert made == {"decode: batch 1": Reached(2.0, 0.4)}


def test_steady_runs_still_get_a_tolerance() -> None:
    assert baseline.made_of([of_ratio(2.0)] * 3)["decode: batch 1"].tolerance == baseline.LEAST_TOLERANCE


def test_an_operation_that_not_every_run_has_is_no_part_of_a_baseline() -> None:
    assert baseline.made_of([of_ratio(2.0), of_ratio(2.0, "batch 2")]) == {}


def test_a_ratio_beyond_its_tolerance_is_worse_and_one_within_is_not() -> None:
    known = {"decode: batch 1": Reached(2.0, 0.2)}
    (within,) = baseline.compare(of_ratio(2.39), known)
    (beyond,) = baseline.compare(of_ratio(2.41), known)
    assert not within.is_worse
    assert beyond.is_worse
    assert str(beyond) == "decode: batch 1: 2.41 times its floor; baseline 2.00, at most 2.40"


def test_a_noisy_operation_beyond_its_tolerance_is_not_judged() -> None:
    wide = report(replace(ROW, seconds=(2.0, 3.0, 9.0), floor_s=(1.0,) * 3))
    (beyond,) = baseline.compare(wide, {"decode: batch 1": Reached(2.0, 0.2)})
    (within,) = baseline.compare(wide, {"decode: batch 1": Reached(3.0, 0.2)})
    assert beyond.is_undecided
    assert not beyond.is_worse
    assert not within.is_undecided


def test_a_run_of_some_groups_is_compared_with_those_alone() -> None:
    known = {key: Reached(2.0, 0.2) for key in ("decode: batch 1", "kv write: 5 rows", "linear: head")}
    some = replace(report(ROW), settings={"only": ("decode", "kv")})
    assert [each.key for each in baseline.compare(some, known)] == ["decode: batch 1", "kv write: 5 rows"]


def test_an_operation_that_is_gone_is_worse() -> None:
    (gone,) = baseline.compare(of_ratio(1.0, "another"), {"decode: batch 1": Reached(2.0, 0.2)})
    assert gone.is_worse
    assert "not measured any more" in str(gone)


def test_a_baseline_file_keeps_the_classes_of_other_machines(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    assert baseline.read(file) == {}
    baseline.write(file, {"x86": {"a": Reached(1.5, 0.1)}, "GPU": {"b": Reached(2.0, 0.3)}})
    assert baseline.read(file) == {"x86": {"a": Reached(1.5, 0.1)}, "GPU": {"b": Reached(2.0, 0.3)}}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '{"x86": {"a": {"ratio": 1}}}',
        '{"x86": {"a": {"ratio": NaN, "tolerance": 0.1}}}',
        '{"x86": {"a": {"ratio": "1", "tolerance": 0.1}}}',
        '{"x86": {"a": {"ratio": 1, "tolerance": Infinity}}}',
    ],
)
def test_a_file_that_is_no_baseline_is_told(tmp_path: Path, text: str) -> None:
    file = tmp_path / "baseline.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is no baseline"):
        baseline.read(file)


# ── plot ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_plot_shows_each_operation_that_computes_under_both_ceilings(tmp_path: Path) -> None:
    from matplotlib.image import imread

    rows = (ROW, replace(ROW, name="moves", work=Work(1e9)), Measurement("start", "process", (1.0,)))
    assert on_the_roofline(rows) == [ROW]
    picture, drawing = tmp_path / "roofline.png", tmp_path / "roofline.svg"
    draw(picture, "a model", "1 thread", LIMITS, rows)
    draw(drawing, "a model", "1 thread", LIMITS, rows)
    pixels = np.asarray(imread(picture))[..., :3]
    colors = np.unique((pixels * 15).astype(np.uint8).reshape(-1, 3), axis=0)
    assert pixels.shape[1] > 1000
    assert len(colors) > 20
    assert (pixels.min(axis=2) < 0.5).mean() > 0.002, "hardly anything is drawn"
    assert "decode" in drawing.read_text() or "<use" in drawing.read_text()


def test_a_plot_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(tmp_path / "missing" / "roofline.png", "a model", "1 thread", LIMITS, [ROW])


# ── UCX's own benchmark ─────────────────────────────────────────────────────────────────────────────────────


def program(folder: Path, text: str) -> Perftest:
    file = folder / "ucx_perftest"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return Perftest(str(file), "", 1 << 20, None)


def test_the_rate_is_read_from_the_last_line_in_mebibytes(tmp_path: Path) -> None:
    last = "4000,10.7,10.9,10.9,11800.10,1000.00,91944,91944"
    ucx = program(tmp_path, f'case "$1" in -p) exec sleep 30;; *) echo "a header"; echo "{last}";; esac')
    assert ucx.seconds(1000 << 20) == pytest.approx(1.0)


def test_a_benchmark_that_fails_is_told_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="fails: no such device"):
        program(tmp_path, "echo no such device; exit 1").seconds(1)


def test_a_benchmark_that_says_something_else_is_told(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="something else than a rate: 'hello"):
        program(tmp_path, 'case "$1" in -p) exec sleep 30;; *) echo hello;; esac').seconds(1)
