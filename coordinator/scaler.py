"""Who starts and ends workers, as the coordinator knows it: `deploy/` has those that there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from twinpool.config import Role
from twinpool.coordinator.launch import Launcher, WorkerSpec

FAILURE_SHOWN_S = 600.0
"""So long a failure is shown, and live tuning waits, unless the same is tried again."""


class Scaler(Protocol):
    """Keeps workers running, by id. No method waits for a worker: that it has joined, or has gone, is heard from it."""

    def begin(self) -> None:
        """Starts the workers of the server's start."""
        ...

    def workers(self) -> Mapping[str, Role]:
        """The roles of the workers that it keeps running, by id, whether they have joined or not: they are started
        again if they end. One that has no name before it joins has another one here until then."""
        ...

    def waits_for(self) -> str:
        """What workers that have not joined are waited for, in words."""
        ...

    def failed(self) -> Mapping[str, str]:
        """Why, by the id of a worker that it has given up, or by what it could not do. Within `FAILURE_SHOWN_S`, and
        until it starts another worker of that role."""
        ...

    def why_no_start(self) -> str:
        """Why it cannot start one more now, and what to do instead; empty: it can."""
        ...

    def start(self, role: Role) -> None:
        """Starts one more worker of that role, with an id that no other has."""
        ...

    def stop(self, worker_id: str, role: Role) -> None:
        """That worker, of this role, holds nothing and is told to end, or has never joined: it is not started again,
        and does not stay. Does nothing if it is not one of these."""
        ...

    def assign(self, worker_id: str, role: Role) -> None:
        """That worker has, or is about to have, this role: should it be started again, then with that. Does nothing
        if it is not one of these, or if nobody can say how it is started again."""
        ...

    async def close(self) -> None:
        """Does nothing more. Workers are not its matter then: the server tells them to stop."""
        ...


class Member(NamedTuple):
    """A worker that has joined. One that `is_leaving` is being drained."""

    role: Role
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class Premises:
    """What a scaler may know of the server that it keeps workers for.

    `launcher` starts processes on this host, `specs` are the workers of the start. `members()` are those that have
    joined, from wherever, by id; the smallest of their KV pools has `num_blocks()` (None: there is none yet). Workers
    connect to `endpoint`, with `secrets` in their environment.
    """

    launcher: Launcher
    specs: Sequence[WorkerSpec]
    members: Callable[[], Mapping[str, Member]]
    num_blocks: Callable[[], int | None]
    endpoint: str
    secrets: Mapping[str, str]


MakeScaler = Callable[[Premises], Scaler]
