"""What a worker is made of in one role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from twinpool.config import LinkConfig
from twinpool.engine.block_pool import BlockPool
from twinpool.messages import Register
from twinpool.metrics import Counters
from twinpool.worker.core import RoleCore
from twinpool.worker.links import LinkSettings, LocalPool
from twinpool.worker.step_thread import Runner


class CountingCore(RoleCore, Protocol):
    """A role core as its process has it: the shell adds to its counters what only the shell sees, and the core of the
    next role inherits its pool."""

    counters: Counters
    pool: BlockPool


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """A worker's parts. `register` is its offer to the coordinator; the shell fills in the endpoint. `on_silence` is
    called when it has left all links, before anybody hears that it leaves: from then on it writes nowhere."""

    core: CountingCore
    runner: Runner
    pool: LocalPool
    register: Register
    link: LinkConfig
    settings: LinkSettings
    peer_bind: str
    step_timeout_s: float
    on_silence: Callable[[], None] = lambda: None
