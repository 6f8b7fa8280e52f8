"""Wakes an event loop at a time, to some ten microseconds where the system can.

Timers of event loops count in whole milliseconds: with them every request of an open loop would be sent about half a
millisecond late or early. Linux has timers that are files (timerfd), which a loop can wait for like for a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_TFD_NONBLOCK, _TFD_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))

    @classmethod
    def of(cls, seconds: float) -> _Timespec:
        return cls(int(seconds), int(seconds % 1 * 1e9))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class Alarm:
    """Calls `ring` at the time set last, on the event loop of whoever makes it. `close` ends it."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = _timer_file(self._libc)
        if self._fd is not None:
            self._loop.add_reader(self._fd, self._rung)

    def set(self, at: float) -> None:
        """Rings at `at` (monotonic clock, seconds), at once if that has passed."""
        if self._fd is not None:
            spec = _Itimerspec(_Timespec.of(0), _Timespec.of(max(at, 1e-9)))
            self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None)
        else:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(max(0.0, at - time.monotonic()), self._ring)

    def close(self) -> None:
        """It rings no more."""
        if self._handle is not None:
            self._handle.cancel()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _rung(self) -> None:
        assert self._fd is not None, "it is read"
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        self._ring()


def _timer_file(libc: ctypes.CDLL) -> int | None:
    """A timerfd, or None where there is no such thing."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        fd: int = libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
    except AttributeError:
        return None
    return fd if fd >= 0 else None
