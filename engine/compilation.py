"""Notices that kernels are being compiled: a start that should take seconds then takes tens of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from twinpool.kernels.compiler import HAS_COMPILER, numba


@contextmanager
def noticing_compilation(begins: Callable[[], None]) -> Iterator[None]:
    """Calls `begins` once if anything is compiled within, on whichever thread that is: not if all of it is loaded from
    where compiled code is kept."""
    if not HAS_COMPILER:
        yield
        return
    events: Any = numba.core.event

    class Listener(events.Listener):  # type: ignore[misc]  # numba leaves it untyped
        told = False

        def on_start(self, _event: Any) -> None:
            if not self.told:
                self.told = True
                begins()

        def on_end(self, _event: Any) -> None:
            """Nothing: what follows may be compiled too."""

    with events.install_listener("numba:compile", Listener()):
        yield
