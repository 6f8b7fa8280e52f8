"""What both ends of a link between a prefill and a decode worker share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from twinpool.config import Encryption, TransportName
from twinpool.errors import ProtocolError
from twinpool.join_token import VARIABLE, JoinToken
from twinpool.kv_transfer.connector import KVRegion, LocalEnd
from twinpool.kv_transfer.mirrored import Mirror
from twinpool.kv_transfer.shm_pool import SharedPool
from twinpool.messages import Message

PROBE_LIMIT_S = 15.0
TURNED_AWAY = (
    f"does not accept this join token, or is no Twinpool: give both the same --join-token-file or {VARIABLE}"
)
"""What is wrong with a channel that takes connections and breaks them off."""

OnPeerMessage = Callable[[str, str, Message], None]
"""(worker id, incarnation, message)"""
OnJunk = Callable[[str, ProtocolError], None]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a task that its owner cancels at the end, and whose failure is the worker's."""


@dataclass(frozen=True, slots=True)
class LocalPool:
    """This worker's KV pool as links see it. `probe_blocks` lie behind the blocks that the role's core deals out. If
    the pool is on a device, `region` is its `mirror`."""

    region: KVRegion
    shared: SharedPool | None
    probe_blocks: tuple[int, ...]
    fingerprint: str
    mirror: Mirror | None = None


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Who this worker is and how it wants KV to travel. `host` tells machines apart (not an address); `join_token` lets
    workers talk to each other.

    `life` names the lock by which other processes of this host tell whether this one lives; "" if it holds none.
    `encryption` is when KV must not go through a socket as it is; whether two workers are on one host, `host` says.
    A link that fails or is lost is tried again after each of `reopen_pauses_s`, in seconds; then it is given up.
    """

    end: LocalEnd
    host: str
    wanted: TransportName
    transports: tuple[str, ...]
    join_token: JoinToken
    faults: str = ""
    strict: bool = False
    reopen_pauses_s: tuple[float, ...] = (1.0, 4.0, 15.0)
    life: str = ""
    encryption: Encryption = Encryption.AUTO
