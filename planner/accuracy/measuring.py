"""The measuring half: every load on every layout's real server, and profiles of this machine's workers.

A machine that others share is faster now and slower then. So nothing is measured in one piece: each load is sent
several times, in an order that a seed has shuffled, and right before and right after it the profile of such workers
goes on for a moment. Whatever was measured is kept at once, and measuring goes on with what a folder lacks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import tokenizers

from twinpool.bench.comparison.noise import Noise
from twinpool.bench.comparison.stand import Hardware, Stand, Trial
from twinpool.bench.serving.datasets import warm_up_requests
from twinpool.bench.serving.workload import PlannedRequest
from twinpool.coordinator.launch import usable_cores
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.model_files import resolve
from twinpool.engine.processor import processor
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import ConfigError
from twinpool.planner.accuracy.folder import Facts, Folder
from twinpool.planner.accuracy.layouts import BLOCK_SIZE, KV_TOKENS, LAYOUTS, TriedLayout
from twinpool.planner.accuracy.loads import SHARES, WORKLOADS, TimedLoad, Yardstick, loads_of, planned
from twinpool.planner.profile.fitted_times import FittedTimes
from twinpool.planner.profile.measure import ProfileSettings, Profiling
from twinpool.planner.profile.saved import StepSample
from twinpool.planner.profile.served_loads import prompts_as

FIRST_ROUNDS = 3
"""Of all steps of each profile, before the first load: rates are made of these."""
SLICE_S = 2.0
"""Of a profile, before a load and after it."""
MOST_STOLEN, MOST_OTHERS = 0.02, 0.1
"""Of all cores during a run, what the machine below and what other programs took: a run with more is sent again,"""
TRIES = 3
"""so often in all, and the one that lost least counts; but"""
AGAIN_SHARE = 0.1
"""of all runs no more than these, so that measuring ends on a machine that never is quiet."""
_WARM_UPS = 3
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be measured: a model as it is asked for, the seconds of each load, the seed of all that is random, how
    often each load is sent; with `only` no more than the runs in whose "layout, load" that stands."""

    asked: str | None
    seconds: float
    seed: int
    repetitions: int
    command: str
    is_quick: bool = False
    only: str = ""


@dataclass(frozen=True, slots=True)
class _Run:
    layout: TriedLayout
    load: TimedLoad
    repetition: int

    @property
    def name(self) -> str:
        return f"{self.layout.name}, {self.load.name}"


def measure_all(folder: Folder, wanted: Wanted, say: Say) -> None:
    """Fills the folder with what it lacks.

    Raises:
        ConfigError: something else is being measured into the folder, or elsewhere, or it has everything, or no run is
            called like `only`. As profiles and stands do.
        ModelError, TransferError, ServerFault: as profiles and stands do.
    """
    names = [f"{layout.name}, {load}, {rate}" for layout in LAYOUTS for load in WORKLOADS for rate in SHARES]
    if not any(wanted.only in name for name in names):
        raise ConfigError(f"--only is {wanted.only!r}, which is in none of: {'; '.join(names)}")
    folder.make()
    num_cores, cpu = len(usable_cores()), processor().name
    facts = _begun(folder, wanted)
    if facts is not None and not _missing(folder, facts, wanted.only):
        raise ConfigError(
            f"--measure is {str(folder.path)!r}, which has all runs: remove it to measure anew, or leave --measure out"
        )
    if facts is not None and (facts.num_cores, facts.cpu) != (num_cores, cpu):
        raise ConfigError(
            f"--measure is {str(folder.path)!r}, begun on {facts.num_cores} cores of {facts.cpu}; here are {num_cores} "
            f"of {cpu}: go on there, or name another folder"
        )
    model = resolve(wanted.asked)
    tokenizer = Tokenizer.from_dir(model.path).backend
    tokenizer.no_truncation()
    tokenizer.no_padding()
    with ExitStack() as stack:
        profilings = {
            threads: stack.enter_context(
                Profiling(
                    ProfileSettings(
                        model.path,
                        model.name,
                        wanted.asked,
                        tokenizer,
                        threads=threads,
                        is_quick=wanted.is_quick,
                    ),
                    say,
                )
            )
            for threads in sorted({layout.threads(num_cores) for layout in LAYOUTS})
        }
        for profiling in profilings.values():
            profiling.measure_rounds(FIRST_ROUNDS)
            profiling.measure_around()
        if facts is None:
            yardstick = Yardstick.of(FittedTimes(next(iter(profilings.values())).profile()))
            facts = Facts(
                model=model.name, asked=wanted.asked, seconds=wanted.seconds, seed=wanted.seed,
                repetitions=wanted.repetitions, prompt_token_s=yardstick.prompt_token_s,
                stream_token_s=yardstick.stream_token_s, num_cores=num_cores, cpu=cpu,
                started_at=datetime.now(UTC).isoformat(timespec="seconds"), command=wanted.command,
            )  # fmt: skip
            folder.save_facts(facts)
        max_model_len = ModelConfig.from_dir(model.path).max_positions
        hardware = Hardware(() if wanted.asked is None else (wanted.asked,), KV_TOKENS, BLOCK_SIZE)
        with Stand(hardware, folder.path) as stand:
            rounds = _missing(folder, facts, wanted.only)
            num_runs, num_measured = sum(map(len, rounds)), 0
            num_again = max(1, round(AGAIN_SHARE * num_runs))
            measuring = _Measuring(folder, facts, tokenizer, max_model_len, stand, profilings, num_again, say)
            for runs in rounds:
                if num_measured:
                    measuring.stop()
                measuring.start({run.layout.name: run.layout for run in runs}.values(), runs[0].load)
                for run in runs:
                    num_measured += 1
                    measuring.measure(run, f"{num_measured} of {num_runs}")


def _is_disturbed(noise: Noise) -> bool:
    return noise.stolen_share > MOST_STOLEN or noise.others_share > MOST_OTHERS


def _begun(folder: Folder, wanted: Wanted) -> Facts | None:
    """What the folder's runs are of; None if it has none. Raises ConfigError if that is something else."""
    if not folder.has_facts:
        return None
    facts = folder.facts()
    for name in ("asked", "seconds", "seed", "repetitions"):
        if getattr(facts, name) != getattr(wanted, name):
            raise ConfigError(
                f"--measure is {str(folder.path)!r}, whose runs are of {name} {getattr(facts, name)!r}, not "
                f"{getattr(wanted, name)!r}: name another folder, or remove this one"
            )
    return facts


def _missing(folder: Folder, facts: Facts, only: str) -> list[list[_Run]]:
    """What the folder lacks, in the order in which it is measured: repetition after repetition, each in another one."""
    shuffle, found = random.Random(facts.seed), []
    loads = loads_of(facts)
    for number in range(facts.repetitions):
        runs = [
            _Run(layout, load, number * layout.times_as_often + again)
            for layout in LAYOUTS
            for load in loads
            for again in range(layout.times_as_often)
        ]
        shuffle.shuffle(runs)
        wanted = [run for run in runs if only in run.name]
        found.append([r for r in wanted if not folder.has_run(r.layout.name, r.load.name, r.repetition)])
    return [runs for runs in found if runs]


class _Measuring:
    """What runs meanwhile: servers, and the profiles' engines by their threads."""

    def __init__(
        self, folder: Folder, facts: Facts, tokenizer: tokenizers.Tokenizer, max_model_len: int, stand: Stand,
        profilings: dict[int, Profiling], num_again: int, say: Say,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._facts = facts
        self._tokenizer = tokenizer
        self._prompt_as = prompts_as(tokenizer)
        self._stand = stand
        self._profilings = profilings
        self._num_again = num_again
        self._say = say
        self._arms = {layout.name: layout.arm(max_model_len) for layout in LAYOUTS}

    def start(self, layouts: Iterable[TriedLayout], load: TimedLoad) -> None:
        """Starts these servers. Some requests like those of the load warm them up."""
        requests, seed = self._requests(load), self._facts.seed
        warm = warm_up_requests(requests, self._prompt_as, self._tokenizer, _WARM_UPS, seed)
        at_once = [msgspec.structs.replace(each, at_s=0.0) for each in warm]
        for layout in layouts:
            self._say(f"starting {layout.name}")
            self._stand.load(self._arms[layout.name], at_once, "warm-up")

    def stop(self) -> None:
        """Ends servers and engines, whose memory then lies elsewhere, and loads the engines anew."""
        self._stand.stop([arm.name for arm in self._arms.values()])
        for profiling in self._profilings.values():
            profiling.renew()

    def measure(self, run: _Run, number: str) -> None:
        """One run, and the steps around it."""
        layout, load = run.layout, run.load
        self._say(
            f"{number}: {run.name}, repetition {run.repetition + 1}: {len(load.shapes)} requests at "
            f"{load.rate_per_s:.2f} per second"
        )
        profiling = self._profilings[layout.threads(self._facts.num_cores)]
        slot = f"{load.name}-{run.repetition}".replace(", ", "-").replace(" ", "-")
        requests = self._requests(load)
        tries: list[tuple[Trial, list[StepSample]]] = []
        while not tries or (len(tries) < TRIES and self._num_again > 0 and _is_disturbed(tries[-1][0].noise)):
            if tries:
                self._num_again -= 1
                self._say("  again: others took too much of the cores")
            steps = profiling.measure_slice(SLICE_S)
            trial = self._stand.load(self._arms[layout.name], requests, f"{slot}-{len(tries)}")
            tries.append((trial, steps + profiling.measure_slice(SLICE_S)))
        trial, steps = min(tries, key=lambda each: each[0].noise.stolen_share + each[0].noise.others_share)
        self._folder.save_profile(profiling.profile())
        self._folder.save_run(layout.name, load.name, run.repetition, trial.run, steps)

    def _requests(self, load: TimedLoad) -> list[PlannedRequest]:
        return planned(load, self._tokenizer, self._prompt_as, self._facts.seed)
