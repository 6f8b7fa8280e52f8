"""A whole comparison: measures the yardstick, tunes the baseline, and repeats every load on every arm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.plan import FEWEST, Trials, forecast, lasts_s, repeat
from twinpool.bench.comparison.stand import Stand, Trial
from twinpool.bench.comparison.tuning import BUDGETS, Tried, tune
from twinpool.bench.comparison.workloads import Load, Model
from twinpool.bench.comparison.yardstick import Yardstick, measure_yardstick, yardstick_arm
from twinpool.bench.serving.record import Ending
from twinpool.bench.serving.workload import PlannedRequest

MOST_REPETITIONS = 12
_WARM_UP_SEED, _TUNING_SEED = 1_000_000, 2_000_000
"""Beyond those of repetitions: what is measured is new to every server."""
_NUM_WARM_UP = 3
_START_S = 6.0
"""About what a server takes to start and warm up."""
MakeLoad = Callable[[Yardstick], Load]
Say = Callable[[str], None]


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
class ComparedLoad:
    """One load on all arms, tuned ones under their found names. Its trials grow while it is measured."""

    trials: Trials
    tried: tuple[Tried, ...]


def compare_arms(wanted: Wanted, stand: Stand, model: Model, say: Say, found: list[ComparedLoad]) -> None:
    """Runs everything, and adds a `ComparedLoad` to `found` for each load as it begins: what was measured is there even
    if this raises. The time is divided evenly among the loads.

    Raises:
        ServerFault, NoServer, NothingMeasured: a server does not start or answer.
        KeyboardInterrupt: Ctrl-C.
    """
    began_at = time.monotonic()
    ends_at = began_at + 60 * wanted.minutes
    stand.find(wanted.arms)
    by = yardstick_arm(wanted.arms)
    say(f"starting {by.name}, and measuring what it does undisturbed")
    yardstick = measure_yardstick(
        lambda requests, slot: stand.load(by, requests, slot).run,
        model.tokenizer,
        wanted.seed,
        model.max_model_len,
    )
    say(f"undisturbed: {yardstick}")
    loads = [make(yardstick) for make in wanted.loads]
    one_s = {load.name: len(wanted.arms) * lasts_s(load.requests(wanted.seed), yardstick) for load in loads}
    before_s = _before_s(wanted.arms, list(one_s.values()))
    now = time.monotonic()
    wanted_s = now - began_at + before_s + FEWEST * sum(one_s.values())
    for load in loads:
        left_s = (ends_at - now - before_s) / len(loads)
        say(f"{load.name}: {forecast(one_s[load.name], left_s, wanted.most_repetitions, wanted_s)}")
    tuned = [_tuned(wanted.arms, load, stand, wanted.seed, say) for load in loads]
    _stop_losers(stand, tuned)
    for number, (load, (arms, tried)) in enumerate(zip(loads, tuned, strict=True)):
        say(f"{load.name}: {load.description}")
        compared = ComparedLoad(Trials(load, tuple(arms)), tuple(tried))
        found.append(compared)
        for arm in arms:
            stand.load(arm, _warm_up(load.requests(wanted.seed + _WARM_UP_SEED)), f"warm-up-{load.name}")
        now = time.monotonic()
        repeat(
            compared.trials,
            lambda arm, requests, slot: _heard(stand.load(arm, requests, slot), say),
            seed=wanted.seed,
            most=wanted.most_repetitions,
            until=now + (ends_at - now) / (len(loads) - number),
            say=say,
        )


def _before_s(arms: Sequence[Arm], one_s: Sequence[float]) -> float:
    """About what goes before the first repetition counts: starting servers, and tuning on each load."""
    num_tuned = sum(arm.is_tuned for arm in arms)
    num_started = sum(not arm.url for arm in arms) + num_tuned * (len(BUDGETS) - 1)
    return _START_S * num_started + num_tuned * len(BUDGETS) * sum(one_s) / len(arms)


def _warm_up(requests: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """The longest of them and the first few, all at once: whatever is set up at the first use is set up then."""
    longest = max(requests, key=lambda request: request.input_tokens)
    chosen = (longest, *requests[:_NUM_WARM_UP])
    return [msgspec.structs.replace(each, index=index, at_s=0.0) for index, each in enumerate(chosen)]


def _tuned(
    arms: Sequence[Arm], load: Load, stand: Stand, seed: int, say: Say
) -> tuple[list[Arm], list[Tried]]:
    """The arms with their token budgets, and what was tried to find those."""
    requests = load.requests(seed + _TUNING_SEED)
    chosen, tried = [], []
    for arm in arms:
        if not arm.is_tuned:
            chosen.append(arm)
            continue
        say(f"{load.name}: tuning {arm.name}")
        best, candidates = tune(
            arm, load.slo, lambda each: _heard(stand.load(each, requests, f"tuning-{load.name}"), say)
        )
        say(f"{load.name}: {best.name} is best")
        chosen.append(best)
        tried += candidates
    return chosen, tried


def _stop_losers(stand: Stand, tuned: Sequence[tuple[Sequence[Arm], Sequence[Tried]]]) -> None:
    """No load needs the servers of candidates that none has chosen."""
    kept = {arm.name for arms, _ in tuned for arm in arms}
    stand.stop([each.arm.name for _, tried in tuned for each in tried if each.arm.name not in kept])


def _heard(trial: Trial, say: Say) -> Trial:
    """Says how a trial went."""
    run = trial.run
    completed = sum(record.ending is Ending.COMPLETED for record in run.requests)
    say(f"  {trial.arm.name}: {completed} of {len(run.requests)} completed in {run.duration_s:.1f} s")
    return trial
