"""The measuring half: profiles of this machine's workers, then every load on every layout's real server."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec
import tokenizers

from twinpool.bench.arrivals import constant_gap, offsets
from twinpool.bench.comparison.stand import Hardware, Stand
from twinpool.bench.serving.datasets import warm_up_requests
from twinpool.bench.serving.datasets.settings import PromptAs
from twinpool.coordinator.launch import usable_cores
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.model_files import resolve
from twinpool.engine.processor import processor
from twinpool.engine.tokenizer import Tokenizer
from twinpool.planner.accuracy.folder import Facts, Folder
from twinpool.planner.accuracy.layouts import BLOCK_SIZE, KV_TOKENS, LAYOUTS, Layout
from twinpool.planner.accuracy.loads import Load, planned
from twinpool.planner.accuracy.predicting import loads_of
from twinpool.planner.profile.measure import ProfileSettings, measure

_WARM_UPS = 4
Say = Callable[[str], None]


def measure_all(
    folder: Folder, asked: str | None, seconds: float, seed: int, command: str,
    say: Say, *, is_quick: bool = False, layouts: Sequence[Layout] = LAYOUTS,
) -> None:  # fmt: skip
    """Fills the folder; profiles and runs that are there already stay, so an interrupted run goes on.

    Raises:
        ConfigError, ModelError, TransferError, ServerFault: as profiles and stands do.
    """
    folder.make()
    model = resolve(asked)
    tokenizer = Tokenizer.from_dir(model.path).backend
    tokenizer.no_truncation()
    tokenizer.no_padding()
    num_cores = len(usable_cores())
    facts = Facts(
        model=model.name, asked=asked, seconds=seconds, seed=seed, num_cores=num_cores, cpu=processor().name,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"), command=command,
    )  # fmt: skip
    folder.save_facts(facts)
    for threads in sorted({layout.threads(num_cores) for layout in LAYOUTS}):
        if not folder.has_profile(threads):
            say(f"profile of a worker with {threads} thread{'' if threads == 1 else 's'}")
            settings = ProfileSettings(
                model.path, model.name, asked, tokenizer, threads=threads, is_quick=is_quick
            )
            folder.save_profile(measure(settings, say))
    max_model_len = ModelConfig.from_dir(model.path).max_positions
    common = () if asked is None else (asked,)
    with Stand(Hardware(common, KV_TOKENS, BLOCK_SIZE), folder.path) as stand:
        for layout in layouts:
            _measure_layout(
                folder, layout, loads_of(folder, facts), tokenizer, max_model_len, stand, seed, say
            )


def _measure_layout(
    folder: Folder, layout: Layout, loads: Sequence[Load], tokenizer: tokenizers.Tokenizer, max_model_len: int,
    stand: Stand, seed: int, say: Say,
) -> None:  # fmt: skip
    arm = layout.arm(max_model_len)
    missing = [load for load in loads if not folder.has_run(layout.name, load.name)]
    for number, load in enumerate(missing):
        requests = planned(load, tokenizer, seed)
        if not number:
            warm = warm_up_requests(requests, PromptAs.TEXT, tokenizer, _WARM_UPS, seed)
            at_s = offsets(constant_gap, [1.0] * len(warm), random.Random(seed))
            timed = [
                msgspec.structs.replace(request, at_s=at) for request, at in zip(warm, at_s, strict=True)
            ]
            stand.load(arm, timed, "warm-up")
        say(f"{layout.name}, {load.name}: {len(requests)} requests at {load.rate_per_s:.2f} per second")
        trial = stand.load(arm, requests, load.name.replace(", ", "-").replace(" ", "-"))
        folder.save_run(layout.name, load.name, trial.run)
    stand.stop([arm.name])
