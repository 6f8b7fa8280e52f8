"""Handing finished layers over while the device goes on computing.

The model launches a layer's kernels and says so; the host is then far ahead of the device. An event on the compute
stream marks the place, a thread waits for it and only then calls `on_layer_done`: never before the layer's last byte
is written, and without a pause in what the model launches.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol

import torch

from twinpool.engine.models import LayerDone


class Event(Protocol):
    """A mark in the device's work."""

    def synchronize(self) -> None:
        """Waits, without the interpreter lock, until the device is past the mark."""
        ...


def mark(device: torch.device) -> Event:
    """A mark behind all that was launched on the current stream; who waits for it leaves the processor to others."""
    event: Any = torch.cuda.Event  # torch leaves its constructor untyped
    behind: Event = torch.cuda.current_stream(device).record_event(event(blocking=True))
    return behind


class LayerHandover:
    """A context manager around the launches of one step. At its end every launched layer was handed over.

    `record()` marks what has been launched so far. `on_layer_done(layer)` is called in order, one call at a time, on a
    thread of its own; what it raises is raised at the end, and no more layers are handed over. A device that never
    gets past a mark holds the step up like any kernel that does not end: the worker's vigil sees to it.
    """

    def __init__(self, on_layer_done: LayerDone, record: Callable[[], Event]) -> None:
        self._on_layer_done = on_layer_done
        self._record = record
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-layers")
        self._handed_over: list[Future[None]] = []
        self._has_failed = False

    def layer_launched(self, layer: int) -> None:
        """All that writes this layer's KV has been launched."""
        self._handed_over.append(self._thread.submit(self._hand_over, layer, self._record()))

    def __enter__(self) -> LayerHandover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if exc is None:
            for handed_over in self._handed_over:
                handed_over.result()

    def _hand_over(self, layer: int, event: Event) -> None:
        if self._has_failed:
            return
        try:
            event.synchronize()
            self._on_layer_done(layer)
        except BaseException:
            self._has_failed = True
            raise
