"""The regret log as a file: a line of JSON for each recommendation, and one for what came of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import msgspec

from twinpool.coordinator.record_file import CLOSE_S, MEGABYTE, LineWriter, RecordFile
from twinpool.planner.autotune.words import Measured, Recommendation

MAX_MB = 16
FLAG = "--autotune-log"


class RegretLog:
    """Written by a thread; what a disk does not take is left out and counted. Older files are kept as those of
    `--record` are (`RecordFile`)."""

    def __init__(self, path: str) -> None:
        """Opens the file and starts the thread. Raises ConfigError."""
        file = RecordFile(path, MAX_MB * MEGABYTE, FLAG)
        self._writer = LineWriter(file, _as_it_is, cost_of=len, most_waiting=MEGABYTE)

    @property
    def num_lost(self) -> int:
        """Lines that were not written."""
        return self._writer.num_lost

    def put(self, line: Recommendation | Measured) -> None:
        """Takes it to be written with the time of day. Never waits."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._writer.put(json.dumps({"time": now, **msgspec.to_builtins(line)}).encode() + b"\n")

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """As `LineWriter.close`."""
        self._writer.close(timeout_s)


def _as_it_is(line: bytes, _is_first: bool) -> bytes:
    return line
