"""How long a sender waits for a link: as long as something moves, and as its rate allows."""

from __future__ import annotations

import asyncio
import socket

import pytest

from twinpool.errors import PeerLost
from twinpool.kv_transfer import pushes
from twinpool.kv_transfer.pushes import PushLog, until_delivered
from twinpool.kv_transfer.tcp_sender import unacknowledged


def test_the_rate_of_a_link_is_that_of_all_its_finished_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pushes.time, "perf_counter", lambda: now[0])
    log = PushLog()
    assert log.seconds_for(1_000_000) == 0.0
    for fence, seconds in ((1, 2.0), (2, 6.0)):
        log.begin(fence, 4_000)
        now[0] += seconds
        log.end(fence)
        log.finish(fence)
    assert log.seconds_for(2_000) == pytest.approx(2.0)


async def test_a_slow_link_is_not_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "STALL_S", 0.02)
    delivered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.2, delivered.set_result, None)
    await until_delivered(delivered, lambda: 0, "decode-0", one_move_s=20.0)
    with pytest.raises(PeerLost, match="no byte"):
        await until_delivered(asyncio.get_running_loop().create_future(), lambda: 0, "decode-0")


def test_what_a_socket_has_taken_is_not_yet_what_the_other_side_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with socket.create_connection(listener.getsockname()) as mine:
            theirs, _ = listener.accept()
            with theirs:
                mine.setblocking(False)
                sent = 0
                try:
                    while True:
                        sent += mine.send(bytes(65536))
                except BlockingIOError:
                    pass
                assert 0 < unacknowledged(mine) <= sent
    assert unacknowledged(mine) == 0
