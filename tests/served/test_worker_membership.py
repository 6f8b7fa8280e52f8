"""A worker process and the coordinator it joins: the pace of its heartbeats, and a coordinator that forgot it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from support.join_token import TEST_TOKEN
from support.served_model import save_served_model

from twinpool.channel import RouterChannel
from twinpool.join_token import VARIABLE
from twinpool.messages import Denied, Heartbeat, Left, Message, Register, StartAnew, Stop, Welcome
from twinpool.worker.process import EXIT_CONFIG

DEADLINE_S = 60.0
SOURCE = Path(__file__).resolve().parents[2] / "src"

M = TypeVar("M", bound=Message)


class Front:
    """The coordinator's end of the control channel, with nothing behind it."""

    def __init__(self, bind: str = "tcp://127.0.0.1:*") -> None:
        self._arrived: asyncio.Queue[tuple[str, Message]] = asyncio.Queue()
        self.channel = RouterChannel(bind, TEST_TOKEN, self._take, self._junk)

    def _take(self, identity: str, message: Message) -> None:
        self._arrived.put_nowait((identity, message))

    def _junk(self, identity: str, error: Exception) -> None:
        raise AssertionError((identity, error))

    async def next(self, kind: type[M], but_not_of: str = "") -> tuple[str, M]:
        """The next message of this kind, and whose it is; others before it are dropped."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                identity, message = await self._arrived.get()
                if isinstance(message, kind) and identity != but_not_of:
                    return identity, message


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model."""
    return save_served_model(tmp_path_factory.mktemp("model"))


@contextmanager
def worker_by_hand(front: Front, model: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`twinpool worker` as an operator of another host starts it: no lifeline."""
    command = [
        sys.executable, "-m", "twinpool", "worker", "--role", "colocated", "--id", "by-hand",
        "--connect", front.channel.endpoint, "--model-dir", str(model),
        "--num-blocks", "64", "--max-model-len", "256",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(SOURCE), VARIABLE: TEST_TOKEN.text}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(180)
async def test_a_worker_by_hand_joins_again_as_a_new_process_and_heartbeats_as_it_is_told(
    model: Path,
) -> None:
    front = Front()
    with front.channel, worker_by_hand(front, model) as process:
        first, offer = await front.next(Register)
        assert offer.pid == process.pid
        front.channel.send(first, Welcome(heartbeat_s=0.01))
        for _ in range(3):
            assert (await front.next(Heartbeat))[0] == first
        front.channel.send(first, StartAnew())
        second, offer = await front.next(Register, but_not_of=first)
        assert (offer.worker_id, offer.pid) == ("by-hand", process.pid)
        assert offer.incarnation != first.rpartition("/")[2]
        front.channel.send(second, Welcome(heartbeat_s=0.01))
        assert (await front.next(Heartbeat))[0] == second
        front.channel.send(second, Stop())
        assert (await front.next(Left))[0] == second
        assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0


@pytest.mark.timeout(180)
async def test_a_member_whose_connection_breaks_starts_anew(model: Path) -> None:
    """What was on the connection is lost, and nobody would ever know which token or Cancel that was."""
    front = Front()
    with front.channel, worker_by_hand(front, model) as process:
        first, _ = await front.next(Register)
        front.channel.send(first, Welcome(heartbeat_s=0.01))
        await front.next(Heartbeat)
        front.channel.close()
        again = Front(front.channel.endpoint)
        with again.channel:
            second, offer = await again.next(Register)
            assert (offer.worker_id, offer.pid) == ("by-hand", process.pid)
            assert second != first
            again.channel.send(second, Stop())
            assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0


@pytest.mark.timeout(120)
async def test_a_denied_worker_ends_with_the_status_that_forbids_another_try(model: Path) -> None:
    front = Front()
    with front.channel, worker_by_hand(front, model) as process:
        identity, _ = await front.next(Register)
        front.channel.send(identity, Denied("another model"))
        assert await asyncio.to_thread(process.wait, DEADLINE_S) == EXIT_CONFIG
