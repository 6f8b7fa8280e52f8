"""Control channels over real sockets: what arrives, what cannot be reached, and addresses that do not work."""

from __future__ import annotations

import asyncio

import pytest
from support.join_token import TEST_TOKEN

from twinpool.channel import DealerChannel, RouterChannel
from twinpool.errors import ConfigError, PeerLost, ProtocolError
from twinpool.messages import Left, Message, Stop

DEADLINE_S = 10.0
ANY_PORT = "tcp://127.0.0.1:*"


class Heard:
    """What one end was given, in order."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str, Message | ProtocolError]] = asyncio.Queue()

    def __call__(self, identity: str, what: Message | ProtocolError) -> None:
        self._queue.put_nowait((identity, what))

    async def next(self) -> tuple[str, Message | ProtocolError]:
        async with asyncio.timeout(DEADLINE_S):
            return await self._queue.get()


async def test_both_directions_and_junk_between_messages() -> None:
    above, below = Heard(), Heard()
    with (
        RouterChannel(ANY_PORT, TEST_TOKEN, above, above) as router,
        DealerChannel(router.endpoint, "w/1", TEST_TOKEN, below, below) as dealer,
    ):
        dealer.send(Left("first"))
        assert await above.next() == ("w/1", Left("first"))
        dealer._socket.send(b"\xc1 no MessagePack")
        identity, error = await above.next()
        assert (identity, type(error)) == ("w/1", ProtocolError)
        dealer.send(Left("second"))
        assert await above.next() == ("w/1", Left("second"))
        router.send("w/1", Stop())
        assert await below.next() == ("", Stop())


async def test_an_unknown_peer_and_a_closed_channel_are_lost() -> None:
    heard = Heard()
    router = RouterChannel(ANY_PORT, TEST_TOKEN, heard, heard)
    with pytest.raises(PeerLost, match="nobody/1"):
        router.send("nobody/1", Stop())
    router.close()
    router.close()
    with pytest.raises(PeerLost, match="closed"):
        router.send("nobody/1", Stop())


async def test_an_address_that_does_not_work_is_named() -> None:
    heard = Heard()
    with RouterChannel(ANY_PORT, TEST_TOKEN, heard, heard) as router:
        with pytest.raises(ConfigError, match=f"{router.endpoint}.*cannot be bound.*choose another"):
            RouterChannel(router.endpoint, TEST_TOKEN, heard, heard)
        for nonsense in ("10.0.0.1:7000", "tcp://no-port"):
            with pytest.raises(ConfigError, match=f"{nonsense}.*like tcp://10.0.0.1:7000"):
                DealerChannel(nonsense, "w/1", TEST_TOKEN, heard, heard)
