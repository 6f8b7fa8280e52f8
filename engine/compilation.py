"""Kernels that are compiled at a first start, which then takes tens of seconds: it is noticed, and done once for all
processes that start together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from twinpool.kernels.compiler import HAS_COMPILER, numba
from twinpool.kernels.jit import KEEPS_COMPILED_CODE

LOADING_S = 3.0
"""What is compiled is loaded in less."""
COMPILING_S = 600.0
"""Another process that takes longer is stuck, or stopped."""


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


@contextmanager
def compiling_once(what: str, waits: Callable[[], None]) -> Iterator[None]:
    """For what compiles `what` and keeps it: one process at a time, so that others load what the first has compiled.

    Whoever has to wait for longer than loading takes is told by `waits`, and after `COMPILING_S` compiles for itself.
    Nobody has to where `what` was compiled before, or nothing is kept.
    """
    if not KEEPS_COMPILED_CODE:
        yield
        return
    name = blake2b(what.encode(), digest_size=8).hexdigest()
    settings: Any = numba.config
    folder = Path(settings.CACHE_DIR)
    done = folder / f"{name}.compiled"
    if done.exists():
        yield
        return
    lock = FileLock(folder / f"{name}.lock")
    with suppress(OSError, NotImplementedError):  # waited too long, or no locks here: it compiles for itself
        try:
            lock.acquire(timeout=LOADING_S)
        except Timeout:
            waits()
            lock.acquire(timeout=COMPILING_S)
    try:
        yield
        with suppress(OSError):  # a full disk: the next start looks for itself
            done.touch()
    finally:
        lock.release()
