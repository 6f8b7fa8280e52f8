"""The order of released blocks is that of a dict's keys, whatever is added and taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twinpool.engine.release_order import ReleaseOrder

NUM_BLOCKS = 8


BLOCKS = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True)


@given(st.lists(st.tuples(st.sampled_from(("extend", "remove", "first")), BLOCKS)))
def test_it_goes_as_a_dict_does(moves: list[tuple[str, list[int]]]) -> None:
    order, wanted = ReleaseOrder[int](), dict[int, None]()
    for move, blocks in moves:
        if move == "extend":
            new = [block for block in blocks if block not in wanted]
            order.extend(new)
            wanted |= dict.fromkeys(new)
        elif move == "remove":
            for block in blocks:
                if block in wanted:
                    order.remove(block)
                    del wanted[block]
        else:
            first = list(wanted)[: len(blocks)]
            assert order.take_first(len(first)) == first
            for block in first:
                del wanted[block]
        assert list(order) == list(wanted)
        assert len(order) == len(wanted)
