"""Predicted against measured: loads are fixed by profile and seed, errors are counted, documents renewed in place."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from support.made_profiles import PLAN, made_profile, sampled

from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.noise import Noise, Pace
from twinpool.bench.comparison.stand import Trial
from twinpool.bench.serving.datasets import PromptAs
from twinpool.bench.serving.record import Run
from twinpool.errors import ConfigError
from twinpool.layout import Dtype, KVLayout
from twinpool.planner.accuracy.__main__ import EXIT_SETTING, main
from twinpool.planner.accuracy.comparing import TOLD, Compared, compare, errors_of, summary, table
from twinpool.planner.accuracy.folder import Facts, Folder
from twinpool.planner.accuracy.layouts import LAYOUTS
from twinpool.planner.accuracy.loads import SHARES, WORKLOADS, Yardstick, loads_of, make_loads
from twinpool.planner.accuracy.measuring import Wanted, _Measuring, _Run, measure_all
from twinpool.planner.accuracy.predicting import pace_around, predict
from twinpool.planner.accuracy.report import BEGIN, END, measured_section, renewed
from twinpool.planner.profile.fitted_times import FittedTimes
from twinpool.planner.profile.saved import Profile, StepSample, Unsteadiness
from twinpool.planner.simulator.driver import simulate

TIMES = FittedTimes(made_profile())
KV = KVLayout(30, 3, 64, 16, Dtype.BFLOAT16)
YARDSTICK = Yardstick.of(TIMES)
FACTS = Facts(
    "made-up", None, 5.0, 1, 2, YARDSTICK.prompt_token_s, YARDSTICK.stream_token_s, 2, "A processor",
    "2026-01-02T03:04:05+00:00", "python",
)  # fmt: skip


def test_loads_are_the_same_whenever_they_are_made_and_their_rates_share_the_machine() -> None:
    loads = make_loads(YARDSTICK, 10.0, 1)
    assert loads == make_loads(YARDSTICK, 10.0, 1)
    assert loads != make_loads(YARDSTICK, 10.0, 2)
    assert len(loads) == len(WORKLOADS) * len(SHARES)
    for low, high in zip(loads[::2], loads[1::2], strict=True):
        assert high.rate_per_s / low.rate_per_s == pytest.approx(SHARES["high"] / SHARES["low"])
        assert [shape.at_s for shape in high.shapes] == sorted(shape.at_s or 0.0 for shape in high.shapes)
        assert high.slo.ttft_s
        assert high.slo.tpot_s


def test_a_long_prompt_among_chats_shares_nothing_with_them() -> None:
    (load,) = [load for load in make_loads(YARDSTICK, 30.0, 1) if load.name == "long prompt, high"]
    keys = [piece.key for shape in load.shapes for piece in shape.pieces]
    assert len(set(keys)) == len(keys)
    assert max(shape.input_tokens for shape in load.shapes) == 1024


def test_each_layout_simulates_a_load_to_its_end_and_agrees_with_itself() -> None:
    load = make_loads(YARDSTICK, 2.0, 1)[0]
    for layout in LAYOUTS:
        deployment = layout.deployment(TIMES, KV, 8192)
        run = simulate(deployment, load.shapes).as_run()
        found = compare(layout.name, load.name, load.slo, [[run, run]] * 2, [run, run])
        assert [each.figure for each in found] == list(TOLD)
        assert all(max(abs(each.error), each.run_spread) < 1e-12 for each in found)
        assert all(math.isfinite(each.measured) for each in found)


def test_a_server_of_a_layout_has_the_memory_and_chunks_that_are_simulated() -> None:
    for layout in LAYOUTS:
        deployment = layout.deployment(TIMES, KV, 8192)
        arguments = " ".join(layout.arm(8192).arguments((), 65_536, 16))
        assert f"--num-blocks {deployment.pools[0].num_blocks}" in arguments
        budget = deployment.pools[0].scheduler.token_budget
        assert (f"--token-budget {budget}" in arguments) == (budget is not None)
        assert layout.repetitions(5) == (5 if layout.chunk else 10)
        assert layout.threads(2) == (1 if len(deployment.pools) == 2 else 2)


def compared(predicted: float, *runs: float) -> Compared:
    return Compared("1P1D", "chat, low", "p50 TTFT", predicted, runs)


def test_errors_are_relative_to_what_was_measured() -> None:
    assert compared(1.1, 1.0).error == pytest.approx(0.1)
    assert compared(0.0, 0.0).error == 0
    assert compared(0.1, 0.0).error == math.inf
    found = errors_of([compared(1.1, 1.0), compared(0.8, 1.0), compared(1.0, 1.0)])
    assert (found.median, found.worst, found.num) == (pytest.approx(0.1), pytest.approx(0.2), 3)
    assert found.worst_one == compared(0.8, 1.0)
    assert compared(1.1, 1.0, 0.5, 2.0).error == pytest.approx(0.1)
    assert compared(1.1, 1.0, 0.5, 2.0).run_errors == pytest.approx((0.0, -0.5, 1.0))
    assert compared(1.1, 1.0, 0.5, 2.0).run_spread == pytest.approx(0.5)
    assert compared(1.1, 1.0, 0.0).error == math.inf, "where a run has none there is no mean"


def test_tables_tell_both_values_and_the_error() -> None:
    found = [Compared("1P1D", "chat, low", name, 0.11, (0.1, 0.1)) for name in TOLD]
    assert "| 1P1D | chat, low | 110.0 / 100.0 (+10% ±0%) |" in table(found)[2]
    assert summary(found)[-1].startswith("| all | 5 | 10.0% |")


def test_a_document_keeps_what_people_wrote_and_renews_what_was_measured() -> None:
    found = [Compared("1P1D", "chat, low", name, 0.11, (0.1, 0.1)) for name in TOLD]
    run = Run(started_at="", duration_s=1.0, requests=(), senders=(), settings={})
    section = measured_section(FACTS, make_loads(YARDSTICK, 2.0, 1), [run], found)
    first = renewed("# Title\n\nWords.\n", section)
    assert first.startswith("# Title\n\nWords.\n")
    assert renewed(first + "More.\n", section) == first + "More.\n"
    assert first.count(BEGIN) == first.count(END) == 1


def test_a_folder_gives_back_what_was_put_in_and_says_what_it_lacks(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "measured")
    with pytest.raises(ConfigError, match=r"facts.json.*--measure"):
        folder.facts()
    folder.make()
    folder.save_facts(FACTS)
    folder.save_profile(made_profile())
    run = Run(started_at="now", duration_s=1.0, requests=(), senders=(), settings={"arm": "1P1D"})
    steps = sampled(PLAN.alone[:3])
    folder.save_run("1P1D", "chat, low", 0, run, steps)
    folder.save_run("1P1D", "chat, low", 2, run, [])
    assert (folder.facts(), folder.profile(1)) == (FACTS, made_profile())
    assert [folder.has_run("1P1D", "chat, low", number) for number in range(3)] == [True, False, True]
    assert folder.runs("1P1D", "chat, low", 3) == [(run, steps), (run, [])]
    assert folder.runs("1P1D", "chat, high", 3) == []
    (folder.path / "facts.json").write_text("{}")
    with pytest.raises(ConfigError, match="not of this version"):
        folder.facts()


def test_measuring_goes_on_only_with_what_it_began_with(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.save_facts(FACTS)
    run = Run(started_at="now", duration_s=1.0, requests=(), senders=(), settings={})
    for layout in LAYOUTS:
        for load in loads_of(FACTS):
            for number in range(layout.repetitions(FACTS.repetitions)):
                folder.save_run(layout.name, load.name, number, run, [])
    wanted = Wanted(FACTS.asked, FACTS.seconds, FACTS.seed, FACTS.repetitions, "python")
    with pytest.raises(ConfigError, match="has all runs"):
        measure_all(folder, wanted, print)
    with pytest.raises(ConfigError, match=r"runs are of seconds 5\.0, not 6\.0"):
        measure_all(folder, dataclasses.replace(wanted, seconds=6.0), print)
    with pytest.raises(ConfigError, match=r"--only is 'soup', which is in none of: 1P1D, chat, low;"):
        measure_all(folder, dataclasses.replace(wanted, only="soup"), print)
    next(folder.path.glob("run-*")).unlink()
    with pytest.raises(ConfigError, match="begun on 2 cores of A processor"):
        measure_all(folder, wanted, print)


def test_a_disturbed_run_is_sent_again_and_the_one_that_lost_least_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stolen = iter((0.09, 0.05, 0.06, 0.05, 0.0))

    class Stand:
        def load(self, arm: Arm, _requests: object, slot: str) -> Trial:
            share = next(stolen)
            run = Run(started_at=slot, duration_s=share, requests=(), senders=(), settings={})
            return Trial(arm, run, Noise(0.0, share, 0.0, Pace(1.0, 1.0)))

    class Steps:
        def measure_slice(self, _seconds: float) -> list[StepSample]:
            return sampled(PLAN.alone[:1])

        def profile(self) -> Profile:
            return made_profile()

    folder = Folder(tmp_path)
    monkeypatch.setattr("twinpool.planner.accuracy.measuring.prompts_as", lambda _: PromptAs.IDS)
    parts = cast("Any", (Stand(), {1: Steps(), 2: Steps()}))
    measuring = _Measuring(folder, FACTS, cast("Any", None), 8192, *parts, 3, lambda _: None)
    monkeypatch.setattr(measuring, "_requests", lambda _: [])
    load = loads_of(FACTS)[0]
    for layout in LAYOUTS[:2]:
        measuring.measure(_Run(layout, load, 0), "1 of 2")
    ((first, steps),), ((second, _),) = (folder.runs(each.name, load.name, 1) for each in LAYOUTS[:2])
    assert (first.started_at, first.duration_s) == ("chat-low-0-1", 0.05)
    assert len(steps) == 2
    assert (second.started_at, second.duration_s) == ("chat-low-0-1", 0.0), "the last that may be sent again"


def test_a_run_is_predicted_at_the_pace_of_the_steps_around_it() -> None:
    profile = made_profile()
    decode, prompt = (
        next(each for each in profile.measurements.steps if each.part == part)
        for part in ("decode", "prompt")
    )
    slow = msgspec.structs.replace(decode, each_s=(1.5 * decode.seconds, 1.7 * decode.seconds))
    unknown = msgspec.structs.replace(prompt, name="never seen", each_s=(9.0,))
    pace = pace_around([slow, unknown], profile)
    assert np.mean(pace.decode) == pytest.approx(1.6)
    assert pace.prompt == profile.unsteadiness.prompt
    load = make_loads(YARDSTICK, 2.0, 1)[0]
    fast, slowed = (
        predict(load, LAYOUTS[0], profile, each, KV, 0).duration_s for each in (Unsteadiness(), pace)
    )
    assert slowed > 1.2 * fast


def test_the_program_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == EXIT_SETTING
    assert "--measure FOLDER" in capsys.readouterr().err
    assert main(["--predict", str(tmp_path)]) == EXIT_SETTING
    assert "facts.json" in capsys.readouterr().err


def test_facts_survive_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(FACTS), type=Facts) == FACTS
