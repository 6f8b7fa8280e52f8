"""Who starts and ends workers: this host's launcher, or whatever runs workers elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Protocol

from twinpool.config import MOST_WORKERS, Role
from twinpool.coordinator.launch import Launcher, WorkerSpec

_NUM_BLOCKS = "--num-blocks="
_DEVICE = "--device="


class Scaler(Protocol):
    """Keeps workers running, by id. No method waits for a worker: that it has joined, or has gone, is heard from it."""

    def workers(self) -> Mapping[str, Role]:
        """Those that it keeps running, whether they have joined or not: they are started again if they end."""
        ...

    def failed(self) -> Mapping[str, str]:
        """Those that it has given up, and why."""
        ...

    def why_no_start(self) -> str:
        """Why it cannot start one more now, and what to do instead; empty: it can."""
        ...

    def start(self, role: Role) -> str:
        """Starts one more worker of that role; returns its id, which no other has."""
        ...

    def stop(self, worker_id: str) -> None:
        """That worker holds nothing and is told to end, or has never joined: it is not started again, and does not
        stay. Does nothing if it is not one of these."""
        ...

    def assign(self, worker_id: str, role: Role) -> None:
        """That worker has, or is about to have, this role: should it be started again, then with that. Does nothing
        if it is not one of these."""
        ...


class HostScaler:
    """Workers of this host.

    One that comes later is like those of the start, `specs`, and gets the cores and the device of one that has gone; if
    there is none, it stays on no cores of its own, and on the device with the fewest workers. Its KV pool has
    `num_blocks()`, as the others' (None: it finds its size itself). `members()` are the ids that are in use, those of
    workers from elsewhere too.
    """

    def __init__(
        self,
        launcher: Launcher,
        specs: Sequence[WorkerSpec],
        members: Callable[[], Collection[str]],
        num_blocks: Callable[[], int | None],
    ) -> None:
        self._launcher = launcher
        self._specs = tuple(specs)
        self._members = members
        self._num_blocks = num_blocks
        self._vacated: list[WorkerSpec] = []

    def workers(self) -> Mapping[str, Role]:
        """As `Scaler.workers`."""
        return {spec.worker_id: spec.role for spec in self._launcher.kept()}

    def failed(self) -> Mapping[str, str]:
        """As `Scaler.failed`."""
        return self._launcher.failed()

    def why_no_start(self) -> str:
        """As `Scaler.why_no_start`: only the bound on workers is known before one tries."""
        num_workers = len(self._launcher.kept())
        return (
            "" if num_workers < MOST_WORKERS else f"this host runs {num_workers} workers, as many as may be"
        )

    def start(self, role: Role) -> str:
        """As `Scaler.start`."""
        place = self._vacated.pop() if self._vacated else self._further_place()
        arguments = [argument for argument in place.arguments if not argument.startswith(_NUM_BLOCKS)]
        if (num_blocks := self._num_blocks()) is not None:
            arguments.append(f"{_NUM_BLOCKS}{num_blocks}")
        spec = replace(place, worker_id=self._free_id(role), role=role, arguments=tuple(arguments))
        self._launcher.start([spec])
        return spec.worker_id

    def stop(self, worker_id: str) -> None:
        """As `Scaler.stop`."""
        if (spec := self._launcher.retire(worker_id)) is not None:
            self._vacated.append(spec)

    def assign(self, worker_id: str, role: Role) -> None:
        """As `Scaler.assign`."""
        self._launcher.assign(worker_id, role)

    def _further_place(self) -> WorkerSpec:
        used = Counter(map(_device, self._launcher.kept()))
        return replace(min(self._specs, key=lambda spec: used[_device(spec)]), cores=())

    def _free_id(self, role: Role) -> str:
        used = {*self._members(), *self._launcher.names()}
        return next(name for i in count() if (name := f"{role}-{i}") not in used)


def _device(spec: WorkerSpec) -> str:
    return next((argument for argument in spec.arguments if argument.startswith(_DEVICE)), "")
