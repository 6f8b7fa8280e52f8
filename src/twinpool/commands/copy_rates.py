"""How fast bytes move on this machine, measured in about a second: the bounds of any KV transfer within it.

All rates are in 1e9 bytes per second, the best of several tries with a buffer that has been touched before.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory

import numpy as np
from numpy.typing import NDArray

NUM_BYTES = 32 << 20
Bytes = NDArray[np.uint8]

_TRIES = 5
_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 10.0


def measure() -> dict[str, float | None]:
    """GB/s of copies in memory and into shared memory, and of loopback TCP; None: not possible."""
    source = np.ones(NUM_BYTES, dtype=np.uint8)
    target = np.zeros(NUM_BYTES, dtype=np.uint8)
    return {
        "memory": _best(lambda: np.copyto(target, source)),
        "shared_memory": _shared_memory(source),
        "loopback_tcp": _loopback_tcp(source),
    }


def _best(move: Callable[[], object]) -> float:
    """The rate of the fastest of several calls that each move `NUM_BYTES`, after one that does not count."""
    move()
    seconds = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        move()
        seconds.append(time.perf_counter() - start)
    return NUM_BYTES / min(seconds) / 1e9


def _shared_memory(source: Bytes) -> float | None:
    try:
        shared = SharedMemory(create=True, size=NUM_BYTES)
    except OSError:
        return None
    try:
        return _copy_into(shared, source)
    finally:
        shared.close()
        shared.unlink()


def _copy_into(shared: SharedMemory, source: Bytes) -> float:
    # In a function of its own: the mapping cannot be closed while an array looks into it.
    target: Bytes = np.ndarray((NUM_BYTES,), dtype=np.uint8, buffer=shared.buf)
    return _best(lambda: np.copyto(target, source))


def _loopback_tcp(source: Bytes) -> float | None:
    """One connection, one thread at each end; the receiver answers one byte when all has arrived."""
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            sender = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=_TIMEOUT_S))
            receiver = stack.enter_context(listener.accept()[0])
        except OSError:
            return None
        receiver.settimeout(_TIMEOUT_S)
        thread = threading.Thread(target=_receive, args=(receiver,))
        thread.start()
        try:
            return _best(lambda: _send(sender, source))
        except OSError:
            return None
        finally:
            sender.shutdown(socket.SHUT_RDWR)
            thread.join()


def _send(connection: socket.socket, source: Bytes) -> None:
    connection.sendall(source.data)
    connection.recv(1)


def _receive(connection: socket.socket) -> None:
    buffer = bytearray(_CHUNK_BYTES)
    missing = NUM_BYTES
    while num_bytes := connection.recv_into(buffer, min(missing, _CHUNK_BYTES)):
        missing -= num_bytes
        if missing == 0:
            connection.sendall(b"1")
            missing = NUM_BYTES
