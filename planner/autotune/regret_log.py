"""The regret log as a file: a line of JSON for each recommendation, and one for what came of it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from datetime import UTC, datetime

import msgspec

from twinpool.coordinator.record_file import MEGABYTE, RecordFile
from twinpool.planner.autotune.words import Measured, Recommendation

MAX_MB = 16
FLAG = "--autotune-log"
_MOST_WAITING = 256

log = logging.getLogger(__name__)


class RegretLog:
    """Written by threads, one line after the other; what a disk does not take is left out and counted. Older files are
    kept as those of `--record` are (`RecordFile`)."""

    def __init__(self, path: str) -> None:
        """Opens the file. Raises ConfigError."""
        self._file = RecordFile(path, MAX_MB * MEGABYTE, FLAG)
        self._waiting: deque[bytes] = deque()
        self._is_failing = False
        self.num_lost = 0

    def put(self, line: Recommendation | Measured) -> None:
        """Takes it to be written with the time of day. Never waits."""
        if len(self._waiting) == _MOST_WAITING:
            self._lose("the disk is too slow for it")
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._waiting.append(json.dumps({"time": now, **msgspec.to_builtins(line)}).encode() + b"\n")

    async def flush(self) -> None:
        """Writes what waits, in a thread."""
        while self._waiting:
            await asyncio.to_thread(self._write, self._waiting.popleft())

    def close(self) -> None:
        """Writes what waits, and closes the file."""
        while self._waiting:
            self._write(self._waiting.popleft())
        self._file.close()

    def _write(self, line: bytes) -> None:
        try:
            self._file.make_room(len(line))
            self._file.append(line)
            self._is_failing = False
        except OSError as exc:
            self._lose(exc.strerror or "it cannot be written")

    def _lose(self, why: str) -> None:
        self.num_lost += 1
        if not self._is_failing:
            self._is_failing = True
            log.error("lines of %s are lost: %s", FLAG, why)
