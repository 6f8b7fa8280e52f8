"""One seed is one exact run, in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from world.runs import RERUN, first_failure, story_of
from world.story import Broken
from world.wire import Receiver

SEEDS = (1, 2, 3, 5, 8, 13, 21, 34)
TELL = "from world.runs import story_of; print([story_of(seed).digest for seed in {seeds}])"


def test_a_seed_gives_the_same_story_in_every_process() -> None:
    here = [story_of(seed).digest for seed in SEEDS]
    assert len(set(here)) == len(SEEDS)
    assert here == [story_of(seed).digest for seed in SEEDS]
    for hash_seed in ("1", "2"):
        told = subprocess.run(
            [sys.executable, "-c", TELL.format(seeds=SEEDS)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert told.stdout.strip() == str(here)


def test_a_seed_that_fails_tells_its_story_and_how_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def land(*_: object) -> None:
        raise Broken("I2", "r0 is spoiled")

    monkeypatch.setattr(Receiver, "land", land)
    failure = first_failure(0, 20)
    assert failure is not None
    seed = int(failure.split()[1].strip(":"))
    assert "Broken: I2: r0 is spoiled" in failure
    assert "Arrived r0" in failure
    assert failure.endswith(RERUN.format(seed=seed))
