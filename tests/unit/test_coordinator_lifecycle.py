"""The lifecycle table: complete, without dead ends, and owning nothing at the end."""

from __future__ import annotations

import pytest
from support.coordinator_core import submission

from twinpool.coordinator.accounts import Account
from twinpool.coordinator.lifecycle import TABLE, Leg, LegKind, Move, Request, Resource
from twinpool.coordinator.loads import Loads
from twinpool.coordinator.tenants import ANYONE
from twinpool.coordinator.worker import Worker
from twinpool.errors import InvariantViolation
from twinpool.request import RequestKey, RequestState

BEFORE_ADMISSION = {RequestState.RECEIVED, RequestState.VALIDATED, RequestState.TOKENIZED}
ADMITTED = [s for s in RequestState if not s.is_terminal and s not in BEFORE_ADMISSION]
OUTCOME = {
    Move.FINISH: RequestState.COMPLETED,
    Move.CANCEL: RequestState.CANCELLED,
    Move.TIME_OUT: RequestState.TIMED_OUT,
    Move.FAIL: RequestState.FAILED,
}


def reachable(state: RequestState) -> set[RequestState]:
    found, todo = {state}, [state]
    while todo:
        for target in TABLE[todo.pop()].moves.values():
            if target not in found:
                found.add(target)
                todo.append(target)
    return found


def test_the_table_has_a_rule_for_every_state() -> None:
    assert set(TABLE) == set(RequestState)


def test_every_state_can_be_reached_from_received() -> None:
    assert reachable(RequestState.RECEIVED) == set(RequestState)


@pytest.mark.parametrize("state", [s for s in RequestState if s.is_terminal])
def test_a_terminal_state_is_never_left_and_owns_nothing(state: RequestState) -> None:
    assert not TABLE[state].moves
    assert not TABLE[state].owns


@pytest.mark.parametrize("state", sorted(BEFORE_ADMISSION))
def test_before_admission_a_request_owns_nothing_and_can_be_rejected(state: RequestState) -> None:
    assert not TABLE[state].owns
    assert TABLE[state].moves[Move.REJECT] is RequestState.REJECTED


@pytest.mark.parametrize("state", ADMITTED)
@pytest.mark.parametrize("move", [Move.CANCEL, Move.TIME_OUT, Move.FAIL])
def test_an_admitted_request_can_be_cancelled_timed_out_and_failed(state: RequestState, move: Move) -> None:
    target = TABLE[state].moves[move]
    if state is not RequestState.DRAINING:
        assert target is RequestState.DRAINING
        target = TABLE[target].moves[move]
    assert target is OUTCOME[move]


@pytest.mark.parametrize("state", ADMITTED)
def test_the_moves_that_end_a_request_release_the_queue_slot_and_the_output_buffer(
    state: RequestState,
) -> None:
    for move in OUTCOME.keys() & TABLE[state].moves.keys():
        kept = TABLE[TABLE[state].moves[move]].owns
        assert not kept & {Resource.QUEUE_SLOT, Resource.OUTPUT_BUFFER}


@pytest.mark.parametrize("state", list(RequestState))
def test_a_move_that_the_table_lacks_raises_with_the_story(state: RequestState) -> None:
    for move in set(Move) - TABLE[state].moves.keys():
        request = Request(submission("r-7"), Account(ANYONE))
        request.state = state
        with pytest.raises(InvariantViolation, match=r"request r-7: received .*attempt 0"):
            request.move(move, 1.0)


def test_every_move_is_stamped_and_says_what_is_released() -> None:
    request = Request(submission("r"), Account(ANYONE))
    released = [
        request.move(move, at)
        for at, move in enumerate(
            (
                Move.VALIDATE,
                Move.TOKENIZE,
                Move.ADMIT,
                Move.DISPATCH,
                Move.PREFILLED,
                Move.HAND_OFF,
                Move.FINISH,
            ),
            1,
        )
    ]
    assert [state for state, _ in request.timeline.stamps] == [
        "received", "validated", "tokenized", "queued", "prefilling", "transferring", "decoding", "draining",
    ]  # fmt: skip
    assert [at for _, at in request.timeline.stamps] == [0.0, 1, 2, 3, 4, 5, 6, 7]
    assert released[3:] == [{Resource.QUEUE_SLOT}, set(), {Resource.PREFILL_BLOCKS}, {Resource.OUTPUT_BUFFER}]


def test_no_request_ends_while_a_worker_holds_something(worker: Worker) -> None:
    request = Request(submission("r"), Account(ANYONE))
    for move in (Move.VALIDATE, Move.TOKENIZE, Move.ADMIT, Move.CANCEL):
        request.move(move, 1.0)
    request.legs.append(Leg(LegKind.DECODE, RequestKey("r", 1), worker, request, 1, 0))
    with pytest.raises(InvariantViolation, match="cancelled while workers hold 1 legs"):
        request.move(Move.CANCEL, 2.0)


@pytest.fixture
def worker() -> Worker:
    from support.coordinator_core import register

    from twinpool.config import Role

    return Worker(register("D", Role.DECODE), 0.0, Loads(lambda _: 0.0))
