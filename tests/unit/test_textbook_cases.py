"""Cases whose answers stand in textbooks, on the real schedulers and layouts."""

from __future__ import annotations

import pytest
from support.jobs import done, job, messages

from twinpool.colocated_pool.core import ColocatedCore
from twinpool.config import SchedulerConfig
from twinpool.layout import Dtype, KVLayout
from twinpool.messages import Generate, StepTokens
from twinpool.worker.core import FromCoordinator

LLAMA_8B = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype=Dtype.BFLOAT16)
NEEDS = {"A": 6, "B": 3, "C": 8, "D": 4}
NUM_SLOTS = 3
MIB = 1 << 20


def run_continuously(arrivals: dict[int, list[str]]) -> dict[str, int]:
    """The iteration in which each sequence ends, on a colocated core with three slots."""
    core = ColocatedCore(64, LLAMA_8B, SchedulerConfig(max_num_seqs=NUM_SLOTS))
    ended: dict[str, int] = {}
    iteration = 0
    while len(ended) < len(NEEDS):
        iteration += 1
        for name in arrivals.get(iteration, []):
            work = job(name, 1, max_tokens=NEEDS[name], first=ord(name))
            core.handle(FromCoordinator(Generate(work)), 0.0)
        plan = core.next_step(0.0)
        assert plan is not None
        assert len(plan.batch.slices) <= NUM_SLOTS
        for message in messages(core.handle(done(plan), 0.0)):
            if isinstance(message, StepTokens):
                ended |= {t.key.request_id: iteration for t in message.tokens if t.finish}
    core.check()
    assert core.pool.num_owned == 0
    return ended


def test_a_sequence_that_arrives_later_takes_the_first_slot_that_comes_free() -> None:
    assert run_continuously({1: ["A", "B", "C"], 2: ["D"]}) == {"B": 3, "A": 6, "D": 7, "C": 8}


def test_static_batching_would_make_it_wait_for_the_longest() -> None:
    first_batch_ends = max(NEEDS[name] for name in "ABC")
    assert first_batch_ends + NEEDS["D"] == 12
    assert run_continuously({1: ["A", "B", "C"], 2: ["D"]})["D"] == 7


def test_kv_of_a_token_of_a_sequence_and_of_twenty() -> None:
    assert LLAMA_8B.token_bytes == 128 * 1024
    assert LLAMA_8B.num_blocks(4096) * LLAMA_8B.block_bytes == 512 * MIB
    assert 20 * LLAMA_8B.num_blocks(4096) * LLAMA_8B.block_bytes == 10 * 1024 * MIB


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (16, 1), (17, 2), (2299, 144), (2300, 144)])
def test_blocks_that_a_sequence_takes(num_tokens: int, num_blocks: int) -> None:
    assert LLAMA_8B.num_blocks(num_tokens) == num_blocks


def test_2300_tokens_take_288_mib() -> None:
    assert LLAMA_8B.num_blocks(2300) * LLAMA_8B.block_bytes == 288 * MIB


def test_twenty_sequences_of_4096_tokens_fill_the_pool_that_was_made_for_them() -> None:
    num_blocks = 20 * LLAMA_8B.num_blocks(4096)
    core = ColocatedCore(num_blocks, LLAMA_8B, SchedulerConfig(token_budget=1 << 17, headroom_tokens=0))
    for number in range(21):
        work = job(f"sequence-{number}", 4096, max_tokens=1, first=5000 * number)
        core.handle(FromCoordinator(Generate(work)), 0.0)
    plan = core.next_step(0.0)
    assert plan is not None
    assert len(plan.batch.slices) == 20
    assert core.pool.num_free == 0
    core.handle(done(plan), 0.0)
    last = core.next_step(0.0)
    assert last is not None
    assert [chunk.key.request_id for chunk in last.batch.slices] == ["sequence-20"]
