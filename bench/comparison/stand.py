"""The servers of a comparison. Each is started when it is first needed and stays; only one is loaded at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import uvloop

from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.noise import Noise, NoiseMeter
from twinpool.bench.server_under_test import ServerUnderTest
from twinpool.bench.serving.generator import run_load
from twinpool.bench.serving.record import Run
from twinpool.bench.serving.server_facts import ServerFacts, ask_server
from twinpool.bench.serving.settings import LoadSettings
from twinpool.bench.serving.workload import PlannedRequest


class Interrupted(Exception):
    """Ctrl-C came while a load ran: what was found until then is all there is."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What every arm of ours gets. `common` are flags of `twinpool serve` that all share, the model first."""

    common: tuple[str, ...]
    kv_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Trial:
    """One load on one arm."""

    arm: Arm
    run: Run
    noise: Noise


@dataclass(slots=True)
class _Served:
    facts: ServerFacts
    url: str
    server: ServerUnderTest | None


@dataclass(slots=True)
class Stand:
    """Starts, loads and stops servers; a context that stops all of them in the end. Logs are in `log_folder`.

    `api_key` is the one for servers that run already.
    """

    hardware: Hardware
    log_folder: Path
    api_key: str | None = None
    _loop: asyncio.Runner = field(default_factory=lambda: asyncio.Runner(loop_factory=uvloop.new_event_loop))
    _served: dict[str, _Served] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self._served):
            self.stop(name)
        self._loop.close()

    def command(self, arm: Arm) -> str:
        """That starts the arm's server, or where it is."""
        return arm.url or " ".join(["twinpool serve", *self._arguments(arm)])

    def facts(self, arm: Arm) -> ServerFacts:
        """What the arm's server says of itself. Starts it. Raises as `load`."""
        return self._serve(arm).facts

    def load(self, arm: Arm, requests: Sequence[PlannedRequest], slot: str) -> Trial:
        """Sends `requests` and waits for their ends. `slot` names the repetition: nothing that another one's prompts
        have left in a prefix cache is used.

        Raises:
            ServerFault, NoServer: the arm's server does not start, or is not there.
            Interrupted: Ctrl-C.
        """
        served = self._serve(arm)
        salted = {"cache_salt": slot} if served.server is not None else {}
        settings = LoadSettings(
            served.url,
            served.facts.model,
            kind=served.facts.kind,
            api_key=None if served.server is not None else self.api_key,
            extra_body=salted,
            request_id_prefix=f"{slot}-{arm.name}",
        )
        meter, before = NoiseMeter(), self._cpu_s(served)
        run = run_load(requests, settings)
        used_s = (
            self._cpu_s(served) - before + sum(sender.cpu_share for sender in run.senders) * run.duration_s
        )
        if run.was_interrupted:
            raise Interrupted
        named = msgspec.structs.replace(run, settings=run.settings | {"arm": arm.name, "slot": slot})
        return Trial(arm, named, meter.stop(used_s))

    def stop(self, name: str) -> None:
        """Stops the arm's server, if it was started here. Its log is deleted: it did nothing wrong."""
        served = self._served.pop(name)
        if served.server is not None:
            self._loop.run(served.server.stop())

    def _serve(self, arm: Arm) -> _Served:
        if arm.name not in self._served:
            server = None
            if not arm.url:
                server = ServerUnderTest.start(self._arguments(arm), self.log_folder / f"{arm.name}.log")
                try:
                    self._loop.run(server.wait_ready())
                except BaseException:
                    self._loop.run(server.stop())
                    raise
            url = arm.url if server is None else server.url
            facts = self._loop.run(ask_server(url, None if server else self.api_key, None))
            self._served[arm.name] = _Served(facts, url, server)
        return self._served[arm.name]

    def _arguments(self, arm: Arm) -> list[str]:
        return arm.arguments(self.hardware.common, self.hardware.kv_tokens, self.hardware.block_size)

    def _cpu_s(self, served: _Served) -> float:
        """Of a server elsewhere nothing is known: it counts as others' work."""
        return sum(served.server.cpu_s().values()) if served.server is not None else 0.0
