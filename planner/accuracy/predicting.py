"""The predicting half: the measured loads through the simulator, with the measured profiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twinpool.bench.serving.record import Run
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.model_files import resolve
from twinpool.layout import Dtype
from twinpool.planner.accuracy.comparing import Compared, compare
from twinpool.planner.accuracy.folder import Facts, Folder
from twinpool.planner.accuracy.layouts import BLOCK_SIZE, LAYOUTS, Layout
from twinpool.planner.accuracy.loads import Load, make_loads
from twinpool.planner.profile.fitted_times import FittedTimes
from twinpool.planner.profile.saved import Profile
from twinpool.planner.simulator.driver import simulate


def loads_of(folder: Folder, facts: Facts) -> list[Load]:
    """The loads, as measured and as predicted. Raises ConfigError if there is no profile."""
    times = FittedTimes(folder.profile(LAYOUTS[0].threads(facts.num_cores)))
    return make_loads(times, facts.seconds, facts.seed)


def predict(load: Load, layout: Layout, profile: Profile, model_config: ModelConfig) -> Run:
    """One load on one simulated layout."""
    kv = model_config.kv_layout(BLOCK_SIZE, Dtype(profile.dtype))
    deployment = layout.deployment(FittedTimes(profile), kv, profile.max_model_len)
    return simulate(deployment, load.shapes).as_run()


def compare_all(folder: Folder, layouts: Sequence[Layout] = LAYOUTS) -> Iterator[Compared]:
    """Every load on every layout that the folder has a run of. Raises ConfigError if it lacks what they are made
    with."""
    facts = folder.facts()
    config = ModelConfig.from_dir(resolve(facts.asked, needs_weights=False).path)
    for layout in layouts:
        profile = folder.profile(layout.threads(facts.num_cores))
        for load in loads_of(folder, facts):
            if folder.has_run(layout.name, load.name):
                predicted = predict(load, layout, profile, config)
                measured = folder.run(layout.name, load.name)
                yield from compare(layout.name, load.name, load.slo, predicted, measured)
