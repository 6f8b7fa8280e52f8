"""When a worker ends by itself, and when it does not."""

from __future__ import annotations

from twinpool.errors import NotAMember, StepStuck, WorkerDenied
from twinpool.worker.vigil import MOST_REFUSALS, Vigil


def test_all_is_well_up_to_each_limit() -> None:
    vigil = Vigil("tcp://10.0.0.1:7000", step_timeout_s=60.0)
    assert vigil.verdict(num_refused=MOST_REFUSALS - 1, num_broken=9, step_s=60.0) is None
    vigil.welcomed(num_broken=9)
    assert vigil.verdict(num_refused=0, num_broken=9, step_s=0.0) is None


def test_each_reason_to_end_is_an_error_of_its_own() -> None:
    vigil = Vigil("tcp://10.0.0.1:7000", step_timeout_s=60.0)
    denied = vigil.verdict(MOST_REFUSALS, 0, 0.0)
    assert isinstance(denied, WorkerDenied)
    assert "tcp://10.0.0.1:7000 does not accept this join token" in str(denied)
    stuck = vigil.verdict(0, 0, 60.1)
    assert isinstance(stuck, StepStuck)
    assert "has not ended for 60 s" in str(stuck)
    vigil.welcomed(num_broken=2)
    assert isinstance(vigil.verdict(0, 3, 0.0), NotAMember)
