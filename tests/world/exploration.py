"""Every state that a small cluster can reach, each visited once, and the shortest of the stories that break a rule.

python -m world.exploration --cancels 2 --kills 1      (or `make explore`)
"""

from __future__ import annotations

import argparse
import marshal
import time
from collections import deque
from dataclasses import dataclass, fields

from xxhash import xxh3_128_digest

from twinpool.errors import InvariantViolation
from world.exploration_cluster import Cluster, Move
from world.exploration_state import Broken, Cast, Faults, Size

_WRONG = (Broken, InvariantViolation, KeyError, AssertionError)


@dataclass(frozen=True, slots=True)
class Explored:
    """What a search has seen: states, moves between them, states in which only time could move."""

    num_states: int
    num_moves: int
    num_quiet: int
    is_exhausted: bool


class Found(AssertionError):
    """A rule fell. `story` are the moves from the start to there, as few as can be."""

    def __init__(self, fault: Exception, story: list[Move]) -> None:
        told = "\n".join(f"  {number:3} {' '.join(move)}" for number, move in enumerate(story, 1))
        super().__init__(f"{type(fault).__name__}: {fault}\nafter\n{told}")
        self.fault = fault
        self.story = story


def explore(first: Cluster, most_states: int | None = None) -> Explored:
    """Visits every state that can be reached from `first`, the nearest first, `most_states` at most.

    Raises:
        Found: a rule falls in one of them, or one comes to rest with something held.
    """
    parents: dict[bytes, tuple[bytes, Move]] = {_digest(first): (b"", ())}
    frontier = deque([first])
    num_moves = num_quiet = 0
    while frontier and (most_states is None or len(parents) < most_states):
        state = frontier.popleft()
        name = _digest(state)
        for move in state.moves():
            after = state.copy()
            try:
                after.make(move)
            except _WRONG as exc:
                raise Found(exc, [*_story(parents, name), move]) from exc
            num_moves += 1
            if (digest := _digest(after)) not in parents:
                parents[digest] = (name, move)
                frontier.append(after)
        if state.is_quiet:
            num_quiet += 1
            try:
                state.rest()
            except _WRONG as exc:
                raise Found(exc, [*_story(parents, name), ("rest",)]) from exc
    return Explored(len(parents), num_moves, num_quiet, not frontier)


def _digest(state: Cluster) -> bytes:
    return xxh3_128_digest(
        marshal.dumps(state.key(), 2)
    )  # version 2 looks at values alone, not at identities


def _story(parents: dict[bytes, tuple[bytes, Move]], name: bytes) -> list[Move]:
    story: list[Move] = []
    while (step := parents[name])[0]:
        name, move = step
        story.append(move)
    return story[::-1]


def main() -> None:
    """Explores the size and the faults that the arguments name, and prints how much there was."""
    parser = argparse.ArgumentParser(
        description="Visits every state of the ownership protocol on a small size."
    )
    default = Faults(cancels=1, kills=1)  # 237,000 states; each further fault multiplies them
    for one in fields(Faults):
        count = getattr(default, one.name)
        parser.add_argument(
            f"--{one.name}", type=int, default=count, metavar="N", help=f"in one run (default {count})"
        )
    parser.add_argument("--prompts", default="3,3", help="prompt tokens of each request (default 3,3)")
    parser.add_argument("--blocks", type=int, default=3, help="KV blocks of each worker (default 3)")
    args = parser.parse_args()
    size = Size(tuple(int(part) for part in args.prompts.split(",")), args.blocks)
    faults = Faults(**{one.name: getattr(args, one.name) for one in fields(Faults)})
    started = time.monotonic()
    seen = explore(Cluster.new(Cast(size), faults))
    with_faults = ", ".join(f"{getattr(faults, one.name)} {one.name}" for one in fields(Faults))
    took = f"in {time.monotonic() - started:.0f} s, with at most {with_faults} in one run"
    print(f"all {seen.num_states} states, {seen.num_moves} moves between them, {took}: no rule fell")


if __name__ == "__main__":
    main()
