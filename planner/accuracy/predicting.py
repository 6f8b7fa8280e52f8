"""The predicting half: the measured loads through the simulator, with the measured profiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from twinpool.bench.serving.record import Run
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.model_files import resolve
from twinpool.layout import Dtype, KVLayout
from twinpool.planner.accuracy.comparing import Compared, compare
from twinpool.planner.accuracy.folder import Folder
from twinpool.planner.accuracy.layouts import BLOCK_SIZE, LAYOUTS, TriedLayout
from twinpool.planner.accuracy.loads import TimedLoad, loads_of
from twinpool.planner.profile.fit import factors_of
from twinpool.planner.profile.fitted_times import FittedTimes
from twinpool.planner.profile.saved import Profile, StepSample, Unsteadiness
from twinpool.planner.profile.unsteady import UnsteadyTimes
from twinpool.planner.simulator.driver import simulate

NUM_SEEDS = 12
"""How often each run is simulated: which step meets which factor is chance."""


def predict(
    load: TimedLoad, layout: TriedLayout, profile: Profile, pace: Unsteadiness, kv: KVLayout, seed: int
) -> Run:
    """One load on one simulated layout, whose machine is as fast and as unsteady as `pace` says."""
    times = UnsteadyTimes(FittedTimes(profile), seed, pace)
    deployment = layout.deployment(times, kv, profile.max_model_len)
    return simulate(deployment, load.shapes).as_run()


def pace_around(steps: Sequence[StepSample], profile: Profile) -> Unsteadiness:
    """How much longer each of `steps` took than its shape takes in the profile on average. What there is no step of is
    as it was in the whole profile."""

    def kind(step: StepSample) -> tuple[str, int, bool]:
        return step.name, step.num_busy, step.has_slept

    usual_s = {kind(each): each.seconds for each in profile.measurements.steps}
    known = [replace(each, seconds=mean_s) for each in steps if (mean_s := usual_s.get(kind(each)))]
    found = factors_of(known)
    return Unsteadiness(
        found.decode or profile.unsteadiness.decode, found.prompt or profile.unsteadiness.prompt
    )


def compare_all(folder: Folder, layouts: Sequence[TriedLayout] = LAYOUTS) -> Iterator[Compared]:
    """Every load on every layout that the folder has runs of. Each run is simulated `NUM_SEEDS` times, with the pace of
    the steps around it. Raises ConfigError if the folder lacks what they are made with."""
    facts = folder.facts()
    config = ModelConfig.from_dir(resolve(facts.asked, needs_weights=False).path)
    for layout in layouts:
        profile = folder.profile(layout.threads(facts.num_cores))
        kv = config.kv_layout(BLOCK_SIZE, Dtype(profile.dtype))
        for load in loads_of(facts):
            measured = folder.runs(layout.name, load.name, layout.repetitions(facts.repetitions))
            predicted = []
            for number, (_, steps) in enumerate(measured):
                pace = pace_around(steps, profile)
                seeds = range(number * NUM_SEEDS, (number + 1) * NUM_SEEDS)
                predicted.append([predict(load, layout, profile, pace, kv, seed) for seed in seeds])
            if measured:
                yield from compare(layout.name, load.name, load.slo, predicted, [run for run, _ in measured])
