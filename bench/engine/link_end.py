"""The receiving end of a measured link, in a process of its own: `python -m twinpool.bench.engine.link_end`.

Reads one JSON command a line from standard input and answers each with one JSON line; ends when the input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence

from twinpool.config import TransportName
from twinpool.engine.host_memory import host_memory
from twinpool.kv_transfer import transports
from twinpool.kv_transfer.connector import KVReceiver, KVRegion, LocalEnd
from twinpool.kv_transfer.shm_pool import SharedPool
from twinpool.layout import Dtype, KVLayout


async def main(arguments: Sequence[str]) -> None:
    """Listens with the transport, layout and core in `arguments`, and follows commands."""
    name = TransportName(arguments[0])
    layers, kv_heads, head_dim, block_size, dtype, num_blocks = json.loads(arguments[1])
    layout = KVLayout(layers, kv_heads, head_dim, block_size, Dtype(dtype))
    if (core := json.loads(arguments[2])) is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    end = LocalEnd("bench-receiver", f"{os.getpid():x}", deployment="bench")
    shared = SharedPool(num_blocks * layout.block_bytes, end) if name is TransportName.SHM else None
    memory = host_memory(num_blocks * layout.block_bytes) if shared is None else shared.memory
    memory[:: 1 << 12] = bytes([1]) * len(memory[:: 1 << 12])  # pages that exist
    region = KVRegion(memory, layout, num_blocks)
    receiver = await transports.receiver(name, region, end, shared, seal=False)
    try:
        await _follow(receiver)
    except BrokenPipeError:  # the other end was killed; what is left to be said goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        await receiver.close()
        del memory, region
        if shared is not None:
            shared.close()


async def _follow(receiver: KVReceiver) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, arguments = json.loads(line)
        match command:
            case "listen":
                answer = receiver.address().hex()
            case "expect":
                receiver.expect(arguments["fence"], arguments["writer"], arguments["blocks"])
                answer = ""
            case _:
                await receiver.arrived(arguments["fence"])
                receiver.forget(arguments["fence"])
                answer = ""
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
