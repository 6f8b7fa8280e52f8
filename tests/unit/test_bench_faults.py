"""The schedule of faults: a seed is one schedule, of all kinds, and no worker ends so often that it is given up."""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from twinpool.bench.faults import ENDS_WINDOW_S, MOST_ENDS, Fault, FaultKind, schedule

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def faults(seed: int, count: int = 300, mean_gap_s: float = 2.0) -> list[Fault]:
    return list(islice(schedule(WORKERS, mean_gap_s, 5.0, seed), count))


def test_a_seed_is_one_schedule_in_whatever_order_the_workers_were_found() -> None:
    assert faults(3) == list(islice(schedule(WORKERS[::-1], 2.0, 5.0, 3), 300))
    assert faults(3) != faults(4)


@given(st.integers(0, 2**31))
def test_no_worker_ends_so_often_that_the_server_gives_it_up(seed: int) -> None:
    found = faults(seed)
    for worker in WORKERS:
        ends = [f.at_s for f in found if f.worker_id == worker and f.kind is not FaultKind.FREEZE]
        later_ones = zip(ends, ends[MOST_ENDS:], strict=False)
        assert all(later - earlier >= ENDS_WINDOW_S for earlier, later in later_ones)


def test_every_kind_and_every_worker_occurs_and_time_rises() -> None:
    found = faults(1, mean_gap_s=10.0)
    assert {fault.kind for fault in found} == set(FaultKind)
    assert {fault.worker_id for fault in found} == set(WORKERS)
    assert [fault.at_s for fault in found] == sorted(fault.at_s for fault in found)


def test_only_frozen_workers_thaw_before_or_after_their_lease_as_the_kind_says() -> None:
    for fault in faults(2):
        match fault.kind:
            case FaultKind.FREEZE:
                assert 0 < fault.frozen_s < 5.0
            case FaultKind.FREEZE_LONG:
                assert fault.frozen_s > 5.0
            case _:
                assert fault.frozen_s == 0
