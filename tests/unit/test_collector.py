"""Garbage collection around a start."""

from __future__ import annotations

import gc
import weakref

from twinpool import collector


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


def test_what_a_start_leaves_is_collected_once_and_what_it_keeps_is_not_looked_at_again() -> None:
    try:
        collector.put_off()
        assert not gc.isenabled()
        kept, lost = Ring(), weakref.ref(Ring())
        assert lost() is not None
        collector.begin()
        assert lost() is None
        assert gc.isenabled()
        assert not any(thing is kept for thing in gc.get_objects())
        later = weakref.ref(Ring())
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
        gc.enable()
