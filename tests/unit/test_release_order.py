"""The order of released blocks is that of a dict's keys, whatever is added and taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twinpool.engine.release_order import ReleaseOrder

NUM_BLOCKS = 8


@given(st.lists(st.tuples(st.sampled_from(("add", "remove", "first")), st.integers(0, NUM_BLOCKS - 1))))
def test_it_goes_as_a_dict_does(moves: list[tuple[str, int]]) -> None:
    order, wanted = ReleaseOrder(NUM_BLOCKS), dict[int, None]()
    for move, block in moves:
        if move == "add" and block not in wanted:
            order.add(block)
            wanted[block] = None
        elif move == "remove" and block in wanted:
            order.remove(block)
            del wanted[block]
        elif move == "first" and wanted:
            first = next(iter(wanted))
            assert order.take_first() == first
            del wanted[first]
        assert list(order) == list(wanted)
        assert len(order) == len(wanted)
        assert [each for each in range(NUM_BLOCKS) if each in order] == sorted(wanted)
