"""Which prompts a prefill step computes, and how much of each."""

from __future__ import annotations

import pytest
from support.jobs import GRAMMAR, job, scores, told

from twinpool.config import SchedulerConfig
from twinpool.engine.batch import SequenceSlice
from twinpool.engine.block_pool import BlockPool
from twinpool.errors import InvariantViolation
from twinpool.prefill_pool.scheduler import PrefillScheduler, Prompt
from twinpool.request import Job

SIZE = 4


class Anybody:
    """Admits every prompt that fits."""

    def may_start(self, prompt: Prompt, num_blocks: int) -> bool:
        assert num_blocks >= 1
        return prompt.table is None

    def make_room(self, prompt: Prompt) -> bool:
        assert prompt.table is None
        return False


class Bench:
    """A scheduler with its pool, and the steps it has planned."""

    def __init__(self, num_blocks: int = 100, headroom_tokens: int = 0, **settings: float) -> None:
        config = SchedulerConfig(**settings)  # type: ignore[arg-type]
        self.pool = BlockPool(num_blocks, SIZE, config.prefix_cache)
        self.scheduler = PrefillScheduler(self.pool, config, headroom_tokens)

    def step(self, token_budget: int, now: float = 0.0) -> list[tuple[str, int, int]]:
        """Plans and completes one step: (name, start, end) of each chunk. Prompts that are done let go."""
        chunks = self.scheduler.plan(now, token_budget, Anybody())
        for chunk in chunks:
            prompt = self.scheduler.complete(chunk, scores(chunk))
            if prompt.is_done and prompt.table is not None:
                self.pool.release(prompt.table)
        self.pool.check()
        return [(chunk.key.request_id, chunk.start, chunk.end) for chunk in chunks]


def test_a_long_prompt_is_cut_at_the_token_budget_and_only_its_end_is_sampled() -> None:
    bench = Bench()
    bench.scheduler.add(job("a", 10), 0.0)
    plans: list[list[SequenceSlice]] = []
    while len(bench.scheduler):
        plans.append(bench.scheduler.plan(0.0, 4, Anybody()))
        bench.scheduler.complete(plans[-1][0])
    chunks = [plan[0] for plan in plans]
    assert [(c.start, c.end, c.sampling is not None) for c in chunks] == [
        (0, 4, False),
        (4, 8, False),
        (8, 10, True),
    ]
    assert [token for c in chunks for token in c.token_ids] == list(range(1000, 1010))


def test_several_prompts_share_a_step_shortest_first() -> None:
    bench = Bench()
    for name, length in (("long", 9), ("short", 2), ("middle", 5)):
        bench.scheduler.add(job(name, length, first=100 * length), 0.0)
    assert bench.step(10) == [("short", 0, 2), ("middle", 0, 5), ("long", 0, 3)]
    assert bench.step(10) == [("long", 3, 9)]


def test_a_short_prompt_goes_before_the_rest_of_a_long_one() -> None:
    bench = Bench()
    bench.scheduler.add(job("long", 12), 0.0)
    assert bench.step(4) == [("long", 0, 4)]
    bench.scheduler.add(job("short", 3, first=5), 0.1)
    assert bench.step(4, now=0.1) == [("short", 0, 3), ("long", 4, 5)]


def test_an_old_prompt_goes_before_shorter_ones_so_nothing_starves() -> None:
    bench = Bench(max_queue_age_s=2.0)
    bench.scheduler.add(job("long", 8), 0.0)
    now, rounds = 0.0, 0
    while "long" in {prompt.job.request_id for prompt in bench.scheduler}:
        bench.scheduler.add(job(f"short-{rounds}", 4, first=10_000 + 4 * rounds), now)
        bench.step(4, now)
        now, rounds = now + 0.5, rounds + 1
        assert rounds < 10
    assert now >= 2.0


def test_an_old_prompt_leaves_half_of_each_step_to_younger_ones_that_need_it() -> None:
    bench = Bench(max_queue_age_s=2.0)
    bench.scheduler.add(job("long", 100), 0.0)
    bench.scheduler.add(job("short", 6, first=5), 3.0)
    bench.scheduler.add(job("middle", 30, first=500), 3.0)
    assert bench.step(20, now=3.0) == [("long", 0, 10), ("short", 0, 6), ("middle", 0, 4)]
    assert bench.step(20, now=3.0) == [("long", 10, 20), ("middle", 4, 14)]
    assert bench.step(40, now=3.0) == [("long", 20, 44), ("middle", 14, 30)]
    assert bench.step(40, now=3.0) == [("long", 44, 84)]


def test_what_was_kept_for_one_that_cannot_start_is_used_by_the_old() -> None:
    bench = Bench(num_blocks=6, max_queue_age_s=2.0)
    bench.scheduler.add(job("long", 20), 0.0)
    bench.scheduler.add(job("big", 12, first=500), 3.0)
    assert bench.step(10, now=3.0) == [("long", 0, 10)]


def test_a_prompt_starts_with_all_its_blocks_or_waits() -> None:
    bench = Bench(num_blocks=4)
    bench.scheduler.add(job("first", 9), 0.0)
    assert bench.step(4) == [("first", 0, 4)]
    assert bench.pool.num_owned == 3
    bench.scheduler.add(job("second", 6, first=5), 0.0)
    assert bench.step(10) == [("first", 4, 9)]
    assert bench.step(10) == [("second", 0, 6)]


def test_nobody_starts_past_an_old_prompt_that_does_not_fit_yet() -> None:
    bench = Bench(num_blocks=4, max_queue_age_s=1.0)
    bench.scheduler.add(job("running", 8), 0.0)
    assert bench.step(1) == [("running", 0, 1)]
    bench.scheduler.add(job("big", 16, first=100), 0.0)
    bench.scheduler.add(job("small", 4, first=200), 1.5)
    assert bench.step(1, now=2.0) == [("running", 1, 2)]
    assert bench.step(100, now=2.0) == [("running", 2, 8)]
    assert bench.step(100, now=2.0) == [("big", 0, 16)]


def test_a_cached_prefix_is_not_computed_but_the_last_token_always_is() -> None:
    bench = Bench()
    bench.scheduler.add(job("cold", 8), 0.0)
    bench.step(100)
    prompt = bench.scheduler.add(job("same", 8), 0.0)
    assert bench.step(100) == [("same", 4, 8)]
    assert prompt.num_cached == 4
    bench.scheduler.add(job("longer", 11), 0.0)
    assert bench.step(100) == [("longer", 8, 11)]


def test_a_prompt_that_another_is_computing_waits_until_it_is_cached() -> None:
    bench = Bench()
    for name in ("first", "second", "third"):
        bench.scheduler.add(job(name, 200), 0.0)
    assert bench.step(128) == [("first", 0, 128)]
    assert bench.step(128) == [("first", 128, 200)]
    assert bench.step(128) == [("second", 196, 200), ("third", 196, 200)]


def test_who_shares_less_than_half_or_little_waits_for_nobody() -> None:
    bench = Bench()
    bench.scheduler.add(job("short", 60), 0.0)
    bench.scheduler.add(job("as short", 60), 0.0)
    bench.scheduler.add(job("long", 200), 0.0)
    assert [name for name, *_ in bench.step(1000)] == ["short", "as short", "long"]


def test_who_waits_for_a_prefix_starts_once_nobody_computes_it() -> None:
    bench = Bench()
    first = bench.scheduler.add(job("first", 200), 0.0)
    bench.scheduler.add(job("second", 200), 0.0)
    assert bench.step(64) == [("first", 0, 64)]
    assert bench.scheduler.withdraw(first.job.key) is first
    assert first.table is not None
    bench.pool.release(first.table)
    assert bench.step(500) == [("second", 64, 200)]


def test_an_old_prompt_waits_for_no_prefix_nor_does_any_without_a_cache() -> None:
    old = Bench(max_queue_age_s=1.0)
    old.scheduler.add(job("first", 200), 5.0)
    assert old.step(64, now=5.0) == [("first", 0, 64)]
    old.scheduler.add(job("second", 200), 0.0)
    assert [name for name, *_ in old.step(500, now=5.0)] == ["second", "first"]
    without = Bench(prefix_cache=False)
    for name in ("first", "second"):
        without.scheduler.add(job(name, 200), 0.0)
    assert [name for name, *_ in without.step(500)] == ["first", "second"]


def test_a_prompt_with_most_of_it_cached_counts_as_short() -> None:
    bench = Bench()
    bench.scheduler.add(job("cold", 12), 0.0)
    bench.step(100)
    bench.scheduler.add(job("fresh", 5, first=5), 0.0)
    bench.scheduler.add(job("warm", 14), 0.0)
    assert [name for name, *_ in bench.step(100)] == ["warm", "fresh"]


def test_headroom_is_reserved_but_no_more_than_may_be_generated() -> None:
    bench = Bench(headroom_tokens=8)
    bench.scheduler.add(job("chatty", 4, max_tokens=100), 0.0)
    bench.scheduler.plan(0.0, 1, Anybody())
    assert bench.pool.num_owned == 3
    bench.scheduler.add(job("brief", 3, max_tokens=2, first=5), 0.0)
    bench.scheduler.plan(0.0, 100, Anybody())
    assert bench.pool.num_owned == 4


def test_a_prompt_that_gave_up_its_blocks_starts_over() -> None:
    bench = Bench(num_blocks=4)
    bench.scheduler.add(job("a", 12), 0.0)
    bench.step(5)
    assert bench.scheduler.unstart_youngest()
    assert not bench.scheduler.unstart_youngest()
    assert bench.pool.num_owned == 0
    assert bench.step(100) == [("a", 4, 12)]


def test_a_prompt_whose_log_probabilities_are_asked_for_is_computed_whole_whatever_the_cache_holds() -> None:
    bench = Bench()
    bench.scheduler.add(job("cold", 8), 0.0)
    bench.step(100)
    prompt = bench.scheduler.add(job("scored", 8, prompt_logprobs=2), 0.0)
    assert prompt.num_left == 8
    assert bench.step(100) == [("scored", 0, 8)]
    assert prompt.num_cached == 0
    resumed = bench.scheduler.add(job("resumed", 8, num_emitted=3, prompt_logprobs=2), 0.0)
    assert bench.step(100) == [("resumed", 8, 11)]
    assert resumed.num_cached == 8
    assert resumed.scores == []


@pytest.mark.parametrize("budget", [1, 4, 5, 100])
def test_each_chunk_asks_for_the_tokens_that_follow_its_own_and_all_together_are_the_prompt(
    budget: int,
) -> None:
    bench = Bench()
    prompt = bench.scheduler.add(job("a", 10, prompt_logprobs=2), 0.0)
    followers: list[int] = []
    while len(bench.scheduler):
        (chunk,) = bench.scheduler.plan(0.0, budget, Anybody())
        if chunk.scoring:
            assert chunk.scoring.num_top == 2
            assert chunk.scoring.followers[0] == 1000 + chunk.start + 1
            followers += chunk.scoring.followers
        bench.scheduler.complete(chunk, scores(chunk))
    assert followers == list(range(1001, 1010))
    assert prompt.scores == [told(token, 2) for token in range(1001, 1010)]


def test_fewer_scores_than_were_asked_for_are_a_violation() -> None:
    bench = Bench()
    bench.scheduler.add(job("a", 6, prompt_logprobs=0), 0.0)
    (chunk,) = bench.scheduler.plan(0.0, 100, Anybody())
    with pytest.raises(InvariantViolation, match="5 scores and got 4"):
        bench.scheduler.complete(chunk, scores(chunk)[1:])


def test_a_prompt_that_gave_up_its_blocks_forgets_its_scores_and_keeps_what_it_looks_back_with() -> None:
    bench = Bench()
    prompt = bench.scheduler.add(job("a", 12, prompt_logprobs=0, grammar=GRAMMAR), 0.0)
    seen = []
    for _ in range(2):
        (chunk,) = bench.scheduler.plan(0.0, 5, Anybody())
        bench.scheduler.complete(chunk, scores(chunk))
        seen.append((chunk.start, chunk.look_back))
        assert len(prompt.scores) == 5
        assert bench.scheduler.unstart_youngest()
        assert prompt.scores == []
    assert seen == [(0, prompt.look_back)] * 2
    assert prompt.look_back is not None


def test_the_same_attempt_cannot_be_queued_twice() -> None:
    bench = Bench()
    once: Job = job("a", 3)
    bench.scheduler.add(once, 0.0)
    with pytest.raises(InvariantViolation, match="twice"):
        bench.scheduler.add(once, 0.0)
