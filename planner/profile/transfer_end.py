"""The sending end of measured transfers, in a process of its own: `python -m twinpool.planner.profile.transfer_end
SETTINGS`. Prints one JSON line for each round of each transfer, or the error that ended it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence

import msgspec

from twinpool.bench.engine.transfers import LIMIT_S, link
from twinpool.config import TransportName
from twinpool.engine.host_memory import host_memory
from twinpool.engine.model_config import ModelConfig
from twinpool.errors import TransferError
from twinpool.kv_transfer import transports
from twinpool.kv_transfer.connector import KVRegion
from twinpool.layout import Dtype, KVLayout
from twinpool.planner.profile.transfer_runs import Moved, Skipped, TransferSettings

_SPARE = 2
"""The pools have so many times the blocks that one transfer takes, so that those can lie anywhere."""


def main(arguments: Sequence[str]) -> None:
    """Measures the transports that work here, in order."""
    settings = msgspec.json.decode(arguments[0], type=TransferSettings)
    if settings.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {settings.core})
    layout = ModelConfig.from_dir(settings.directory).kv_layout(settings.block_size, Dtype(settings.dtype))
    reasons = transports.available()
    with asyncio.Runner() as loop:
        for name in settings.transports:
            if (reason := reasons[name]) is not None:
                _say(Skipped(name.value, reason))
                continue
            try:
                loop.run(_measure(name, layout, settings))
            except TimeoutError:
                _say(Skipped(name.value, f"the other end did not answer within {LIMIT_S:.0f} s"))
            except TransferError as exc:
                _say(Skipped(name.value, str(exc)))


async def _measure(name: TransportName, layout: KVLayout, settings: TransferSettings) -> None:
    counts = [layout.num_blocks(tokens) for tokens in settings.tokens]
    num_blocks = _SPARE * max(counts)
    memory = host_memory(num_blocks * layout.block_bytes)
    memory[:] = os.urandom(layout.block_bytes) * num_blocks
    async with link(name, KVRegion(memory, layout, num_blocks), num_blocks, settings.other_core) as far:
        for number in range(1 + settings.rounds):
            for count in counts:
                seconds = await far.move_s(count)
                if number:  # the first meets pages that nobody has mapped
                    _say(Moved(name.value, count * layout.block_bytes, seconds))


def _say(message: Moved | Skipped) -> None:
    print(json.dumps(msgspec.to_builtins(message)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
