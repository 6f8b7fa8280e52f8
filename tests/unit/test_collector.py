"""Garbage collection around a start."""

from __future__ import annotations

import gc
import weakref

from twinpool import collector


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


def test_what_a_start_makes_is_never_looked_at_and_what_comes_later_is() -> None:
    try:
        collector.put_off()
        assert not gc.isenabled()
        kept = Ring()
        collector.begin()
        assert gc.isenabled()
        assert not any(thing is kept for thing in gc.get_objects())
        later = weakref.ref(Ring())
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
        gc.enable()
