"""Runs seeds. A seed that breaks a promise is run again, to tell its story."""

from __future__ import annotations

import re

from world.scenario import draw
from world.story import Story
from world.world import World

RERUN = "PYTHONPATH=src:tests .venv/bin/python -m world.soak --seed {seed} --story"
_REQUEST_ID = re.compile(r"\br\d+\b")


def run_seed(seed: int, story: Story | None = None) -> None:
    """One exact run. Raises Broken, or whatever else went wrong."""
    World(draw(seed), story).run()


def story_of(seed: int) -> Story:
    """The told story of a seed, up to where it breaks if it does."""
    story = Story(is_told=True)
    try:
        run_seed(seed, story)
    except Exception as exc:  # noqa: BLE001  # whatever it is, it is the end of this story
        story.lines.append(f"{type(exc).__name__}: {exc}")
    return story


def first_failure(first: int, count: int) -> str | None:
    """Runs seeds one after the other. Returns what to print of the first that fails: the error, how it came to it, and
    how to see it again."""
    for seed in range(first, first + count):
        try:
            run_seed(seed)
        except Exception as exc:  # noqa: BLE001  # every error fails the seed
            found = _REQUEST_ID.search(str(exc))
            lines = "\n".join(story_of(seed).ending(found.group() if found else None))
            rerun = RERUN.format(seed=seed)
            return f"seed {seed}: {type(exc).__name__}: {exc}\n{lines}\nrun it again: {rerun}"
    return None
