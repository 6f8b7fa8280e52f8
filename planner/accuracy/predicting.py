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
from twinpool.planner.accuracy.loads import Load, Yardstick, make_loads
from twinpool.planner.profile.fitted_times import FittedTimes
from twinpool.planner.profile.saved import Profile
from twinpool.planner.profile.unsteady import UnsteadyTimes
from twinpool.planner.simulator.driver import simulate


def loads_of(facts: Facts) -> list[Load]:
    """The loads, as they were measured."""
    return make_loads(Yardstick(facts.prompt_token_s, facts.stream_token_s), facts.seconds, facts.seed)


def predict(load: Load, layout: Layout, profile: Profile, model_config: ModelConfig, seed: int) -> Run:
    """One load on one simulated layout, whose machine is as unsteady as it was when it was profiled."""
    kv = model_config.kv_layout(BLOCK_SIZE, Dtype(profile.dtype))
    times = UnsteadyTimes(FittedTimes(profile), seed)
    deployment = layout.deployment(times, kv, profile.max_model_len)
    return simulate(deployment, load.shapes).as_run()


def compare_all(folder: Folder, layouts: Sequence[Layout] = LAYOUTS) -> Iterator[Compared]:
    """Every load on every layout that the folder has runs of. Each is simulated as often as it was run, each time with
    another seed of the machine's unsteadiness. Raises ConfigError if the folder lacks what they are made with."""
    facts = folder.facts()
    config = ModelConfig.from_dir(resolve(facts.asked, needs_weights=False).path)
    for layout in layouts:
        profile = folder.profile(layout.threads(facts.num_cores))
        for load in loads_of(facts):
            if measured := folder.runs(layout.name, load.name):
                predicted = [predict(load, layout, profile, config, seed) for seed in range(len(measured))]
                yield from compare(layout.name, load.name, load.slo, predicted, measured)
