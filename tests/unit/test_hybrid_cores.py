"""Hybrid workers: whole jobs beside what their role does, over one block pool and in one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.core_bench import LAYOUT, CoreBench
from support.jobs import done as ended
from support.jobs import job, messages, names

from twinpool.colocated_pool.hybrid import HybridCore, HybridDecodeCore, HybridPrefillCore
from twinpool.colocated_pool.step_times import StepTimes
from twinpool.config import Role, SchedulerConfig
from twinpool.engine.batch import StepOutput
from twinpool.messages import (
    Cancel,
    Dropped,
    Generate,
    Granted,
    Manifest,
    Prefill,
    PrefillReport,
    PushTo,
    Reserve,
    Seal,
    StepTokens,
)
from twinpool.metrics import WorkerMetric
from twinpool.request import Job
from twinpool.step_pace import LEAST_CHUNK_TOKENS, StepPace
from twinpool.worker.core import (
    StepDone,
    StepPlan,
    StepTimed,
    Tick,
    Verified,
)

PACE = StepPace(base_s=0.010, sequence_s=0.001, prompt_token_s=0.001)
PEERS = {Role.DECODE: ("prefill-0", "life-1"), Role.PREFILL: ("decode-0", "life-1")}
NUM_BLOCKS = 64


class Bench(CoreBench[HybridCore]):
    """A hybrid core with one linked peer, whose steps take what `PACE` says. Half its budget is 50.5 ms."""

    def __init__(self, role: Role, num_blocks: int = NUM_BLOCKS, **settings: float) -> None:
        config = SchedulerConfig(hybrid=True, itl_budget_ms=101.0, headroom_tokens=4, **settings)  # type: ignore[arg-type]
        core: HybridCore
        if role is Role.DECODE:
            core = HybridDecodeCore(num_blocks, LAYOUT, "model", config, "life-1")
        else:
            core = HybridPrefillCore(num_blocks, LAYOUT, "model", config)
        self.peer = PEERS[role]
        super().__init__(core, self.peer)
        for num_sequences, num_tokens in ((1, 0), (5, 0), (0, 20), (0, 60)):
            seconds = PACE.prompt_s(num_tokens, num_sequences, num_tokens) if num_tokens else 0.0
            self.handle(StepTimed(num_sequences, num_tokens, seconds or PACE.decode_step_s(num_sequences)))

    def plan_and_end(self) -> StepPlan:
        """A step runs; returns what it was."""
        plan = self.plan()
        self.handle(done(plan))
        return plan

    def step(self) -> list[object]:
        return messages(self.handle(done(self.plan())))

    def join(self, work: Job) -> None:
        """At decode: a stream whose prompt another worker has computed."""
        (granted,) = messages(self.tell(Reserve(work, *self.peer)))
        assert isinstance(granted, Granted)
        sent = granted.block_ids[granted.num_cached_blocks :]
        manifest = Manifest(
            work.key, granted.fence, "model", LAYOUT, len(work.token_ids), sent, (1,) * len(sent), 50, 64, 0.1
        )
        self.hear(Seal(manifest))
        self.handle(Verified(granted.fence, 0.0))


@pytest.fixture
def decode() -> Iterator[Bench]:
    bench = Bench(Role.DECODE)
    yield bench
    bench.assert_empty()


@pytest.fixture
def prefill() -> Iterator[Bench]:
    bench = Bench(Role.PREFILL)
    yield bench
    bench.assert_empty()


def done(plan: StepPlan) -> StepDone:
    """The plan has run, for as long as `PACE` says."""
    num_sequences = sum(len(chunk.token_ids) == 1 for chunk in plan.batch.slices)
    seconds = PACE.decode_step_s(num_sequences) + PACE.prompt_token_s * (
        plan.batch.num_tokens - num_sequences
    )
    return StepDone(plan, replace(ended(plan).output, seconds=seconds))


def shape(plan: StepPlan) -> list[tuple[str, int]]:
    """Whose slices, and how many tokens each."""
    return [(chunk.key.request_id, len(chunk.token_ids)) for chunk in plan.batch.slices]


def finish(bench: Bench) -> None:
    """Steps until nothing is left to run."""
    while (plan := bench.core.next_step(bench.now)) is not None:
        bench.handle(done(plan))


# ── what is measured ────────────────────────────────────────────────────────────────────────────────────────


def test_step_times_are_a_straight_line_through_what_was_measured() -> None:
    times = StepTimes()
    assert times.pace is None
    for num_sequences in (1, 2, 8):
        times.observe(num_sequences, 0, 0.010 + 0.002 * num_sequences)
    assert times.pace is None, "nothing is known of prompts"
    times.observe(4, 50, 0.010 + 0.008 + 0.050)
    times.observe(0, 5, 9.9)
    pace = times.pace
    assert pace is not None
    assert pace.base_s == pytest.approx(0.010)
    assert pace.sequence_s == pytest.approx(0.002)
    assert pace.prompt_token_s == pytest.approx(0.001)


@example([0.05, 0.009, 0.05, 0.48, 0.1, 0.02])
@given(st.lists(st.floats(1e-4, 1.0), min_size=6, max_size=6))
def test_whatever_steps_took_their_pace_can_be_told(took: list[float]) -> None:
    times = StepTimes()
    sizes = [(0, 64), (1, 0), (8, 0), (24, 0), (3, 64), (0, 16)]
    for (num_sequences, num_prompt_tokens), seconds in zip(sizes, took, strict=True):
        times.observe(num_sequences, num_prompt_tokens, seconds)
    assert times.pace is not None
    assert msgspec.convert(msgspec.to_builtins(times.pace), StepPace) == times.pace


def test_chunks_fit_into_what_streams_leave_of_the_limit_and_grow_only_near_what_was_measured() -> None:
    times = StepTimes()
    assert times.prompt_tokens_within(0.050, 3) == LEAST_CHUNK_TOKENS, "to learn something"
    times.observe(1, 0, 0.011)
    times.observe(5, 0, 0.015)
    times.observe(0, 30, 0.040)
    assert times.prompt_tokens_within(0.0501, 4) == 36
    assert times.prompt_tokens_within(0.0501, 24) == LEAST_CHUNK_TOKENS
    assert times.prompt_tokens_within(0.0501, 25) == 0, "too few to be worth a step"
    assert times.prompt_tokens_within(9.9, 0) == 60


def test_where_steps_often_take_longer_than_predicted_chunks_are_smaller() -> None:
    times = StepTimes()
    times.observe(1, 0, 0.011)
    times.observe(5, 0, 0.015)
    for _ in range(20):
        times.observe(0, 40, 0.050)
    assert times.prompt_tokens_within(0.0505, 0) == 40
    for _ in range(4):
        times.observe(0, 40, 0.100)
    assert times.prompt_tokens_within(0.0505, 0) < 25


# ── a decode worker that prefills ───────────────────────────────────────────────────────────────────────────


def test_a_local_prompt_is_computed_in_what_streams_leave_of_half_the_budget(decode: Bench) -> None:
    for name in ("s0", "s1"):
        decode.join(job(name, 6, max_tokens=6))
    decode.tell(Generate(job("local", 50, max_tokens=3, first=2000)))
    plan = decode.plan()
    assert shape(plan) == [("s0", 1), ("s1", 1), ("local", 38)], "10 + 2 × 1 + 38 ms"
    (tokens,) = messages(decode.handle(done(plan)))
    assert isinstance(tokens, StepTokens)
    assert [token.key.request_id for token in tokens.tokens] == ["s0", "s1"]
    report, tokens = decode.step()
    assert isinstance(report, PrefillReport)
    assert isinstance(tokens, StepTokens)
    assert {token.key.request_id for token in tokens.tokens} == {"s0", "s1", "local"}
    assert names(decode.plan_and_end()) == ["s0", "s1", "local"]
    finish(decode)
    counters = decode.core.counters
    assert counters[WorkerMetric.HYBRID_PROMPT_TOKENS] == 50
    assert counters[WorkerMetric.DECODE_POOL_PROMPT_TOKENS] == 0


def test_a_local_prompt_that_streams_leave_no_time_for_is_sent_back(decode: Bench) -> None:
    for i in range(30):
        decode.join(job(f"s{i}", 2, max_tokens=3, first=100 * i))
    work = job("local", 20, first=5000)
    decode.tell(Generate(work))
    assert "local" not in names(decode.plan_and_end())
    decode.now = SchedulerConfig().max_queue_age_s
    (dropped,) = messages(decode.handle(Tick()))
    assert dropped == Dropped(work.key, "no_room", "no room for it beside others for 2 s")
    finish(decode)


def test_local_prompts_take_no_slot_or_block_that_a_reservation_waits_for() -> None:
    bench = Bench(Role.DECODE, num_blocks=12)
    bench.join(job("s", 14, max_tokens=20))
    assert bench.tell(Reserve(job("waits", 30, max_tokens=2, first=3000), *bench.peer)) == []
    bench.tell(Generate(job("local", 16, max_tokens=1, first=5000)))
    assert names(bench.plan_and_end()) == ["s"]
    bench.tell(Cancel(job("waits", 30).key))
    assert names(bench.plan_and_end()) == ["s", "local"]
    finish(bench)
    bench.assert_empty()


def test_a_running_stream_takes_blocks_of_local_prompts_before_anybody_is_preempted() -> None:
    bench = Bench(Role.DECODE, num_blocks=8)
    bench.join(job("s", 8, max_tokens=20))
    bench.tell(Generate(job("local", 16, max_tokens=1, first=5000)))
    bench.core.times.observe(1, 100, 9.0)  # from now on a prompt gets no time
    for _ in range(16):
        bench.handle(done(bench.plan()))
    assert bench.core.counters[WorkerMetric.PREEMPTIONS] == 0
    bench.tell(Cancel(job("local", 16).key))
    finish(bench)
    bench.assert_empty()


def test_cancel_of_a_local_prompt_frees_it_before_during_and_after_its_steps(decode: Bench) -> None:
    work = job("local", 60, max_tokens=4)
    for num_steps in range(4):
        for is_running in (False, True):
            decode.tell(Generate(work))
            for _ in range(num_steps):
                decode.step()
            if is_running:
                plan = decode.plan()
                assert decode.tell(Cancel(work.key)) == []
                assert Dropped(work.key, "cancelled") in messages(decode.handle(done(plan)))
            else:
                assert messages(decode.tell(Cancel(work.key))) == [Dropped(work.key, "cancelled")]
            assert decode.core.pool.num_owned == 0


def test_steps_are_planned_ahead_only_while_no_local_prompt_waits(decode: Bench) -> None:
    decode.join(job("s", 6, max_tokens=8))
    plan = decode.plan()
    ahead = decode.core.plan_ahead()
    assert ahead is not None
    output = StepOutput({chunk.key: 50 for chunk in plan.batch.slices}, 0.01)
    following = ahead.resolve(plan, output)
    assert following is not None
    decode.tell(Generate(job("local", 20, max_tokens=2, first=5000)))
    assert decode.core.plan_ahead() is None
    decode.handle(StepDone(plan, output, following))
    assert decode.core.plan_ahead() is None
    decode.handle(done(following))
    assert names(decode.plan_and_end()) == ["s", "local"]
    finish(decode)


# ── a prefill worker that generates ─────────────────────────────────────────────────────────────────────────


def test_prompts_to_hand_off_get_small_chunks_while_streams_run_here_and_whole_ones_else(
    prefill: Bench,
) -> None:
    prefill.tell(Generate(job("stream", 30, max_tokens=4)))
    assert shape(prefill.plan_and_end()) == [("stream", 30)]
    handed = job("handed", 90, first=5000, max_tokens=1)
    prefill.tell(Prefill(handed, "decode-0"))
    assert shape(prefill.plan_and_end()) == [("stream", 1), ("handed", 39)], "10 + 1 + 39 ms"
    prefill.step()
    prefill.step()
    assert prefill.core.counters[WorkerMetric.HYBRID_OUTPUT_TOKENS] == 3
    prefill.tell(Prefill(job("alone", 100, first=9000, max_tokens=1), "decode-0"))
    assert shape(prefill.plan_and_end()) == [("alone", 100)]


def test_one_message_carries_the_tokens_of_both_sides(prefill: Bench) -> None:
    prefill.tell(Generate(job("stream", 20, max_tokens=2)))
    prefill.step()
    prefill.tell(Prefill(job("handed", 20, first=5000, max_tokens=1), "decode-0"))
    sent = prefill.step()
    (tokens,) = [message for message in sent if isinstance(message, StepTokens)]
    assert sent[-1] is tokens
    assert sorted(token.key.request_id for token in tokens.tokens) == ["handed", "stream"]


def test_the_side_whose_prompt_came_first_has_the_first_claim(prefill: Bench) -> None:
    prefill.tell(Generate(job("stream", 20, max_tokens=9)))
    prefill.step()
    prefill.tell(Prefill(job("handed", 60, first=5000, max_tokens=1), "decode-0"))
    prefill.now = 0.1
    prefill.tell(Generate(job("local", 30, first=7000, max_tokens=1)))
    assert shape(prefill.plan_and_end()) == [("stream", 1), ("handed", 39)]
    assert names(prefill.plan_and_end()) == ["stream", "local", "handed"]
    finish(prefill)


def test_a_granted_prompt_without_room_is_not_passed_by_whole_jobs() -> None:
    bench = Bench(Role.PREFILL, num_blocks=16)
    bench.tell(Generate(job("stream", 20, max_tokens=12)))
    bench.step()
    large = job("large", 50, first=5000, max_tokens=2)
    bench.tell(Prefill(large, "decode-0"))
    bench.tell(PushTo(large.key, *bench.peer, 7, tuple(range(13)), 0))
    bench.step()
    bench.tell(Generate(job("small", 4, first=8000, max_tokens=1)))
    assert names(bench.plan_and_end()) == ["stream"]


def test_words_for_the_wrong_side_are_junk(prefill: Bench, decode: Bench) -> None:
    work = job("a", 20, max_tokens=1)
    for bench, other in ((prefill, Prefill(work, "decode-0")), (decode, Reserve(work, *decode.peer))):
        bench.tell(Generate(work))
        assert bench.tell(other) == []
        assert bench.core.counters[WorkerMetric.JUNK_MESSAGES] == 1
        finish(bench)
