"""The servers of a comparison. Each is started when it is first needed and stays; only one is loaded at a time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import uvloop

from twinpool.bench.client import Client
from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.noise import Noise, NoiseMeter
from twinpool.bench.server_under_test import Samples, ServerFault, ServerUnderTest
from twinpool.bench.serving.generator import run_load
from twinpool.bench.serving.record import Run
from twinpool.bench.serving.server_facts import ServerFacts, ask_server
from twinpool.bench.serving.settings import TAKE_SALTS, LoadSettings, ServerKind
from twinpool.bench.serving.workload import PlannedRequest

_FLUSH_LIMIT_S = 30.0
_REST_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """What every arm of ours gets. `common` are flags of `twinpool serve` that all share, the model first."""

    common: tuple[str, ...]
    kv_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Trial:
    """One load on one arm. The noise is in the run's settings too."""

    arm: Arm
    run: Run
    noise: Noise


@dataclass(slots=True)
class _Served:
    facts: ServerFacts
    url: str
    server: ServerUnderTest | None
    """None: it ran already."""


@dataclass(slots=True)
class Stand:
    """Starts, loads and stops servers; a context that stops all of them in the end. Logs stay in `log_folder`.

    `api_key` is the one for servers that run already.
    """

    hardware: Hardware
    log_folder: Path
    api_key: str | None = None
    _id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    """In salts and request ids: what an earlier comparison has left on a server is of no use to this one."""
    _loop: asyncio.Runner = field(default_factory=lambda: asyncio.Runner(loop_factory=uvloop.new_event_loop))
    _served: dict[str, _Served] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(list(self._served))
        self._loop.close()

    def command(self, arm: Arm) -> str:
        """That starts the arm's server, or where it is."""
        return arm.url or " ".join(["twinpool serve", *self._arguments(arm)])

    def find(self, arms: Sequence[Arm]) -> None:
        """Asks those that run already, so that one which does not is told at once. Raises NoServer."""
        for arm in arms:
            if arm.url:
                self._serve(arm)

    def facts(self, arm: Arm) -> ServerFacts:
        """What the arm's server says of itself. Starts it. Raises as `load`."""
        return self._serve(arm).facts

    def how_caches_are_reset(self, arm: Arm) -> str:
        """Between two loads, in words. Starts the server. Raises as `load`."""
        kind = self.facts(arm).kind
        if kind in TAKE_SALTS:
            return "each load has a cache_salt of its own"
        if kind is ServerKind.SGLANG:
            return "flushed before each load"
        return "not reset, as this server knows no way; the loads' prompts differ"

    def load(self, arm: Arm, requests: Sequence[PlannedRequest], slot: str) -> Trial:
        """Sends `requests` and waits for their ends. `slot` names the load: nothing that the prompts of another one
        have left in a prefix cache is used, where the server knows a way.

        Raises:
            ServerFault, NoServer: the arm's server does not start, is not there, or ended meanwhile.
            KeyboardInterrupt: Ctrl-C. What was sent is cancelled.
        """
        served = self._serve(arm)
        salt = f"{self._id}-{slot}"
        settings = LoadSettings(
            served.url,
            served.facts.model,
            kind=served.facts.kind,
            api_key=self._api_key(served.server),
            extra_body=self._fresh(served, salt),
            keep_output=True,
            request_id_prefix=f"{salt}-{arm.name}",
        )
        meter, before_s = NoiseMeter(), _cpu_s(served)
        run = run_load(requests, settings)
        if run.was_interrupted:
            raise KeyboardInterrupt
        _check_alive(arm, served, run)
        senders_s = sum(sender.cpu_share for sender in run.senders) * run.duration_s
        noise = meter.stop(_cpu_s(served) - before_s + senders_s)
        named: dict[str, Any] = {"arm": arm.name, "slot": slot, "noise": asdict(noise)}
        return Trial(arm, msgspec.structs.replace(run, settings=run.settings | named), noise)

    def counts(self, arm: Arm) -> Samples:
        """What the arm's server, which was started here, has done until it came to rest. Raises ServerFault."""
        server = self._own(arm)
        self._loop.run(server.wait_until_rest(_REST_LIMIT_S))
        return self._loop.run(server.samples())

    def _own(self, arm: Arm) -> ServerUnderTest:
        server = self._serve(arm).server
        assert server is not None, "it was started here"
        return server

    def stop(self, names: Sequence[str]) -> None:
        """Stops the servers of these arms, those that were started here. Ctrl-C meanwhile kills them all."""
        served = [self._served.pop(name) for name in names if name in self._served]
        self._loop.run(_stop_all([each.server for each in served if each.server is not None]))

    def _serve(self, arm: Arm) -> _Served:
        if arm.name not in self._served:
            server = None
            if not arm.url:
                server = ServerUnderTest.start(self._arguments(arm), self.log_folder / f"{arm.name}.log")
            try:
                if server is not None:
                    self._loop.run(server.wait_ready())
                url = arm.url if server is None else server.url
                facts = self._loop.run(ask_server(url, self._api_key(server), None))
            except BaseException as exc:
                if server is not None:
                    self._loop.run(server.stop())
                if isinstance(exc, ServerFault):
                    raise ServerFault(f"arm {arm.name}: {exc}") from exc
                raise
            self._served[arm.name] = _Served(facts, url, server)
        return self._served[arm.name]

    def _fresh(self, served: _Served, salt: str) -> dict[str, Any]:
        """Makes prefix caches of no use to the next load: fields for its requests, or a call now."""
        if served.facts.kind in TAKE_SALTS:
            return {"cache_salt": salt}
        if served.facts.kind is ServerKind.SGLANG:
            self._loop.run(_flush(Client(served.url, self.api_key)))
        return {}

    def _api_key(self, server: ServerUnderTest | None) -> str | None:
        """Ours want none."""
        return self.api_key if server is None else None

    def _arguments(self, arm: Arm) -> list[str]:
        return arm.arguments(self.hardware.common, self.hardware.kv_tokens, self.hardware.block_size)


async def _stop_all(servers: Sequence[ServerUnderTest]) -> None:
    await asyncio.gather(*(server.stop() for server in servers))


async def _flush(client: Client) -> None:
    try:
        answer = await client.get("/flush_cache", _FLUSH_LIMIT_S)
    except (OSError, TimeoutError) as exc:
        raise ServerFault(f"/flush_cache does not answer: {exc or 'no answer in time'}") from exc
    if answer.status != 200:
        raise ServerFault(f"/flush_cache answers {answer.status}: its prefix cache cannot be reset")


def _check_alive(arm: Arm, served: _Served, run: Run) -> None:
    """Raises ServerFault if the server ended while it was loaded: what failed then is no figure of the arm."""
    server = served.server
    if server is not None and server.process is not None and (status := server.process.poll()) is not None:
        raise ServerFault(
            f"arm {arm.name}: the server ended with status {status} while it was loaded; its last words:\n"
            f"{server.log_tail()}"
        )
    if run.requests and not any(record.status for record in run.requests):
        raise ServerFault(f"arm {arm.name}: no request was answered: {run.requests[-1].error}")


def _cpu_s(served: _Served) -> float:
    """Of a server elsewhere nothing is known: it counts as others' work."""
    return sum(served.server.cpu_s().values()) if served.server is not None else 0.0
