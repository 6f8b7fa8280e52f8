"""Which workers a request goes to, and why."""

from __future__ import annotations

import os
import subprocess
import sys
from random import Random

import pytest
from support.coordinator_core import CoreDriver

from twinpool.config import CoordinatorConfig, Role
from twinpool.coordinator.events import Shutdown
from twinpool.coordinator.routing import CHUNK_TOKENS, MAX_CHUNKS, PrefixIndex, prefix_chain
from twinpool.coordinator.state import QUIET_HEARTBEATS
from twinpool.messages import PrefillReport
from twinpool.metrics import CoordinatorMetric
from twinpool.request import FinishReason, RequestKey


@pytest.fixture
def driver() -> CoreDriver:
    driver = CoreDriver()
    for i in range(2):
        driver.join(f"P{i}", Role.PREFILL)
        driver.join(f"D{i}", Role.DECODE)
    for i in range(2):
        for j in range(2):
            driver.link(f"P{i}", f"D{j}")
    return driver


def route(driver: CoreDriver, request_id: str) -> tuple[str, str]:
    timeline = driver.core.timeline(request_id)
    assert timeline is not None
    attempt = timeline.attempts[-1]
    return attempt.prefill_worker, attempt.decode_worker


def test_requests_spread_over_idle_workers(driver: CoreDriver) -> None:
    for i in range(4):
        driver.submit(f"r{i}", num_prompt=20, first=1000 * i)
    assert [route(driver, f"r{i}") for i in range(4)] == [
        ("P0", "D0"),
        ("P1", "D1"),
        ("P0", "D0"),
        ("P1", "D1"),
    ]


def test_sequences_spread_over_colocated_workers_after_their_prompts_too() -> None:
    driver = CoreDriver()
    driver.join("K0", Role.COLOCATED)
    driver.join("K1", Role.COLOCATED)
    for i in range(6):
        driver.submit(f"r{i}", num_prompt=20, first=1000 * i)
        driver.token(route(driver, f"r{i}")[0], 0, request_id=f"r{i}")
    assert [route(driver, f"r{i}")[0] for i in range(6)] == ["K0", "K1", "K0", "K1", "K0", "K1"]


def test_a_short_prompt_does_not_wait_behind_a_long_one(driver: CoreDriver) -> None:
    driver.submit("long", num_prompt=400, first=1000)
    driver.submit("a", num_prompt=20, first=2000)
    driver.submit("b", num_prompt=20, first=3000)
    assert [route(driver, r)[0] for r in ("long", "a", "b")] == ["P0", "P1", "P1"]


def test_a_prompt_goes_where_its_prefix_was_computed(driver: CoreDriver) -> None:
    driver.submit("first", num_prompt=200)
    driver.submit("filler", num_prompt=100, first=5000)
    driver.token("P0", 0, FinishReason.STOP, request_id="first")
    driver.token("P1", 0, FinishReason.STOP, request_id="filler")
    driver.answer_cancels()
    for i in range(3):
        driver.submit(f"again-{i}", num_prompt=200)
    # Each again costs 8 tokens at P0 (3 of 3 whole chunks are there) and 200 at P1.
    assert {route(driver, f"again-{i}")[0] for i in range(3)} == {"P0"}
    timeline = driver.core.timeline("again-0")
    assert timeline is not None
    candidates = {c.worker_id: (c.cost, c.num_matched_tokens) for c in timeline.attempts[0].candidates}
    assert [candidates[p] for p in ("P0", "P1")] == [(8, 192), (200, 0)]


def test_a_long_queue_outweighs_the_prefix(driver: CoreDriver) -> None:
    driver.submit("first", num_prompt=130)
    driver.token("P0", 0, FinishReason.STOP, request_id="first")
    driver.answer_cancels()
    driver.submit("other", num_prompt=150, first=5000)
    driver.submit("long", num_prompt=200, first=6000)
    assert (route(driver, "other")[0], route(driver, "long")[0]) == ("P0", "P1")
    driver.submit("again", num_prompt=130)
    assert route(driver, "again")[0] == "P0"  # 150 + 2 against 200 + 130
    driver.token("P1", 0, FinishReason.STOP, request_id="long")
    driver.answer_cancels()
    driver.submit("once more", num_prompt=130, max_tokens=1)
    assert route(driver, "once more")[0] == "P1"  # 152 + 2 against 130


def test_no_more_prompts_wait_at_a_worker_than_a_step_or_half_a_second_takes() -> None:
    """The rest waits in the queue, where `max_wait_s`, order and deadlines still count."""
    driver = CoreDriver()
    driver.join("P", Role.PREFILL)
    driver.join("D", Role.DECODE, max_num_seqs=64)
    driver.link("P", "D")
    for i in range(20):
        driver.submit(f"r{i}", num_prompt=100, first=1000 * i)
    assert len(driver.core.queue) == 20 - 3, "nothing is measured: behind 256 tokens nothing more goes there"
    driver.report(
        request_id="r0"
    )  # 10 tokens in 0.2 s: half a second is 25 tokens, and a step is allowed still
    assert len(driver.core.queue) == 20 - 4
    for i in range(1, 4):
        driver.say("P", PrefillReport(RequestKey(f"r{i}", 1), 0.1, 0.02, 0, 100, 1))
    # Now 310 tokens in 0.26 s: half a second is 596 tokens.
    pending = driver.core.registry.least_pending_tokens()
    assert (pending, len(driver.core.queue)) == (600, 10)


def test_a_short_prompt_goes_to_the_only_worker_though_a_long_one_is_under_way_there() -> None:
    """The worker computes the shortest first: what waits behind a prompt is none of its wait."""
    driver = CoreDriver()
    for worker_id, role in (("P", Role.PREFILL), ("D", Role.DECODE)):
        driver.join(worker_id, role, num_blocks=4096, max_model_len=65536)
    driver.link("P", "D")
    driver.submit("long", num_prompt=8000)
    driver.submit("short", num_prompt=40, first=10_000)
    driver.submit("as long", num_prompt=8000, first=20_000)
    assert [driver.state(name) for name in ("long", "short", "as long")] == [
        "prefilling",
        "prefilling",
        "queued",
    ]


def test_another_salt_shares_no_prefix() -> None:
    assert prefix_chain(range(200), "") != prefix_chain(range(200), "tenant")


def test_decode_goes_to_the_least_loaded_by_sequences_and_by_slots(driver: CoreDriver) -> None:
    driver.submit("big", num_prompt=448, first=1000)
    driver.submit("a", num_prompt=20, first=2000)
    # One more would be the second of 4 sequences on both, but slot 532 of 1024 on D0 and 104 on D1.
    driver.submit("b", num_prompt=20, first=3000)
    # D0: 532 of 1024 slots. D1: the third of 4 sequences.
    driver.submit("c", num_prompt=20, first=4000)
    assert [route(driver, r)[1] for r in ("big", "a", "b", "c")] == ["D0", "D1", "D1", "D0"]


def test_only_linked_pairs_are_used() -> None:
    driver = CoreDriver()
    for worker_id, role in (
        ("P0", Role.PREFILL),
        ("P1", Role.PREFILL),
        ("D0", Role.DECODE),
        ("D1", Role.DECODE),
    ):
        driver.join(worker_id, role)
    driver.link("P1", "D1")
    for i in range(3):
        driver.submit(f"r{i}", first=1000 * i)
    assert {route(driver, f"r{i}") for i in range(3)} == {("P1", "D1")}
    driver.do(Shutdown())
    driver.answer_cancels()
    driver.assert_empty()


def test_a_worker_that_has_gone_quiet_gets_nothing_new_until_it_is_heard_of(driver: CoreDriver) -> None:
    driver.now += QUIET_HEARTBEATS * CoordinatorConfig().heartbeat_s + 0.01
    driver.heartbeat("P1", "D1")
    driver.submit("r0", first=1000)
    driver.submit("r1", first=2000)
    assert [route(driver, r) for r in ("r0", "r1")] == [("P1", "D1"), ("P1", "D1")]
    driver.heartbeat("P0", "D0")
    driver.submit("r2", first=3000)
    assert route(driver, "r2") == ("P0", "D0")


def test_a_slow_link_is_used_counted_and_reported_with_both_rates() -> None:
    driver = CoreDriver()
    driver.join("P", Role.PREFILL)
    driver.join("D", Role.DECODE)
    driver.link("P", "D", gb_per_s=0.02)
    assert driver.core.tally.count(CoordinatorMetric.SLOW_LINKS) == 1
    (note,) = [note for note in driver.notes if note.is_fault]
    assert "0.020 GB/s, wanted 0.1" in note.text
    driver.submit("r0")
    assert route(driver, "r0") == ("P", "D")


def test_a_worker_too_small_for_a_request_does_not_get_it() -> None:
    driver = CoreDriver()
    driver.join("P", Role.PREFILL)
    driver.join("D0", Role.DECODE, num_blocks=4)
    driver.join("D1", Role.DECODE)
    driver.link("P", "D0")
    driver.link("P", "D1")
    driver.submit("small", num_prompt=60, max_tokens=5)
    driver.submit("large", num_prompt=60, max_tokens=6)
    assert route(driver, "large")[1] == "D1"


def test_prefix_hashes_do_not_depend_on_the_process() -> None:
    script = "from twinpool.coordinator.routing import prefix_chain; print(prefix_chain(range(130), 'salt'))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{prefix_chain(range(130), 'salt')}\n"}


def test_a_chain_has_whole_chunks_only_and_is_bounded() -> None:
    assert prefix_chain(range(CHUNK_TOKENS - 1), "") == ()
    assert len(prefix_chain(range(CHUNK_TOKENS), "")) == 1
    assert len(prefix_chain(range(CHUNK_TOKENS * (MAX_CHUNKS + 9)), "")) == MAX_CHUNKS
    longer, shorter = prefix_chain(range(300), ""), prefix_chain(range(200), "")
    assert longer[: len(shorter)] == shorter


def test_the_prefix_index_is_bounded_and_forgets_the_oldest() -> None:
    index = PrefixIndex(max_chunks=4)
    index.add((1, 2, 3), "a")
    index.add((1, 2), "b")
    index.add((7, 8), "b")
    assert len(index) == 4
    assert index.num_matched_tokens((1, 2, 3), "a") == 2 * CHUNK_TOKENS
    index.forget("a")
    assert index.num_matched_tokens((1, 2), "a") == 0
    assert index.num_matched_tokens((1, 2), "b") == 2 * CHUNK_TOKENS


def test_one_look_at_the_index_finds_what_a_look_for_each_process_does() -> None:
    dice, index = Random(3), PrefixIndex(max_chunks=40)
    names = [f"w{number}" for number in range(6)]
    chains = [[branch * 100 + min(place, branch) for place in range(6)] for branch in range(4)]
    for _ in range(200):
        chain = dice.choice(chains)
        index.add(chain[: dice.randint(1, len(chain))], dice.choice(names))
        if not dice.randrange(20):
            index.forget(dice.choice(names))
        asked = dice.choice(chains)[: dice.randint(0, 6)]
        by_process = {name: index.num_matched_tokens(asked, name) for name in names}
        assert index.matches(asked) == {name: num for name, num in by_process.items() if num}
