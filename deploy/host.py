"""Workers as processes of this host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from twinpool.config import MOST_WORKERS, Role
from twinpool.coordinator.launch import WorkerSpec
from twinpool.coordinator.scaler import FAILURE_SHOWN_S, Premises

_NUM_BLOCKS = "--num-blocks="
_DEVICE = "--device="


class HostScaler:
    """Workers of this host.

    One that comes later is like those of the start, and gets the cores and the device of one that has gone; if there is
    none, it stays on no cores of its own, and on the device with the fewest workers. Its KV pool is as large as the
    others'.
    """

    def __init__(self, premises: Premises) -> None:
        self._launcher = premises.launcher
        self._premises = premises

    def begin(self) -> None:
        """As `Scaler.begin`."""
        self._launcher.start(self._premises.specs)

    def workers(self) -> Mapping[str, Role]:
        """As `Scaler.workers`."""
        return {spec.worker_id: spec.role for spec in self._launcher.kept()}

    def waits_for(self) -> str:
        """As `Scaler.waits_for`."""
        return "its process to load the model and join"

    def failed(self) -> Mapping[str, str]:
        """As `Scaler.failed`."""
        return self._launcher.failed(FAILURE_SHOWN_S)

    def why_no_start(self) -> str:
        """As `Scaler.why_no_start`: only the bound on workers is known before one tries."""
        num_workers = len(self._launcher.kept())
        return (
            "" if num_workers < MOST_WORKERS else f"this host runs {num_workers} workers, as many as may be"
        )

    def start(self, role: Role) -> None:
        """As `Scaler.start`."""
        place = self._launcher.take_place() or self._further_place()
        arguments = [argument for argument in place.arguments if not argument.startswith(_NUM_BLOCKS)]
        if (num_blocks := self._premises.num_blocks()) is not None:
            arguments.append(f"{_NUM_BLOCKS}{num_blocks}")
        spec = replace(place, worker_id=self._free_id(role), role=role, arguments=tuple(arguments))
        self._launcher.start([spec])

    def stop(self, worker_id: str, role: Role) -> None:  # noqa: ARG002  # who it is says its name
        """As `Scaler.stop`."""
        self._launcher.retire(worker_id)

    def assign(self, worker_id: str, role: Role) -> None:
        """As `Scaler.assign`."""
        self._launcher.assign(worker_id, role)

    async def close(self) -> None:
        """As `Scaler.close`: the server itself ends what its launcher has started."""

    def _further_place(self) -> WorkerSpec:
        used = Counter(map(_device, self._launcher.kept()))
        return replace(min(self._premises.specs, key=lambda spec: used[_device(spec)]), cores=())

    def _free_id(self, role: Role) -> str:
        used = {*self._premises.members(), *self._launcher.names()}
        return next(name for i in count() if (name := f"{role}-{i}") not in used)


def _device(spec: WorkerSpec) -> str:
    return next((argument for argument in spec.arguments if argument.startswith(_DEVICE)), "")
