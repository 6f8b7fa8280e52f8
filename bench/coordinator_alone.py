"""A real coordinator and its HTTP endpoint in a process of their own, without workers: what `many_streams.py` measures.

    python -m twinpool.bench.coordinator_alone [MODEL]

Of MODEL only the tokenizer is loaded. It prints the port of its HTTP endpoint and the address that workers connect to,
takes the join token from the environment, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

import uvloop

from twinpool import collector
from twinpool.config import CoordinatorConfig, GatewayConfig
from twinpool.coordinator.gateway.http_server import serve_http
from twinpool.coordinator.gateway.meter import GatewayMeter
from twinpool.coordinator.gateway.routes import create_app
from twinpool.coordinator.server import Coordinator
from twinpool.engine.model_files import ResolvedModel, resolve
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import TwinpoolError
from twinpool.join_token import VARIABLE, JoinToken

_STOP_S = 2.0


async def _serve(model: ResolvedModel, token: JoinToken) -> None:
    config = CoordinatorConfig(port=0, drain_s=0.0, join_token=token)
    limits, meter = GatewayConfig(), GatewayMeter()
    over = asyncio.Event()
    failures: list[TwinpoolError] = []

    def fail(error: TwinpoolError) -> None:
        failures.append(error)
        over.set()

    tokenizer = Tokenizer.from_dir(model.path)
    coordinator = Coordinator(config, tokenizer.eos_token_ids, on_failure=fail)
    await coordinator.start()
    app = create_app(coordinator, tokenizer, model.name, limits=limits, meter=meter)
    http = await serve_http(app, config.host, config.port, limits, meter, fail)
    collector.begin()
    print(http.port, coordinator.endpoint, flush=True)
    asyncio.get_running_loop().add_reader(0, over.set)
    await over.wait()
    await coordinator.drain_and_stop()
    await http.stop(_STOP_S)
    if failures:
        raise failures[0]


def main(argv: Sequence[str]) -> int:
    """Serves until standard input ends."""
    collector.put_off()
    token = JoinToken(os.environ[VARIABLE])
    try:
        model = resolve(argv[0] if argv else None, needs_weights=False)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            loop.run(_serve(model, token))
    except TwinpoolError as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
