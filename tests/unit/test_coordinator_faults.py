"""Every fault in every state: one terminal state, no token lost or doubled, nothing held at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.coordinator_core import EOS, CoreDriver
from support.coordinator_pools import Pools, expected_tokens

from twinpool.config import Role
from twinpool.coordinator.events import FromWorker, Shutdown
from twinpool.errors import NoWorker
from twinpool.messages import Heartbeat, Prefill, StartAnew, StepTokens, Stop, Token
from twinpool.metrics import CoordinatorMetric
from twinpool.request import FinishReason, RequestKey, RequestState

PROMPT = tuple(range(100, 110))
MAX_TOKENS = 6
WANTED = expected_tokens(PROMPT, MAX_TOKENS)
OUTCOMES = ("completed", "rejected", "timed_out", "cancelled", "failed")

assert EOS not in WANTED, "the request of these tests must run to its full length"


class World:
    """P and D with one request `r`."""

    def __init__(self) -> None:
        self.driver = CoreDriver(max_in_flight=1)
        self.pools = Pools(self.driver, {"P": Role.PREFILL, "D": Role.DECODE})

    def submit(self, request_id: str = "r") -> None:
        self.driver.submit(request_id, max_tokens=MAX_TOKENS)
        self.pools.collect()

    def happen(self, *whats: str) -> None:
        """Lets these things happen to whom they can, in order."""
        for what in whats:
            choice = next(c for c in self.pools.choices() if what in (c[0], f"{c[0]} {c[1]}"))
            self.pools.act(*choice)

    def read_all(self) -> None:
        while any(c[0] == "read" for c in self.pools.choices()):
            self.happen("read")


def queued() -> World:
    world = World()
    world.submit("other")
    world.submit()
    return world


def prefilling() -> World:
    world = World()
    world.submit()
    world.read_all()
    return world


def prefilling_but_handed_off() -> World:
    world = prefilling()
    world.happen("grant D", "arrive D")
    world.read_all()
    world.happen("compute P", "hand off", "arrive D")
    return world


def transferring() -> World:
    world = prefilling()
    world.happen("grant D", "arrive D")
    world.read_all()
    world.happen("compute P", "arrive P", "arrive P")
    return world


def decoding() -> World:
    world = transferring()
    world.happen("hand off", "arrive D", "step D", "arrive D")
    return world


def resumed() -> World:
    world = decoding()
    world.pools.kill("D", 0, is_noticed=True)
    return world


def draining() -> World:
    world = decoding()
    world.driver.abandon()
    return world


STATES: dict[str, tuple[Callable[[], World], RequestState]] = {
    "queued": (queued, RequestState.QUEUED),
    "prefilling": (prefilling, RequestState.PREFILLING),
    "prefilling, handed off": (prefilling_but_handed_off, RequestState.PREFILLING),
    "transferring": (transferring, RequestState.TRANSFERRING),
    "decoding": (decoding, RequestState.DECODING),
    "queued again": (resumed, RequestState.QUEUED),
    "draining": (draining, RequestState.DRAINING),
}


def drop_on(worker_id: str, reason: str) -> Callable[[World], None]:
    def fault(world: World) -> None:
        process = world.pools.processes.get(worker_id)
        for key in list(process.tasks if process else ()):
            if process is not None and key.request_id == "r":
                process.drop(key, reason)

    return fault


def stale_token(world: World) -> None:
    for worker_id in world.pools.processes:
        world.driver.say(worker_id, StepTokens((Token(RequestKey("r", 99), 0, 5),)))


def repeated_token(world: World) -> None:
    for worker_id in world.pools.processes:
        world.driver.say(worker_id, StepTokens((Token(RequestKey("r", 1), 0, WANTED[0]),)))


def silence(world: World) -> None:
    world.driver.advance(5.1)
    assert len(world.driver.core.registry) == 0
    world.pools.processes.clear()


def nonsense(world: World) -> None:
    for worker_id in world.pools.processes:
        world.driver.say(worker_id, Stop())


def server_stops(world: World) -> None:
    world.driver.do(Shutdown())


def restart(worker_id: str) -> Callable[[World], None]:
    def fault(world: World) -> None:
        world.pools.processes.pop(worker_id, None)
        world.pools.start(worker_id)

    return fault


FAULTS: dict[str, Callable[[World], None]] = {
    "client leaves": lambda w: w.driver.abandon(),
    "stop string": lambda w: w.driver.complete(len(w.driver.tokens())),
    "prefill dies": lambda w: w.pools.kill("P", 0, is_noticed=True),
    "decode dies": lambda w: w.pools.kill("D", 0, is_noticed=True) if "D" in w.pools.processes else None,
    "prefill dies, its last words arrive": lambda w: w.pools.kill("P", 9, is_noticed=True),
    "both fall silent": silence,
    "prefill comes back before it was missed": restart("P"),
    "decode comes back before it was missed": restart("D"),
    "prefill loses the transfer": drop_on("P", "transfer"),
    "decode loses the transfer": drop_on("D", "transfer"),
    "decode preempts": drop_on("D", "preempted"),
    "decode has no room": drop_on("D", "no_room"),
    "a reservation runs out": drop_on("D", "deadline"),
    "prefill refuses": drop_on("P", "refused"),
    "decode drops it unasked": drop_on("D", "cancelled"),
    "a token of another attempt": stale_token,
    "a token again": repeated_token,
    "a message that no worker may send": nonsense,
    "server stops": server_stops,
    "nothing": lambda _: None,
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_state_ends_in_one_outcome_with_nothing_held(state: str, fault: str) -> None:
    reach, wanted_state = STATES[state]
    world = reach()
    driver = world.driver
    assert driver.state() is wanted_state
    ends_stream = fault in ("client leaves", "stop string", "server stops", "prefill refuses")

    FAULTS[fault](world)
    world.pools.collect()
    world.pools.run_until_quiet()

    driver.assert_empty()
    assert driver.state().is_terminal
    assert sum(driver.count(CoordinatorMetric.REQUESTS, outcome) for outcome in OUTCOMES) == (
        2 if state == "queued" else 1
    )
    assert driver.tokens() == WANTED[: len(driver.tokens())]
    if state != "draining" and not ends_stream:
        assert driver.finish() is FinishReason.LENGTH
        assert driver.tokens() == WANTED
        assert driver.state() is RequestState.COMPLETED
    for process in world.pools.processes.values():
        assert not process.tasks


@pytest.mark.parametrize("state", ["prefilling", "transferring", "decoding"])
def test_cancel_reaches_every_worker_that_holds_something(state: str) -> None:
    world = STATES[state][0]()
    driver = world.driver
    holders = {w.worker_id for w in driver.core.registry if w.legs}
    assert holders == ({"D"} if state == "decoding" else {"P", "D"})
    driver.abandon()
    assert driver.finish() is FinishReason.CANCELLED
    assert {s.worker_id for s in driver.sent} == holders
    assert driver.state() is RequestState.DRAINING
    world.pools.collect()
    world.pools.run_until_quiet()
    assert driver.state() is RequestState.CANCELLED
    driver.assert_empty()


def test_a_worker_that_never_answers_a_cancel_counts_as_lost() -> None:
    world = decoding()
    world.driver.abandon()
    for _ in range(21):
        world.driver.now += 1.0
        world.pools.heartbeats()
    world.driver.advance(0.0)
    assert world.driver.state() is RequestState.CANCELLED
    assert world.driver.core.registry.get("D") is None
    # It lives, but is no member: its next heartbeat is answered by StartAnew.
    world.driver.sent.clear()
    world.driver.heartbeat("D")
    assert world.driver.sent_to("D") == [StartAnew()]
    world.driver.assert_empty()


def test_a_process_that_was_lost_never_joins_again() -> None:
    world = prefilling()
    driver = world.driver
    driver.lose("D")
    driver.sent.clear()
    driver.join("D", Role.DECODE, incarnation="2")  # the very process that was lost
    assert driver.sent_to("D") == [StartAnew()]
    assert driver.core.registry.get("D") is None


def test_messages_of_unknown_processes_are_counted_and_change_nothing() -> None:
    driver = CoreDriver()
    driver.pair()
    before = driver.count(CoordinatorMetric.STALE_MESSAGES)
    message = StepTokens((Token(RequestKey("r", 1), 0, 5),))
    driver.do(FromWorker("ghost", "g", message))
    assert driver.count(CoordinatorMetric.STALE_MESSAGES) == before + 1
    assert not driver.sent


def test_a_worker_that_sends_what_only_the_coordinator_may_is_counted() -> None:
    driver = CoreDriver()
    driver.pair()
    driver.submit()
    (prefill,) = driver.sent_to("P")
    assert isinstance(prefill, Prefill)
    driver.say("P", prefill)
    assert driver.count(CoordinatorMetric.PROTOCOL_FAULTS) == 1
    driver.abandon()
    driver.answer_cancels()
    driver.assert_empty()


def test_heartbeats_keep_a_worker_and_silence_loses_it() -> None:
    driver = CoreDriver(lease_s=2.0)
    driver.pair()
    for _ in range(5):
        driver.advance(1.5)
        driver.heartbeat("P", "D")
    driver.advance(1.9)
    assert len(driver.core.registry) == 2
    driver.say("P", Heartbeat(driver.core.registry.get("P").stats))  # type: ignore[union-attr, arg-type]
    driver.advance(0.2)
    assert [w.worker_id for w in driver.core.registry] == ["P"]
    assert driver.core.registry.ready() == (False, "the decode pool is empty")


def test_a_request_that_waited_for_lost_workers_is_told_what_is_missing() -> None:
    driver = CoreDriver(max_wait_s=2.0)
    driver.pair()
    driver.submit()
    driver.lose("D")
    driver.answer_cancels()
    for _ in range(6):
        driver.heartbeat("P")
        driver.advance(0.5)
    error = driver.outputs["r"][-1].error
    assert isinstance(error, NoWorker)
    assert "the decode pool is empty" in error.message
    driver.assert_empty()


def test_prefills_word_of_a_revoked_grant_does_not_charge_a_preemption() -> None:
    """Decode takes a grant back to preempt; prefill's word of that may overtake decode's own."""
    driver = CoreDriver(max_attempts=1)
    driver.pair()
    driver.submit(max_tokens=5)
    driver.grant()
    driver.dropped("P", "revoked")
    assert driver.state() is RequestState.PREFILLING
    driver.dropped("D", "preempted")
    driver.advance(0.2)
    assert driver.state() is RequestState.PREFILLING
    driver.token("P", 0, FinishReason.STOP, attempt=2)
    driver.answer_cancels()
    assert driver.state() is RequestState.COMPLETED
    driver.assert_empty()
