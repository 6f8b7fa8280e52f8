"""Measures transfers of KV between two processes, by transport."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence

import msgspec

from twinpool.config import TransportName
from twinpool.errors import TransferError
from twinpool.planner.profile.saved import TransferSample
from twinpool.planner.profile.spread import spread

_LIMIT_S = 120.0
FULL_TOKENS, QUICK_TOKENS = (16, 64, 256, 512, 1024), (32, 512)
FULL_ROUNDS, QUICK_ROUNDS = 9, 4


class TransferSettings(msgspec.Struct, frozen=True):
    """What moves (KV of so many `tokens`, in whole blocks), between which cores (None: any), how often, and over which
    transports, the one that a server prefers first."""

    directory: str
    dtype: str
    block_size: int
    tokens: tuple[int, ...]
    rounds: int
    core: int | None
    other_core: int | None
    transports: tuple[TransportName, ...] = (TransportName.SHM, TransportName.UCX, TransportName.TCP)


class Moved(msgspec.Struct, frozen=True, tag=True):
    """One transfer."""

    transport: str
    num_bytes: int
    seconds: float


class Skipped(msgspec.Struct, frozen=True, tag=True):
    """A transport that does not work here, and why."""

    transport: str
    reason: str


def measure_transfers(settings: TransferSettings) -> tuple[list[TransferSample], dict[str, str]]:
    """All transfers, and by transport why there are none.

    Raises:
        TransferError: the process that sends failed; its own words are on standard error.
    """
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "twinpool.planner.profile.transfer_end",
            msgspec.json.encode(settings).decode(),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches only this process, which ends it
    )
    is_late = threading.Event()

    def end_late() -> None:
        is_late.set()
        process.kill()

    watch = threading.Timer(_LIMIT_S, end_late)
    watch.start()
    assert process.stdout is not None, "it is piped"
    with process.stdout:
        try:
            data = process.stdout.read()
            process.wait()
        finally:
            watch.cancel()
            process.kill()  # before the pipe closes, so that it does not notice
            process.wait()
    if is_late.is_set():
        raise TransferError(
            f"transfers between two processes took more than {_LIMIT_S:.0f} s and were ended: end what else uses the "
            "cores, or take --quick"
        )
    if process.returncode:
        raise TransferError(f"the measuring of transfers ended with status {process.returncode}; see above")
    heard = [msgspec.json.decode(line, type=Moved | Skipped) for line in data.splitlines()]
    skipped = {each.transport: each.reason for each in heard if isinstance(each, Skipped)}
    return samples_of([each for each in heard if isinstance(each, Moved)]), skipped


def samples_of(moved: Sequence[Moved]) -> list[TransferSample]:
    """The repetitions of each size together."""
    found: dict[tuple[str, int], list[float]] = {}
    for each in moved:
        found.setdefault((each.transport, each.num_bytes), []).append(each.seconds)
    return [
        TransferSample(transport, num_bytes, statistics.median(seconds), spread(seconds), len(seconds))
        for (transport, num_bytes), seconds in found.items()
    ]
