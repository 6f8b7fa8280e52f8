"""The measuring half: every load on every layout's real server, and profiles of this machine's workers.

A machine that others share is faster now and slower then. So nothing is measured in one piece: each load is sent twice,
in an order that a seed has shuffled, and between the loads the profiles go on for a moment. Runs and profiles have then
seen the same machine, as far as that is possible; how far two runs of the same requests are apart is told, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime

import msgspec
import tokenizers

from twinpool.bench.comparison.stand import Hardware, Stand
from twinpool.bench.serving.datasets import warm_up_requests
from twinpool.coordinator.launch import usable_cores
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.model_files import resolve
from twinpool.engine.processor import processor
from twinpool.engine.tokenizer import Tokenizer
from twinpool.planner.accuracy.folder import Facts, Folder
from twinpool.planner.accuracy.layouts import BLOCK_SIZE, KV_TOKENS, LAYOUTS, Layout
from twinpool.planner.accuracy.loads import Load, Yardstick, make_loads, planned
from twinpool.planner.profile.fitted_times import FittedTimes
from twinpool.planner.profile.measure import ProfileSettings, Profiling
from twinpool.planner.profile.served import prompts_as

REPETITIONS = 2
SLICE_S = 2.0
"""Of a profile, between two loads."""
_WARM_UPS = 3
Say = Callable[[str], None]


def measure_all(
    folder: Folder,
    asked: str | None,
    seconds: float,
    seed: int,
    command: str,
    say: Say,
    *,
    is_quick: bool = False,
    only: str = "",
) -> None:
    """Fills the folder; with `only` no more than the runs in whose "layout, load" that stands.

    Raises:
        ConfigError, ModelError, TransferError, ServerFault: as profiles and stands do.
    """
    folder.make()
    model = resolve(asked)
    tokenizer = Tokenizer.from_dir(model.path).backend
    tokenizer.no_truncation()
    tokenizer.no_padding()
    num_cores = len(usable_cores())
    with ExitStack() as stack:
        profilings = [
            stack.enter_context(
                Profiling(
                    ProfileSettings(
                        model.path, model.name, asked, tokenizer, threads=threads, is_quick=is_quick
                    ),
                    say,
                )
            )
            for threads in sorted({layout.threads(num_cores) for layout in LAYOUTS})
        ]
        for profiling in profilings:
            profiling.measure_each_once()
            profiling.measure_around()
        yardstick = Yardstick.of(FittedTimes(profilings[0].profile()))
        folder.save_facts(
            Facts(
                model=model.name, asked=asked, seconds=seconds, seed=seed, prompt_token_s=yardstick.prompt_token_s,
                stream_token_s=yardstick.stream_token_s, num_cores=num_cores, cpu=processor().name,
                started_at=datetime.now(UTC).isoformat(timespec="seconds"), command=command,
            )
        )  # fmt: skip
        loads = make_loads(yardstick, seconds, seed)
        max_model_len = ModelConfig.from_dir(model.path).max_positions
        hardware = Hardware(() if asked is None else (asked,), KV_TOKENS, BLOCK_SIZE)
        with Stand(hardware, folder.path) as stand:
            runs = [
                (layout, load)
                for layout in LAYOUTS
                for load in loads
                if only in f"{layout.name}, {load.name}"
            ]
            _measure_runs(folder, runs, tokenizer, max_model_len, stand, profilings, seed, say)


def _measure_runs(
    folder: Folder, runs: list[tuple[Layout, Load]], tokenizer: tokenizers.Tokenizer, max_model_len: int,
    stand: Stand, profilings: list[Profiling], seed: int, say: Say,
) -> None:  # fmt: skip
    arms = {layout.name: layout.arm(max_model_len) for layout, _ in runs}
    prompt_as = prompts_as(tokenizer)
    requests = {load.name: planned(load, tokenizer, prompt_as, seed) for _, load in runs}
    for arm in arms.values():
        say(f"starting {arm.name}")
        warm = warm_up_requests(next(iter(requests.values())), prompt_as, tokenizer, _WARM_UPS, seed)
        stand.load(arm, [msgspec.structs.replace(each, at_s=0.0) for each in warm], "warm-up")
    shuffle = random.Random(seed)
    for repetition in range(REPETITIONS):
        order = list(runs)
        shuffle.shuffle(order)
        for number, (layout, load) in enumerate(order):
            for profiling in profilings:
                profiling.measure_steps(SLICE_S / len(profilings))
            say(
                f"repetition {repetition + 1}, {number + 1} of {len(order)}: {layout.name}, {load.name}: "
                f"{len(load.shapes)} requests at {load.rate_per_s:.2f} per second"
            )
            slot = f"{load.name}-{repetition}".replace(", ", "-").replace(" ", "-")
            trial = stand.load(arms[layout.name], requests[load.name], slot)
            folder.save_run(layout.name, load.name, repetition, trial.run)
        for profiling in profilings:
            folder.save_profile(profiling.profile())
