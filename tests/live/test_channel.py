"""Control channels over real sockets: what arrives, what cannot be reached, and addresses that do not work."""

from __future__ import annotations

import asyncio
import socket

import pytest
import zmq
from support.join_token import TEST_TOKEN

from twinpool.channel import DealerChannel, RouterChannel
from twinpool.errors import ConfigError, PeerLost, ProtocolError, StrangerRefused
from twinpool.join_token import JoinToken
from twinpool.messages import Left, Message, Stop

DEADLINE_S = 10.0
ANY_PORT = "tcp://127.0.0.1:*"


OTHER_TOKEN = JoinToken("another-" * 6)


class Heard:
    """What one end was given, in order."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str, Message | ProtocolError]] = asyncio.Queue()

    def __call__(self, identity: str, what: Message | ProtocolError) -> None:
        self._queue.put_nowait((identity, what))

    async def next(self) -> tuple[str, Message | ProtocolError]:
        async with asyncio.timeout(DEADLINE_S):
            return await self._queue.get()

    async def refused(self) -> None:
        """Waits for the next that comes, which must be a stranger who is refused."""
        identity, error = await self.next()
        assert (identity, type(error)) == ("", StrangerRefused)


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


async def refused(dealer: DealerChannel) -> None:
    """Waits until the channel knows that it is turned away."""
    async with asyncio.timeout(DEADLINE_S):
        while not dealer.num_refused:  # noqa: ASYNC110  # it counts what zmq tells it, and tells nobody
            await asyncio.sleep(0.01)


async def test_who_has_another_token_gets_nothing_in_and_knows_it() -> None:
    above, below = Heard(), Heard()
    with (
        RouterChannel(ANY_PORT, TEST_TOKEN, above, above) as router,
        DealerChannel(router.endpoint, "w/1", OTHER_TOKEN, below, below) as stranger,
    ):
        stranger.send(Left("let me in"))
        await above.refused()
        await refused(stranger)
        stranger.close()
        with DealerChannel(router.endpoint, "w/2", TEST_TOKEN, below, below) as dealer:
            dealer.send(Left("the right one"))
            while isinstance((said := await above.next())[1], StrangerRefused):
                pass  # its earlier attempts
            assert said == ("w/2", Left("the right one"))
            assert dealer.num_refused == 0


async def test_nobody_is_told_anything_by_a_server_that_has_not_the_token() -> None:
    above, below = Heard(), Heard()
    with (
        RouterChannel(ANY_PORT, OTHER_TOKEN, above, above) as impostor,
        DealerChannel(impostor.endpoint, "w/1", TEST_TOKEN, below, below) as dealer,
    ):
        dealer.send(Left("for the true coordinator only"))
        await refused(dealer)
        await above.refused()


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" + b"\0" * 8 + b"\x7f\x03\x01CURVE" + b"\0" * 64,
        bytes(range(256)) * 64,
    ],
)
async def test_junk_on_the_port_is_refused_and_the_next_message_arrives(junk: bytes) -> None:
    above, below = Heard(), Heard()
    with RouterChannel(ANY_PORT, TEST_TOKEN, above, above) as router:
        host, _, port = router.endpoint.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
            connection.sendall(junk)
        await above.refused()
        with DealerChannel(router.endpoint, "w/1", TEST_TOKEN, below, below) as dealer:
            dealer.send(Left("well"))
            assert await above.next() == ("w/1", Left("well"))


@pytest.mark.parametrize("knows_the_server", [False, True])
async def test_a_zmq_client_of_another_kind_is_refused(knows_the_server: bool) -> None:
    above = Heard()
    with (
        RouterChannel(ANY_PORT, TEST_TOKEN, above, above) as router,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as client,
    ):
        client.setsockopt(zmq.LINGER, 0)
        if knows_the_server:
            public, secret = zmq.curve_keypair()
            client.setsockopt(zmq.CURVE_SERVERKEY, router._keys.server_public)
            client.setsockopt(zmq.CURVE_PUBLICKEY, public)
            client.setsockopt(zmq.CURVE_SECRETKEY, secret)
        client.connect(router.endpoint)
        client.send(b"\xc0")
        await above.refused()


async def test_a_dealer_knows_that_its_connection_broke() -> None:
    above, below = Heard(), Heard()
    with RouterChannel(ANY_PORT, TEST_TOKEN, above, above) as router:
        dealer = DealerChannel(router.endpoint, "w/1", TEST_TOKEN, below, below)
        dealer.send(Left("first"))
        await above.next()
        assert dealer.num_broken == 0
    with dealer:
        async with asyncio.timeout(DEADLINE_S):
            while dealer.num_broken == 0:  # noqa: ASYNC110  # nothing else to wait for
                await asyncio.sleep(0.01)
        with RouterChannel(router.endpoint, TEST_TOKEN, above, above):
            dealer.send(Left("second"))
            assert await above.next() == ("w/1", Left("second"))
        assert dealer.num_refused == 0
