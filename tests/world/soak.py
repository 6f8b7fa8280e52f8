"""Runs seeds until one fails: ``make soak`` with N=seeds or MINUTES=minutes; ``--seed S --story`` tells one run."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from world.runs import first_failure, story_of

BATCH = 100
REPORT_EVERY_S = 10.0


def main() -> int:
    """The command line. Returns 1 if a seed failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=None, metavar="N", help="run so many seeds")
    parser.add_argument(
        "--minutes", type=float, default=None, help="run for so long (default: 5, without --seeds)"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--seed", type=int, default=None, help="run this one seed")
    parser.add_argument("--story", action="store_true", help="with --seed: print everything that happens")
    args = parser.parse_args()
    if args.seed is not None:
        return _one(args.seed, args.story)
    minutes = 5.0 if args.minutes is None and args.seeds is None else args.minutes
    return _many(args.first, args.seeds, None if minutes is None else 60 * minutes)


def _one(seed: int, is_told: bool) -> int:
    if is_told:
        print("\n".join(story_of(seed).lines))
    failure = first_failure(seed, 1)
    print(failure or f"seed {seed} keeps every promise")
    return 1 if failure else 0


def _many(first: int, num_seeds: int | None, limit_s: float | None) -> int:
    started = told_at = time.monotonic()
    num_done = 0
    batches = _batches(first, num_seeds)
    with ProcessPoolExecutor() as pool:
        running: dict[Future[str | None], int] = {}
        while True:
            while len(running) < 2 * (os.cpu_count() or 1) and (batch := next(batches, None)) is not None:
                running[pool.submit(first_failure, *batch)] = batch[1]
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                num_done += running.pop(future)
                if (failure := future.result()) is not None:
                    pool.shutdown(cancel_futures=True)
                    print(failure)
                    return 1
            now = time.monotonic()
            if now - told_at > REPORT_EVERY_S:
                told_at = now
                print(f"{num_done} seeds, {num_done / (now - started):.0f} per second", flush=True)
            if limit_s is not None and now - started > limit_s:
                batches = iter(())
    print(f"{num_done} seeds from {first} on: every promise kept")
    return 0


def _batches(first: int, num_seeds: int | None) -> Iterator[tuple[int, int]]:
    """(first seed, how many), on and on without `num_seeds`."""
    done = 0
    while num_seeds is None or done < num_seeds:
        count = BATCH if num_seeds is None else min(BATCH, num_seeds - done)
        yield first + done, count
        done += count


if __name__ == "__main__":
    sys.exit(main())
