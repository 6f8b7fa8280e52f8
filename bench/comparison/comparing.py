"""A whole comparison: measures the yardstick, tunes the baseline, repeats every load on every arm, and says what
differs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import tokenizers

from twinpool.bench.comparison.arms import Arm, parse_arm
from twinpool.bench.comparison.measures import comparisons
from twinpool.bench.comparison.noise import Noise
from twinpool.bench.comparison.outputs import check_outputs
from twinpool.bench.comparison.plan import Trials, repeat
from twinpool.bench.comparison.stand import Stand, Trial
from twinpool.bench.comparison.tuning import Tried, tune
from twinpool.bench.comparison.workloads import Load, Yardstick, yardstick_requests
from twinpool.bench.reports.measured import arm_of
from twinpool.bench.reports.model import ArmReport, Comparison, Fact, Report, Table
from twinpool.bench.serving.metrics import itls_s, ttft_s
from twinpool.bench.serving.record import Ending
from twinpool.bench.serving.verdict import generator_faults
from twinpool.errors import TwinpoolError

MOST_REPETITIONS = 12
WARM_UP_REQUESTS = 4
_WARM_UP_SEED, _TUNING_SEED = 1_000_000, 2_000_000
"""Beyond those of repetitions: what is measured is new to every server."""
MakeLoad = Callable[[Yardstick], Load]
Say = Callable[[str], None]


class NothingMeasured(TwinpoolError):
    """A server did not answer what everything else depends on. The message says what."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be compared: `arms[0]` is the baseline. `minutes` bound all of it, tuning included."""

    arms: tuple[Arm, ...]
    loads: tuple[MakeLoad, ...]
    minutes: float
    seed: int
    confidence: float = 0.95
    most_repetitions: int = MOST_REPETITIONS


@dataclass(frozen=True, slots=True)
class Compared:
    """One load on all arms, tuned ones under their found names."""

    arms: tuple[Arm, ...]
    trials: Trials
    tried: tuple[Tried, ...]


def compare_arms(wanted: Wanted, stand: Stand, tokenizer: tokenizers.Tokenizer, say: Say) -> list[Compared]:
    """Runs everything; a `Compared` for each load, in order. The time is divided evenly among the loads.

    After Ctrl-C the last one is of the repetitions until then, if there were any.

    Raises:
        ServerFault, NoServer, NothingMeasured: a server does not start or answer.
        Interrupted: Ctrl-C before the first repetition.
    """
    ends_at = time.monotonic() + 60 * wanted.minutes
    yardstick = measure_yardstick(yardstick_arm(wanted.arms), stand, tokenizer, wanted.seed)
    say(
        f"undisturbed: {1 / yardstick.prompt_token_s:,.0f} prompt tokens/s, "
        f"{yardstick.itl_s * 1e3:.1f} ms between tokens of some streams"
    )
    loads = [make(yardstick) for make in wanted.loads]
    tuned = [_tuned(wanted.arms, load, stand, wanted.seed, say) for load in loads]
    found = []
    for number, (load, (arms, tried)) in enumerate(zip(loads, tuned, strict=True)):
        say(f"{load.name}: {load.description}")
        for arm in arms:
            stand.load(arm, load.requests(wanted.seed + _WARM_UP_SEED)[:WARM_UP_REQUESTS], "warm-up")
        now = time.monotonic()
        trials = repeat(
            arms,
            load,
            lambda arm, requests, slot: _heard(stand.load(arm, requests, slot), say),
            seed=wanted.seed,
            most=wanted.most_repetitions,
            until=now + (ends_at - now) / (len(loads) - number),
            say=say,
        )
        if trials.num_repetitions:
            found.append(Compared(tuple(arms), trials, tuple(tried)))
        if trials.was_interrupted:
            break
    return found


def measure_yardstick(arm: Arm, stand: Stand, tokenizer: tokenizers.Tokenizer, seed: int) -> Yardstick:
    """Raises NothingMeasured if the server completes none of it."""
    _, *longs, streams = (
        stand.load(arm, requests, f"yardstick-{number}").run
        for number, requests in enumerate(yardstick_requests(tokenizer, seed))
    )
    firsts = [
        first / record.input_tokens
        for run in longs
        for record in run.requests
        if record.ending is Ending.COMPLETED and (first := ttft_s(record))
    ]
    gaps = [gap for record in streams.requests for gap in itls_s(record).tolist() if gap > 0]
    if not firsts or not gaps:
        errors = {record.error for run in (*longs, streams) for record in run.requests if record.error}
        raise NothingMeasured(f"{arm.name} completed no request: {'; '.join(sorted(errors)) or 'no output'}")
    return Yardstick(statistics.median(firsts), statistics.median(gaps))


def report(
    compared: Compared, stand: Stand, wanted: Wanted, command: str, hardware: Sequence[Fact]
) -> Report:
    """What was found of one load."""
    baseline, *others = compared.arms
    trials, load = compared.trials, compared.trials.load
    rows: list[Comparison] = []
    checks = []
    for other in others:
        pairs = trials.pairs(baseline.name, other.name)
        rows += comparisons(baseline.name, other.name, pairs, load.slo, wanted.confidence)
        checks.append(check_outputs(baseline.name, other.name, pairs))
    return Report(
        title=f"{load.name}: {' against '.join(arm.name for arm in compared.arms)}",
        created_at=datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
        arms=tuple(_arm_report(arm, trials, load, stand) for arm in compared.arms),
        comparisons=tuple(rows),
        output_checks=tuple(checks),
        tables=(*_tuning_table(compared.tried), _noise_table(compared)),
        slo=_slo_words(load),
        hardware=tuple(hardware),
        settings=(
            Fact("workload", load.description),
            Fact("repetitions", str(trials.num_repetitions)),
            Fact("order", "interleaved, each time turned; the same requests for every arm"),
            Fact("seed", str(wanted.seed)),
        ),
        commands=(command,),
        confidence=wanted.confidence,
    )


def yardstick_arm(arms: Sequence[Arm]) -> Arm:
    """The layout that workloads are sized by, if it is compared; else any arm that need not be tuned first."""
    by_layout = {arm.name: arm for arm in arms}
    untuned = [arm for arm in arms if not arm.is_tuned]
    return by_layout.get("1P1D") or (untuned[0] if untuned else parse_arm("1p1d", 0))


def _tuned(
    arms: Sequence[Arm], load: Load, stand: Stand, seed: int, say: Say
) -> tuple[list[Arm], list[Tried]]:
    requests = load.requests(seed + _TUNING_SEED)
    chosen, tried = [], []
    for arm in arms:
        if not arm.is_tuned:
            chosen.append(arm)
            continue
        best, candidates = tune(
            arm, load.slo, lambda each: _heard(stand.load(each, requests, f"tuning-{load.name}"), say)
        )
        say(f"{load.name}: {arm.name} is best with a token budget of {best.serve[-1]}")
        chosen.append(best)
        tried += candidates
    return chosen, tried


def _heard(trial: Trial, say: Say) -> Trial:
    """Says how a trial went."""
    run = trial.run
    completed = sum(record.ending is Ending.COMPLETED for record in run.requests)
    say(f"  {trial.arm.name}: {completed} of {len(run.requests)} completed in {run.duration_s:.1f} s")
    return trial


def _arm_report(arm: Arm, trials: Trials, load: Load, stand: Stand) -> ArmReport:
    runs = trials.runs(arm.name)
    return arm_of(
        arm.name,
        runs,
        load.slo,
        description=_layout(arm),
        command=stand.command(arm),
        not_a_result=[text for run in runs for text in generator_faults(run, is_paced=True)],
    )


def _layout(arm: Arm) -> str:
    if arm.url:
        return f"a running server at {arm.url}"
    return f"{arm.num_workers} worker{'s' if arm.num_workers > 1 else ''} on all cores together"


def _tuning_table(tried: Sequence[Tried]) -> tuple[Table, ...]:
    if not tried:
        return ()
    rows = tuple(
        (each.arm.name, f"{each.goodput_per_s:.2f}", f"{each.p99_itl_s * 1e3:.1f}") for each in tried
    )
    return (
        Table(
            title="How the baseline was tuned",
            columns=("arm", "goodput, requests/s", "p99 ITL, ms"),
            rows=rows,
            note="One run of the same requests each; of those within a tenth of the best goodput, the lowest p99 ITL.",
        ),
    )


def _noise_table(compared: Compared) -> Table:
    rows = []
    for arm in compared.arms:
        found = [trial.noise for trial in compared.trials.by_arm[arm.name]]
        rows.append((arm.name, *(f"{value:.3g}" for value in _noise_row(found))))
    return Table(
        title="What else the machine did",
        columns=("arm", "others' CPU, %", "stolen, %", "memory, GB/s", "its spread, %", "products, GFLOP/s"),
        rows=tuple(rows),
        note="Of all cores, while loads ran: what neither the arm's server nor the load generator used (other arms' "
        "idle servers did). One core's pace was measured before each run; if it spreads, so do results.",
    )


def _noise_row(found: Sequence[Noise]) -> list[float]:
    memory = [noise.pace.memory_gbps for noise in found]
    middle = statistics.median(memory)
    return [
        100 * statistics.fmean(noise.others_share for noise in found),
        100 * statistics.fmean(noise.stolen_share for noise in found),
        middle,
        100 * (max(memory) - min(memory)) / middle,
        statistics.median(noise.pace.arithmetic_gflops for noise in found),
    ]


def _slo_words(load: Load) -> str:
    bounds = {
        "TTFT": load.slo.ttft_s,
        "p99 ITL": load.slo.itl_p99_s,
        "TPOT": load.slo.tpot_s,
        "E2E": load.slo.e2e_s,
    }
    return ", ".join(
        f"{name} {bound * 1e3:,.0f} ms"
        for name, bound in bounds.items()
        if bound is not None and math.isfinite(bound)
    )
