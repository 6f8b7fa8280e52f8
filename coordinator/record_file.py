"""A file that lines are recorded in, like those of requests, and the thread that writes it.

Serving never waits for it: what the thread is behind with is bounded, and what is beyond is counted and left out. A
disk that is full, or a file that cannot be written to any more, costs lines of the record and one line of the log.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from twinpool import __version__
from twinpool.config import RecordConfig
from twinpool.coordinator.request_record import KEY_BYTES, EndedRequest, LineMaker
from twinpool.errors import ConfigError

KEPT_FILES = 3
"""Older files that are kept beside the one that is written: PATH.1, the youngest of them, to PATH.3."""
MOST_WAITING_TOKENS = 1 << 20
"""Prompt tokens of requests that wait to be written, some 40 MB: what a disk that hangs for long may cost."""
COST_OF_ONE = 64
"""What a request counts for among them besides its prompt."""
MEGABYTE = 1_000_000
CLOSE_S = 2.0
"""How long the end of the server waits for the disk."""

log = logging.getLogger(__name__)

Told = TypeVar("Told")
"""What a line tells of."""


class RecordFile:
    """A file that only grows, by whole lines, until it is moved aside.

    One of before is moved aside at once, as its times count from another start. It is locked: no other server writes
    to it. Not safe to use from two threads at once.
    """

    def __init__(self, path: str, max_bytes: int, flag: str = "--record") -> None:
        """Opens what `flag` says. Raises ConfigError if that fails, another server has it, or it is no regular file."""
        self.flag = flag
        self._path = path
        self._max_bytes = max_bytes
        self._fd: int | None = None
        self._size = 0
        try:
            self._open()
            if self._size:
                self._move_aside()
        except BlockingIOError as exc:
            self.close()
            raise ConfigError(f"{flag} is {path!r}, which another server writes; name another file") from exc
        except OSError as exc:
            self.close()
            raise ConfigError(
                f"{flag} is {path!r}, which cannot be written: {exc.strerror}; name another file"
            ) from exc

    def make_room(self, num_bytes: int) -> bool:
        """Has a file ready for a line of so many bytes; true if that will be its first. Raises OSError."""
        if self._fd is None or not self._is_in_place(self._fd):
            self.close()
            self._open()
        if self._size and self._size + num_bytes > self._max_bytes:
            self._move_aside()
        return self._size == 0

    def append(self, line: bytes) -> None:
        """Writes it behind `make_room`. Raises OSError: then nothing of it is there."""
        assert self._fd is not None, "make_room opens the file"
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        """Closes the file. Calling it twice is fine."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> None:
        flags = (
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        )  # not to wait for a pipe
        fd = os.open(self._path, flags, 0o600)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        self._fd, self._size = fd, found.st_size

    def _is_in_place(self, fd: int) -> bool:
        """Whether the path still names the open file: somebody may have moved or deleted it."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(fd))
        except FileNotFoundError:
            return False

    def _move_aside(self) -> None:
        for number in range(KEPT_FILES, 0, -1):
            older = self._path if number == 1 else f"{self._path}.{number - 1}"
            with contextlib.suppress(FileNotFoundError):
                os.replace(older, f"{self._path}.{number}")
        self.close()
        self._open()


class LineWriter(Generic[Told]):
    """Writes a line of each thing that it is told, in a thread of its own. `put`, `num_written` and `num_lost` are for
    the event loop.
    """

    def __init__(
        self,
        file: RecordFile,
        make_line: Callable[[Told, bool], bytes],
        cost_of: Callable[[Told], int],
        most_waiting: int,
    ) -> None:
        """Takes `file` over and starts the thread, which calls `make_line`; true: for the first line of a file. What
        waits may cost `most_waiting`."""
        self._file = file
        self._make_line = make_line
        self._cost_of = cost_of
        self._most_waiting = most_waiting
        self._waiting: deque[Told] = deque()
        self._waiting_cost = 0
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_failing = False
        self.num_written = 0
        self.num_lost = 0
        self._thread = threading.Thread(target=self._run, name=file.flag, daemon=True)
        self._thread.start()

    def put(self, told: Told) -> None:
        """Takes it to be written, or counts it as lost if too much waits. Never waits."""
        with self._changed:
            if self._is_closing or self._waiting_cost > self._most_waiting:
                self._lose("the disk is too slow for it")
                return
            self._waiting.append(told)
            self._waiting_cost += self._cost_of(told)
            self._changed.notify()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Writes what waits, within `timeout_s`; what is not written then is counted as lost. Calling it twice is
        fine."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            if self._waiting:
                self.num_lost += len(self._waiting)
                log.error("%s: %d lines are lost: the disk is too slow", self._file.flag, len(self._waiting))
                self._waiting.clear()

    def _run(self) -> None:
        while (told := self._next()) is not None:
            try:
                self._write(told)
            except OSError as exc:
                with self._changed:
                    self._lose(exc.strerror or "it cannot be written")
            except Exception:
                with self._changed:
                    self._lose("a bug in Twinpool")
                log.exception("a bug in Twinpool, at the lines of %s", self._file.flag)
        self._file.close()

    def _next(self) -> Told | None:
        """The next one, when there is one; None when the writer is closed and nothing waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if not self._waiting:
                return None
            told = self._waiting.popleft()
            self._waiting_cost -= self._cost_of(told)
            return told

    def _write(self, told: Told) -> None:
        line = self._make_line(told, False)
        if self._file.make_room(len(line)):
            line = self._make_line(told, True)
        self._file.append(line)
        with self._changed:
            self.num_written += 1
            if self._is_failing:
                self._is_failing = False
                log.warning("%s: lines are written again; %d are lost", self._file.flag, self.num_lost)

    def _lose(self, why: str) -> None:
        """Counts one; `_changed` is held."""
        self.num_lost += 1
        if not self._is_failing:
            self._is_failing = True
            log.error("%s: lines are lost: %s; serving goes on", self._file.flag, why)


class RequestRecorder(LineWriter[EndedRequest]):
    """Writes requests that have ended."""

    def __init__(self, file: RecordFile, make_line: Callable[[EndedRequest, bool], bytes]) -> None:
        """Takes `file` over and starts the thread; `make_line` is called there."""
        super().__init__(file, make_line, _cost, MOST_WAITING_TOKENS)


def start_recorder(config: RecordConfig, now: float) -> RequestRecorder:
    """Opens the record of a server that starts `now`, by the coordinator's clock. Raises ConfigError."""
    file = RecordFile(config.path, config.max_mb * MEGABYTE)
    maker = LineMaker(
        secrets.token_bytes(KEY_BYTES), now, time.time(), f"twinpool {__version__}", has_ids=config.has_ids
    )
    return RequestRecorder(file, maker.line)


def _cost(ended: EndedRequest) -> int:
    return COST_OF_ONE + len(ended.prompt_token_ids)
