"""Knowing for certain whether another process of this host still lives.

A worker that is silent may be dead or frozen, and one that is frozen in the middle of a one-sided write ends it when it
wakes. So a prefill worker holds the lock on an owned file (`owned_file.py`), and decode workers of its host ask that.
"""

from __future__ import annotations

import fcntl
import os
import re

from twinpool.errors import TransportUnavailable
from twinpool.kv_transfer import owned_file
from twinpool.kv_transfer.connector import LocalEnd
from twinpool.kv_transfer.owned_file import DIRECTORY, PREFIX, owner_is_gone

_NAME = re.compile(rf"{PREFIX}(\.[A-Za-z0-9_-]+){{3}}\.life")


class Life:
    """The lock of this process. `name` is what others need to open a `Witness` of it."""

    def __init__(self, end: LocalEnd) -> None:
        """Raises ConfigError if the file cannot be made; the message says what to do."""
        self.name = f"{PREFIX}.{end.deployment}.{end.worker_id}.{end.incarnation}.life"
        self._fd = owned_file.create(self.name, "the lock by which others tell whether this worker lives")

    def close(self) -> None:
        """Says that this process writes to no other's pool any more. Calling it twice is fine."""
        if self._fd >= 0:
            (DIRECTORY / self.name).unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


class Witness:
    """The lock of another process, opened while that process was known to live."""

    def __init__(self, name: str) -> None:
        """Raises TransportUnavailable if `name` is none that this process can open."""
        if not _NAME.fullmatch(name):
            raise TransportUnavailable(f"{name!r} is no name of a worker's lock in {DIRECTORY}")
        try:
            self._fd = os.open(DIRECTORY / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as exc:
            raise TransportUnavailable(
                f"{DIRECTORY / name} cannot be opened ({exc}); do both workers see one {DIRECTORY}? "
                "If not, use --transport tcp"
            ) from exc

    @property
    def is_over(self) -> bool:
        """Whether that process is dead, or has closed its `Life`."""
        return owner_is_gone(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Looks no more."""
        os.close(self._fd)
