"""What a comparison found, as a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.comparing import ComparedLoad
from twinpool.bench.comparison.measures import comparisons, figures, goodput_of_nothing
from twinpool.bench.comparison.noise import noise_table, noise_warnings
from twinpool.bench.comparison.outputs import check_outputs
from twinpool.bench.comparison.plan import FEWEST
from twinpool.bench.comparison.stand import Stand
from twinpool.bench.comparison.tuning import tuning_table
from twinpool.bench.reports.model import ArmReport, Comparison, Fact, OutputCheck, Report
from twinpool.bench.serving.record import Run
from twinpool.bench.serving.verdict import generator_faults


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is true of everything that one command measures."""

    command: str
    hardware: tuple[Fact, ...]
    settings: tuple[Fact, ...]
    seed: int
    confidence: float


def comparison_report(compared: ComparedLoad, stand: Stand, around: Circumstances) -> Report:
    """Of one load with at least one repetition. Its arms' servers must still be there, if they were started here."""
    trials, load = compared.trials, compared.trials.load
    baseline, *others = trials.arms
    rows: list[Comparison] = []
    checks: list[OutputCheck] = []
    findings: list[str] = []
    for other in others:
        pairs = trials.pairs(other)
        rows += comparisons(baseline.name, other.name, pairs, load.slo, around.confidence)
        checks.append(check_outputs(baseline.name, other.name, pairs))
        findings.append(goodput_of_nothing(baseline.name, other.name, pairs, load.slo, around.confidence))
    noises = {arm.name: [trial.noise for trial in trials.by_arm[arm.name]] for arm in trials.arms}
    own = {arm.name: noises[arm.name] for arm in trials.arms if not arm.url}
    tables = (*tuning_table(compared.tried), noise_table(noises))
    return Report(
        title=f"{load.name}: {' against '.join(arm.name for arm in trials.arms)}",
        created_at=now(),
        arms=tuple(
            ArmReport(
                name=arm.name,
                description=description(arm, stand),
                command=stand.command(arm),
                runs=tuple(trials.runs(arm)),
                figures=figures(trials.runs(arm), load.slo, around.confidence),
                not_a_result=_faults(trials.runs(arm)),
            )
            for arm in trials.arms
        ),
        comparisons=tuple(rows),
        output_checks=tuple(checks),
        tables=tables,
        findings=tuple(filter(None, findings)),
        warnings=(*_few(trials.num_repetitions), *noise_warnings(own), *_other_models(trials.arms, stand)),
        slo=str(load.slo),
        hardware=around.hardware,
        settings=(
            *around.settings,
            Fact("workload", load.description),
            Fact(
                "repetitions", f"{trials.num_repetitions}, each with other requests, the same for every arm"
            ),
            Fact("order", "one arm after the other, forth in one repetition, back in the next"),
            Fact("left out", "a warm-up of every arm, what the baseline was tuned by, repetitions cut short"),
            Fact("figures of an arm", "means over its repetitions; charts show all its requests together"),
            Fact("seed", str(around.seed)),
        ),
        commands=(around.command,),
        confidence=around.confidence,
    )


def description(arm: Arm, stand: Stand) -> str:
    """What the arm is, what it serves, and how its prefix cache is reset."""
    count = f"{arm.num_workers} worker{'s' if arm.num_workers > 1 else ''} on all cores together"
    where = f"a running server at {arm.url}" if arm.url else count
    return f"{where}; model {stand.facts(arm).model}; prefix cache: {stand.how_caches_are_reset(arm)}"


def now() -> str:
    """Wall clock, ISO 8601 with its zone."""
    return datetime.now(UTC).astimezone().isoformat(timespec="seconds")


def _faults(runs: Sequence[Run]) -> tuple[str, ...]:
    """Why an arm's figures are none of its server's: each repetition's first fault, all in one sentence."""
    faults = [found[0] for run in runs if (found := generator_faults(run, is_paced=True))]
    if not faults:
        return ()
    return (f"in {len(faults)} of {len(runs)} repetitions the load generator was too slow: {faults[0]}",)


def _few(num_repetitions: int) -> tuple[str, ...]:
    if num_repetitions >= FEWEST:
        return ()
    count = "one repetition was" if num_repetitions == 1 else f"{num_repetitions} repetitions were"
    return (
        f"only {count} made; fewer than {FEWEST} can hardly show a difference: give more --minutes or --repetitions",
    )


def _other_models(arms: Sequence[Arm], stand: Stand) -> list[str]:
    names = {arm.name: stand.facts(arm).model for arm in arms}
    first = names[arms[0].name]
    return [
        f"{arm} serves {name!r}, {arms[0].name} {first!r}: if these are different models, nothing here compares layouts"
        for arm, name in names.items()
        if name != first
    ]
