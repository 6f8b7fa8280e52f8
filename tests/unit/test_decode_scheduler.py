"""Continuous batching on the real scheduler: who joins, who leaves, who gives way."""

from __future__ import annotations

from support.jobs import EOS, GRAMMAR, job

from twinpool.decode_pool.scheduler import DecodeScheduler, num_kv_tokens, why_never_fits
from twinpool.engine.batch import SequenceSlice, StepOutput
from twinpool.engine.block_pool import BlockPool
from twinpool.engine.look_back import LookBack
from twinpool.engine.prefix_chain import PrefixChain
from twinpool.messages import Token
from twinpool.request import FinishReason, Job

SIZE = 4


class Bench:
    """A decode scheduler; `join` does what intake does."""

    def __init__(self, num_blocks: int = 100) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.scheduler = DecodeScheduler(self.pool)

    def join(self, work: Job, num_blocks: int | None = None) -> None:
        chain = PrefixChain(SIZE)
        chain.extend(work.token_ids)
        num_blocks = num_blocks or self.pool.blocks_for(len(work.token_ids))
        table = self.pool.try_reserve(num_blocks, chain.digests)
        assert table is not None
        self.scheduler.join(work, table, chain, 50)

    def step(self, token: int = 50) -> list[Token]:
        plan = self.scheduler.plan()
        tokens = [self.scheduler.complete(chunk, sampled(chunk, token)) for chunk in plan.slices]
        self.pool.check()
        return tokens

    def running(self) -> list[str]:
        return [sequence.key.request_id for sequence in self.scheduler]


def sampled(chunk: SequenceSlice, token: int) -> StepOutput:
    return StepOutput({chunk.key: token}, 0.0)


def test_every_sequence_gets_one_token_per_step_at_its_own_position() -> None:
    bench = Bench()
    bench.join(job("a", 5))
    bench.join(job("b", 9, first=5))
    for done in range(3):
        slices = bench.scheduler.plan().slices
        assert [(s.start, len(s.token_ids)) for s in slices] == [(5 + done, 1), (9 + done, 1)]
        tokens = [bench.scheduler.complete(chunk, sampled(chunk, 50 + done)) for chunk in slices]
        assert [token.index for token in tokens] == [done + 1] * 2


def test_sequences_leave_at_max_tokens_and_at_eos_and_their_blocks_come_back() -> None:
    bench = Bench()
    bench.join(job("short", 3, max_tokens=2))
    bench.join(job("long", 3, max_tokens=9, first=5))
    assert [token.finish for token in bench.step()] == [FinishReason.LENGTH, None]
    assert bench.running() == ["long"]
    assert [token.finish for token in bench.step(EOS)] == [FinishReason.STOP]
    assert bench.pool.num_owned == 0


def test_eos_is_banned_until_min_tokens() -> None:
    bench = Bench()
    bench.join(job("a", 3, min_tokens=3))
    banned = []
    for _ in range(3):
        banned.append(bench.scheduler.plan().slices[0].banned_token_ids)
        bench.step()
    assert banned == [(EOS,), (EOS,), ()]


def test_a_resumed_sequence_goes_on_counting_output_tokens() -> None:
    bench = Bench()
    bench.join(job("a", 3, max_tokens=6, num_emitted=3))
    assert [(t.index, t.finish) for t in bench.step()] == [(4, None)]
    assert [(t.index, t.finish) for t in bench.step()] == [(5, FinishReason.LENGTH)]


def test_a_sequence_gets_a_block_when_it_crosses_a_border_and_not_before() -> None:
    bench = Bench()
    bench.join(job("a", 3, max_tokens=20))
    owned = []
    for _ in range(6):
        bench.step()
        owned.append(bench.pool.num_owned)
    assert owned == [1, 2, 2, 2, 2, 3]


def test_without_a_block_the_youngest_gives_way_and_the_oldest_goes_on() -> None:
    bench = Bench(num_blocks=3)
    for number, name in enumerate(("old", "middle", "young")):
        bench.join(job(name, 4, max_tokens=20, first=100 * number))
    plan = bench.scheduler.plan()
    assert [key.request_id for key in plan.preempted] == ["young", "middle"]
    assert [chunk.key.request_id for chunk in plan.slices] == ["old"]
    assert bench.running() == ["old"]
    bench.pool.check()


def test_the_oldest_always_reaches_its_end() -> None:
    bench = Bench(num_blocks=6)
    bench.join(job("old", 4, max_tokens=20))
    bench.join(job("young", 4, max_tokens=20, first=100))
    finished = [token for _ in range(19) for token in bench.step() if token.finish]
    assert [token.key.request_id for token in finished] == ["old"]
    assert bench.pool.num_owned == 0


def test_others_are_asked_for_room_before_a_sequence_is_preempted() -> None:
    bench = Bench(num_blocks=3)
    bench.join(job("a", 4, max_tokens=9))
    bench.join(job("b", 4, max_tokens=9, first=100))
    reserve = bench.pool.try_reserve(1)
    assert reserve is not None
    held = [reserve]

    def make_room() -> bool:
        if held:
            bench.pool.release(held.pop())
            return True
        return False

    plan = bench.scheduler.plan(make_room)
    assert not held
    assert [key.request_id for key in plan.preempted] == ["b"]
    assert [chunk.key.request_id for chunk in plan.slices] == ["a"]


def test_the_last_sequence_waits_when_others_than_sequences_hold_the_blocks() -> None:
    bench = Bench(num_blocks=2)
    bench.join(job("a", 4))
    reserve = bench.pool.try_reserve(1)
    assert reserve is not None
    plan = bench.scheduler.plan()
    assert plan.is_starved
    assert plan.slices == plan.preempted == []
    bench.pool.release(reserve)
    assert len(bench.scheduler.plan().slices) == 1


def test_decoded_blocks_are_found_by_the_next_turn_of_the_chat() -> None:
    bench = Bench()
    bench.join(job("a", 6, max_tokens=8))
    for token in range(60, 67):
        bench.step(token)
    assert bench.pool.num_owned == 0
    follow_up = PrefixChain(SIZE)
    follow_up.extend([*range(1000, 1006), 50, *range(60, 67), 1, 2, 3])
    assert bench.pool.count_cached(follow_up.digests) == 3


def test_a_sequence_looks_back_with_one_object_of_its_own_or_the_one_that_its_prompt_had() -> None:
    bench = Bench()
    bench.join(work := job("a", 5, repetition_penalty=1.2))
    bench.join(job("plain", 3, first=5))
    seen = []
    for _ in range(3):
        slices = bench.scheduler.plan().slices
        seen.append([chunk.look_back for chunk in slices])
        for chunk in slices:
            bench.scheduler.complete(chunk, sampled(chunk, 50))
    assert [none for _, none in seen] == [None] * 3
    (look_back,) = {mine for mine, _ in seen}
    assert look_back is not None
    assert look_back.job is work
    told_by_prompt = LookBack(job("b", 4, grammar=GRAMMAR))
    table, chain = bench.pool.try_reserve(2), PrefixChain(SIZE)
    chain.extend(told_by_prompt.job.token_ids)
    assert table is not None
    bench.scheduler.join(told_by_prompt.job, table, chain, 50, told_by_prompt)
    assert bench.scheduler.plan().slices[-1].look_back is told_by_prompt


def test_2000_prompt_and_300_output_tokens_leave_2299_cached_positions() -> None:
    pool = BlockPool(200, 16)
    scheduler = DecodeScheduler(pool)
    work = job("a", 2000, max_tokens=300, first=10)
    assert num_kv_tokens(work) == 2299
    chain = PrefixChain(16)
    chain.extend(work.token_ids)
    table = pool.try_reserve(pool.blocks_for(2000))
    assert table is not None
    scheduler.join(work, table, chain, 50)
    ends = []
    for output in range(1, 300):
        (chunk,) = scheduler.plan().slices
        ends.append(chunk.end)
        scheduler.complete(chunk, sampled(chunk, EOS if output == 299 else 50))
    assert ends[-1] == 2299
    assert len(scheduler) == 0
    assert pool.num_cached == 2299 // 16


def test_why_a_job_never_fits_names_both_numbers() -> None:
    pool = BlockPool(10, SIZE)
    assert why_never_fits(job("a", 30, max_tokens=11), pool) is None
    assert why_never_fits(job("a", 30, max_tokens=12), pool) == (
        "prompt and output may need 11 KV blocks, the pool has 10"
    )
