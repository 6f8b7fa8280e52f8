"""What sending alone costs: the floor of the coordinator's CPU per streamed token on this system.

A process of its own (`python -m twinpool.bench.send_floor STREAMS BYTES ROUNDS PAUSE_S`) only writes: to as many
connections, in each round pieces of the size of a token's event, on the kind of event loop that the server runs on. On
one machine a send does the receiver's part of TCP too, and wakes it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

import uvloop

from twinpool.bench.server_under_test import ServerFault

ROUNDS = 60
_LIMIT_S = 60.0


async def send_s(num_streams: int, event_bytes: int, pause_s: float) -> float:
    """Seconds of CPU that one send takes, `pause_s` between rounds. This process reads, like the program that follows
    streams does. Raises ServerFault if it cannot be measured."""
    numbers = (num_streams, event_bytes, ROUNDS, pause_s)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "twinpool.bench.send_floor", *map(str, numbers), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None, "it is a pipe"
    loop = asyncio.get_running_loop()
    readers: list[asyncio.BaseTransport] = []
    try:
        async with asyncio.timeout(_LIMIT_S):
            port = int(await process.stdout.readline())
            for _ in range(num_streams):
                reader, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", port)
                readers.append(reader)
            answer = await process.stdout.readline()
            await process.wait()
        return float(answer)
    except (TimeoutError, OSError, ValueError) as exc:
        raise ServerFault(f"the cost of a send was not measured: {exc!r}") from exc
    finally:
        for transport in readers:
            transport.close()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def main(arguments: Sequence[str]) -> None:
    """Prints its port, waits for its clients, writes to them, and prints the seconds of CPU per write."""
    num_streams, event_bytes, num_rounds = map(int, arguments[:3])
    pause_s = float(arguments[3])
    writers: list[asyncio.WriteTransport] = []
    everybody = asyncio.Event()

    class Writer(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            writers.append(transport)  # type: ignore[arg-type]  # uvloop's are of no class of asyncio
            if len(writers) == num_streams:
                everybody.set()

    server = await asyncio.get_running_loop().create_server(Writer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with asyncio.timeout(_LIMIT_S):
        await everybody.wait()
    event = bytes(event_bytes)
    before_s = time.process_time()
    for _ in range(num_rounds):
        for writer in writers:
            writer.write(event)
        await asyncio.sleep(pause_s)
    print((time.process_time() - before_s) / (num_rounds * num_streams), flush=True)
    for writer in writers:
        writer.abort()
    server.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(main(sys.argv[1:]))
