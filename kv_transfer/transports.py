"""Which transports there are, which one a link uses, and how to open its two ends.

The order of preference on "auto" is: `shm` on one host, `ucx` if both workers have it and KV may travel as it is,
`tcp`. A transport asked for by name is used or refused, never replaced.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import TYPE_CHECKING

from twinpool.config import TransportName
from twinpool.errors import TransportUnavailable
from twinpool.kv_transfer import loopback, shm, shm_pool, tcp, tcp_sender, ucx, ucx_sender, ucx_worker
from twinpool.kv_transfer.connector import KVReceiver, KVRegion, KVSender, LocalEnd
from twinpool.kv_transfer.faulty import FaultPlan, FaultySender

if TYPE_CHECKING:
    from twinpool.kv_transfer.shm_pool import SharedPool


def available() -> dict[TransportName, str | None]:
    """For each transport None if this machine can use it, else a sentence that says what is missing.

    `loopback` reaches only workers in this process, so it is never chosen unless asked for by name.
    """
    return {
        TransportName.SHM: shm_pool.why_unavailable(),
        TransportName.UCX: ucx_worker.why_unavailable(),
        TransportName.TCP: None,
        TransportName.LOOPBACK: None,
    }


def offered() -> tuple[TransportName, ...]:
    """What other workers are told that this one can use. ucx is only looked for, not loaded, which takes 0.3 s of each
    start: where it does not load, the link that is to use it finds out."""
    usable = [TransportName.TCP, TransportName.LOOPBACK]
    if find_spec("ucxx") is not None:
        usable.insert(0, TransportName.UCX)
    if shm_pool.why_unavailable() is None:
        usable.insert(0, TransportName.SHM)
    return tuple(usable)


def choose(
    wanted: str, mine: Collection[str], theirs: Collection[str], same_host: bool, must_seal: bool
) -> TransportName:
    """The transport of a link between two workers that can use `mine` and `theirs`.

    `must_seal`: KV must not go through a socket unencrypted. UCX moves the bytes as they lie in memory, so it cannot
    encrypt them; `shm` goes through no socket.

    Raises:
        TransportUnavailable: `wanted` is not usable on both sides, or "auto" finds nothing in common.
    """
    common = set(mine) & set(theirs)
    if wanted != TransportName.AUTO:
        if wanted not in common:
            without = " and ".join(
                side for side, names in (("this worker", mine), ("the other", theirs)) if wanted not in names
            )
            raise TransportUnavailable(
                f"transport {wanted!r} was asked for, but {without} cannot use it: here {_listed(mine)}, "
                f"there {_listed(theirs)}; see `twinpool doctor`, or use --transport auto"
            )
        if wanted == TransportName.SHM and not same_host:
            raise TransportUnavailable(
                "transport 'shm' was asked for between two hosts; use ucx, tcp or auto"
            )
        if wanted == TransportName.UCX and must_seal:
            raise TransportUnavailable(
                "transport 'ucx' was asked for, but KV is to be encrypted here, which ucx cannot do; use --transport "
                "tcp or auto, or --kv-encryption off if you trust the network"
            )
        return TransportName(wanted)
    order = [TransportName.SHM] if same_host else []
    order += [] if must_seal else [TransportName.UCX]
    for name in (*order, TransportName.TCP):
        if name in common:
            return name
    raise TransportUnavailable(f"no common transport: here {_listed(mine)}, there {_listed(theirs)}")


async def receiver(
    name: TransportName, region: KVRegion, end: LocalEnd, shared: SharedPool | None = None, *, seal: bool
) -> KVReceiver:
    """Opens this worker's receiving end, for any number of senders. `region` must outlive it.

    `shm` needs `shared`, the shared memory that `region` lies in. With `seal`, what comes through a socket must be
    encrypted; `choose` names no transport that cannot.

    Raises:
        TransportUnavailable: the machine cannot, or `region` is not in shared memory.
        ConfigError: the host cannot be bound.
    """
    match name:
        case TransportName.SHM:
            return shm.ShmReceiver(region, shared)
        case TransportName.TCP:
            return tcp.TcpReceiver(region, end, seal=seal)
        case TransportName.UCX:
            return ucx.UcxReceiver(region, end)
        case TransportName.LOOPBACK:
            return loopback.LoopbackReceiver(region)
        case TransportName.AUTO:
            raise TransportUnavailable("'auto' is a wish, not a transport; `choose` settles it")


async def sender(
    name: TransportName, address: bytes, region: KVRegion, end: LocalEnd, faults: str = "", *, seal: bool
) -> KVSender:
    """Opens a link to the receiver at `address`. `region` is this worker's pool and must outlive it. With `seal`, one
    that takes KV through a socket unencrypted is refused.

    `faults` is a `FaultPlan` specification (tests, `--faults`); "" breaks nothing.

    Raises:
        TransportUnavailable: the machine cannot.
        PeerLost: nothing answers at `address`.
        ConfigError: `faults` is malformed.
    """
    if not faults:
        return await _plain_sender(name, address, region, end, seal=seal)
    plan = FaultPlan.parse(faults)

    async def connect(pool: KVRegion) -> KVSender:
        return await _plain_sender(name, address, pool, end, seal=seal)

    return await FaultySender.open(plan, region, connect)


async def _plain_sender(
    name: TransportName, address: bytes, region: KVRegion, end: LocalEnd, *, seal: bool
) -> KVSender:
    match name:
        case TransportName.SHM:
            sender = shm.ShmSender(address, region)
            sender.map_pages()
            return sender
        case TransportName.TCP:
            return await tcp_sender.TcpSender.connect(address, region, end, seal=seal)
        case TransportName.UCX:
            return ucx_sender.UcxSender(address, region, end)
        case TransportName.LOOPBACK:
            return loopback.LoopbackSender(address, region, end)
        case TransportName.AUTO:
            raise TransportUnavailable("'auto' is a wish, not a transport; `choose` settles it")


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(str(name) for name in names)) or "none"
