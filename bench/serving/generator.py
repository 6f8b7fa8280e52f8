"""Runs a load: starts the sender processes, tells them when to begin, gathers what their clients saw.

The senders share nothing with each other or with this process while the load runs, so nothing that happens here, to
the terminal or to the report, delays a request.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, BinaryIO, cast

from twinpool.bench.serving.progress import Progress, Progressing
from twinpool.bench.serving.record import RequestRecord, Run
from twinpool.bench.serving.sender_messages import (
    Begin,
    Finished,
    FromSender,
    Plan,
    Ready,
    Refused,
    Stop,
    Tick,
    ToSender,
    read_from_sender,
    write,
)
from twinpool.bench.serving.settings import LoadSettings, ServerKind
from twinpool.bench.serving.timelines import joined
from twinpool.bench.serving.workload import PlannedRequest
from twinpool.errors import ConfigError, TwinpoolError

READY_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0
_LEAD_S = 0.25
"""From the order to begin to the beginning."""
_GRACE_S = 30.0
"""A sender that is silent for so long beyond every request's limit is lost."""

OnProgress = Callable[[Progress], None]


class SenderLost(TwinpoolError):
    """A sender process ended or hangs. The message has its last words."""


def run_load(
    requests: Sequence[PlannedRequest],
    settings: LoadSettings,
    on_progress: OnProgress | None = None,
    described: dict[str, Any] | None = None,
) -> Run:
    """Sends `requests` at their times, or in a closed loop if `settings` has clients, and waits for all to end.

    What a server does is in the records, never raised. Ctrl-C ends the load; what was seen until then is returned, and
    the run says that it was interrupted. `described` are further settings that the run should name.

    Raises:
        ConfigError: a prompt does not fit the endpoint, or open-loop requests have no times.
        SenderLost: a sender process failed.
    """
    if settings.num_clients is None and any(request.at_s is None for request in requests):
        raise ConfigError(
            "requests of an open loop need their times; schedule them, or set a number of clients"
        )
    if not settings.request_id_prefix:
        settings = replace(settings, request_id_prefix=f"bench-{uuid.uuid4().hex[:12]}")
    with _Senders(_plans(requests, settings)) as senders:
        run = senders.run(len(requests), on_progress, (described or {}) | settings.shown())
    if settings.with_timelines and settings.kind is ServerKind.TWINPOOL:
        run = joined(run, settings)
    return run


def _plans(requests: Sequence[PlannedRequest], settings: LoadSettings) -> list[Plan]:
    """Neighbours go to different senders, so that each has the same process at a part of the rate."""
    count = settings.num_processes
    slots = [None] * count if settings.max_concurrency is None else _shares(settings.max_concurrency, count)
    clients = [None] * count if settings.num_clients is None else _shares(settings.num_clients, count)
    return [
        Plan(
            settings=settings,
            requests=tuple(requests[part::count]),
            max_concurrency=slots[part],
            num_clients=clients[part],
            core=settings.cores[part % len(settings.cores)] if settings.cores else None,
        )
        for part in range(count)
    ]


class _Senders:
    """The sender processes of one load. They end with this context."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._plans = plans
        self._heard: queue.SimpleQueue[tuple[int | None, FromSender | None]] = queue.SimpleQueue()
        """Who, None for Ctrl-C, and what; no message: that sender says nothing more."""
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Senders:
        for number, _ in enumerate(self._plans):
            process = subprocess.Popen(
                [sys.executable, "-m", "twinpool.bench.serving.sender"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches only this process, which tells them
            )
            self._processes.append(process)
            threading.Thread(target=self._listen, args=(number, process), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()

    def run(self, num_planned: int, on_progress: OnProgress | None, described: dict[str, Any]) -> Run:
        for number, plan in enumerate(self._plans):
            self._tell(number, plan)
        self._wait_ready()
        begins_at = time.monotonic() + _LEAD_S
        started_at = datetime.fromtimestamp(time.time() + _LEAD_S, UTC).astimezone().isoformat()
        for number, _ in enumerate(self._plans):
            self._tell(number, Begin(begins_at))
        finished, was_interrupted = self._gather(begins_at, num_planned, on_progress)
        records = sorted((each for part in finished for each in part.records), key=_by_index)
        return Run(
            started_at=started_at,
            duration_s=max((each.ended_at_s for each in records), default=0.0),
            requests=tuple(records),
            senders=tuple(part.sender for part in finished),
            settings=described,
            was_interrupted=was_interrupted,
        )

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_LIMIT_S
        for _ in self._plans:
            number, message = self._hear(deadline)
            assert number is not None, "interrupts are heard from the load's beginning on"
            if isinstance(message, Refused):
                raise ConfigError(message.why)
            if not isinstance(message, Ready):
                raise self._lost(number)

    def _gather(
        self, begins_at: float, num_planned: int, on_progress: OnProgress | None
    ) -> tuple[list[Finished], bool]:
        """Follows the load to its end; says whether it was interrupted."""
        progressing = Progressing(num_planned)
        limit_s = self._plans[0].settings.limit_s
        finished: dict[int, Finished] = {}
        was_interrupted = False
        with _interrupts_heard(lambda: self._heard.put((None, None))):
            while len(finished) < len(self._plans):
                silence_s = STOP_LIMIT_S if was_interrupted else limit_s + _GRACE_S
                number, message = self._hear(max(begins_at, time.monotonic()) + silence_s)
                if number is None:
                    if was_interrupted:
                        raise KeyboardInterrupt
                    was_interrupted = True
                    for other in set(range(len(self._plans))) - finished.keys():
                        self._tell(other, Stop())
                    continue
                match message:
                    case Tick():
                        progressing.add(number, message)
                        if on_progress is not None:
                            on_progress(progressing.now(time.monotonic() - begins_at))
                    case Finished():
                        finished[number] = message
                    case None if number in finished:
                        pass
                    case _:
                        raise self._lost(number)
        return [finished[number] for number in sorted(finished)], was_interrupted

    def _hear(self, deadline: float) -> tuple[int | None, FromSender | None]:
        try:
            return self._heard.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise SenderLost("a sender process hangs: it says nothing any more") from None

    def _tell(self, number: int, message: ToSender) -> None:
        stream = self._processes[number].stdin
        assert stream is not None, "it is a pipe"
        try:
            write(cast(BinaryIO, stream), message)
        except BrokenPipeError:
            raise self._lost(number) from None

    def _listen(self, number: int, process: subprocess.Popen[bytes]) -> None:
        stream = process.stdout
        assert stream is not None, "it is a pipe"
        with stream:
            while (message := read_from_sender(cast(BinaryIO, stream))) is not None:
                self._heard.put((number, message))
        self._heard.put((number, None))

    def _lost(self, number: int) -> SenderLost:
        process = self._processes[number]
        process.kill()
        status = process.wait()
        said = b"" if process.stderr is None else process.stderr.read()
        return SenderLost(
            f"a sender process ended with status {status}: {said.decode(errors='replace')[-2000:]}"
        )


@contextlib.contextmanager
def _interrupts_heard(heard: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM call `heard` instead of breaking in anywhere. Only the main thread can have that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: heard()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _by_index(record: RequestRecord) -> int:
    return record.index


def _shares(total: int, num_parts: int) -> list[int]:
    """`total` in so many parts, which differ by one at most."""
    return [total // num_parts + (part < total % num_parts) for part in range(num_parts)]
