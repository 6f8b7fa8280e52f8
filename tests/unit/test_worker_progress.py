"""What counts as a standstill of a worker, and what does not."""

from __future__ import annotations

from twinpool.worker.progress import Progress


def looked(progress: Progress, start: float, seconds: float, is_anything_waiting: bool = False) -> float:
    """Looks every 50 ms for so long; returns the time then."""
    for tick in range(1, round(seconds / 0.05) + 1):
        progress.look(start + tick * 0.05, is_anything_waiting)
    return start + seconds


def test_a_worker_with_nothing_to_do_is_not_stalled() -> None:
    progress = Progress(100.0)
    looked(progress, 100.0, 60.0)
    assert progress.stalled_s == 0.0


def test_a_step_that_does_not_end_stalls_the_worker() -> None:
    progress = Progress(0.0)
    progress.step_began()
    looked(progress, 0.0, 20.0)
    assert round(progress.step_s) == round(progress.stalled_s) == 20
    progress.step_ended()
    assert progress.step_s == progress.stalled_s == 0.0


def test_steps_that_end_are_progress_for_those_who_wait() -> None:
    progress, now = Progress(0.0), 0.0
    for _ in range(50):
        progress.step_began()
        now = looked(progress, now, 0.5, is_anything_waiting=True)
        assert progress.stalled_s < 0.6
        progress.step_ended()


def test_work_that_waits_while_nothing_ends_is_a_standstill_until_something_does() -> None:
    progress = Progress(0.0)
    now = looked(progress, 0.0, 30.0, is_anything_waiting=True)
    assert round(progress.stalled_s) == 30
    assert progress.step_s == 0.0
    progress.moved()
    assert progress.stalled_s == 0.0
    looked(progress, now, 1.0)
    assert progress.stalled_s == 0.0


def test_time_in_which_the_process_stood_still_is_not_the_steps() -> None:
    progress = Progress(0.0)
    progress.step_began()
    progress.look(500.0, is_anything_waiting=True)
    assert progress.stalled_s <= 1.0
