"""What a step on the CPU reads, against the plain meaning of its slices; tables are kept and never mixed up."""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.engine.batch import SequenceSlice
from twinpool.engine.host_inputs import HostInputs
from twinpool.request import RequestKey

BLOCK_SIZE = 4


def piece(name: str, token_ids: Sequence[int], start: int, table: Sequence[int]) -> SequenceSlice:
    return SequenceSlice(RequestKey(name, 0), token_ids, start, table)


def check(inputs: HostInputs, *slices: SequenceSlice) -> None:
    """What `inputs` packs is what the slices say."""
    token_ids, batch = inputs.pack(slices)
    assert token_ids.tolist() == [token for one in slices for token in one.token_ids]
    positions = [at for one in slices for at in range(one.start, one.end)]
    assert batch.positions.tolist() == positions
    slots = [
        one.block_table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        for one in slices
        for at in range(one.start, one.end)
    ]
    assert batch.slots.tolist() == slots
    assert batch.ends.tolist() == [one.end for one in slices]
    lengths = (batch.query_starts[1:] - batch.query_starts[:-1]).tolist()
    assert [batch.query_starts[0], *lengths] == [0, *(len(one.token_ids) for one in slices)]
    assert [batch.table(seq).tolist() for seq in range(len(slices))] == [
        list(one.block_table) for one in slices
    ]


def test_steps_of_joins_leaves_and_growth_say_what_their_slices_say() -> None:
    inputs = HostInputs(BLOCK_SIZE)
    a, b, c = (7, 2), (5,), (9, 1, 3)
    check(inputs, piece("a", (11,), 6, a), piece("b", (12,), 2, b))
    check(inputs, piece("a", (13,), 7, a), piece("b", (14,), 3, b), piece("c", (20, 21, 22, 23, 24), 4, c))
    check(inputs, piece("a", (15,), 8, (*a, 4)), piece("c", (25,), 9, c))
    check(inputs, piece("c", (26,), 10, c), piece("b", (16,), 3, (8,)))


def test_only_sequences_of_the_last_step_are_remembered() -> None:
    inputs = HostInputs(BLOCK_SIZE)
    for number in range(5):
        check(inputs, piece(f"{number}", (1,), 0, (number,)))
    assert [key.request_id for key in inputs._tables] == ["4"]


def test_a_table_that_its_owner_may_change_is_read_at_every_step() -> None:
    inputs, table = HostInputs(BLOCK_SIZE), [3, 4]
    check(inputs, piece("a", (1,), 2, table))
    table[0] = 6
    check(inputs, piece("a", (1,), 3, table))
