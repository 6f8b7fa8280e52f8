"""Everything of one server on this host: model files, coordinator, HTTP endpoint, workers, signals."""

from __future__ import annotations

import asyncio
import logging
import signal
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

import uvloop

from twinpool import collector
from twinpool.config import CoordinatorConfig, GatewayConfig, is_loopback
from twinpool.coordinator.gateway.http_server import serve_http
from twinpool.coordinator.gateway.key_ring import KeyRing
from twinpool.coordinator.gateway.meter import GatewayMeter
from twinpool.coordinator.gateway.routes import create_app
from twinpool.coordinator.launch import Launcher, WorkerSpec
from twinpool.coordinator.scaler import MakeScaler, Premises, Scaler
from twinpool.coordinator.server import Coordinator
from twinpool.coordinator.tuning import Tuner
from twinpool.engine.model_files import ResolvedModel, resolve
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.join_token import VARIABLE
from twinpool.kv_transfer.shm_pool import sweep
from twinpool.private_log import log_to_stderr

log = logging.getLogger(__name__)

HTTP_STOP_S = 2.0
LEAVE_S = 5.0
POLL_S = 0.02


def serve(
    config: CoordinatorConfig,
    gateway: GatewayConfig,
    model: str | None,
    workers: Sequence[WorkerSpec],
    make_scaler: MakeScaler,
    tuner: Tuner | None = None,
) -> int:
    """Serves `model` on `workers`, which a scaler starts, until SIGTERM or Ctrl-C; returns the exit status.

    The first signal drains: nothing new is admitted, what runs has `drain_s` seconds. A second one stops at once.
    SIGHUP reads the API keys again. `tuner` runs beside it; should it fail, serving goes on without.

    Raises:
        ModelError, ConfigError: it cannot start; the message says what to change.
    """
    log_to_stderr("coordinator")
    keys = KeyRing(gateway.api_keys_file, gateway.api_keys) if _has_keys(gateway) else None
    if keys is None and not is_loopback(config.host):
        log.warning(
            "--host is %s and there are no API keys: ANYONE WHO REACHES THIS ADDRESS CAN USE THIS SERVER; "
            "make keys with `twinpool api-key new --tenant NAME` and give --api-keys FILE",
            config.host,
        )
    resolved = resolve(model)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        return loop.run(_Site(config, gateway, keys, resolved, workers, make_scaler, tuner).run())


class _Site:
    """The parts of a running server, and the order in which they start and stop."""

    def __init__(
        self,
        config: CoordinatorConfig,
        gateway: GatewayConfig,
        keys: KeyRing | None,
        model: ResolvedModel,
        workers: Sequence[WorkerSpec],
        make_scaler: MakeScaler,
        tuner: Tuner | None,
    ) -> None:
        self._config = config
        self._gateway = gateway
        self._keys = keys
        self._model = model
        self._make_scaler = make_scaler
        self._tuner = tuner
        self._deployment = uuid.uuid4().hex[:12]
        shared = (f"--model-dir={model.path}", f"--deployment={self._deployment}")
        self._workers = [replace(spec, arguments=(*shared, *spec.arguments)) for spec in workers]
        self._stop_asked = asyncio.Event()
        self._hurry = asyncio.Event()
        self._is_ready = False
        self._failure: TwinpoolError | None = None
        self._launcher: Launcher | None = None
        self._told_to_stop: Collection[str] = ()

    async def run(self) -> int:
        """Starts everything, waits for the end, stops everything."""
        loop = asyncio.get_running_loop()
        tokenizer = Tokenizer.from_dir(self._model.path)
        coordinator = Coordinator(
            self._config,
            tokenizer.eos_token_ids,
            end_process=self._end_process,
            on_failure=self._fail,
            tuner=self._tuner,
        )
        name = self._config.served_model_name or self._model.name
        async with AsyncExitStack() as ending:  # in reverse order, each whatever became of the others
            sweep("*")  # of servers that were killed with all their workers
            ending.callback(sweep, self._deployment)
            await coordinator.start()

            def on_exit(worker_id: str, pid: int, reason: str) -> None:
                sweep(self._deployment)  # one that was killed left its pool behind
                coordinator.worker_exited(worker_id, pid, reason)
                if (num_blocks := coordinator.past_num_blocks(worker_id)) is not None:
                    launcher.keep_pool_size(worker_id, num_blocks)

            secrets = {VARIABLE: self._config.join_token.text}
            launcher = Launcher(
                coordinator.endpoint, on_exit, partial(self._on_given_up, coordinator), secrets
            )
            self._launcher = launcher
            scaler = self._make_scaler(self._premises(coordinator, launcher, secrets))
            coordinator.pool_desk.scaler = scaler
            ending.push_async_callback(scaler.close)
            ending.push_async_callback(self._stop_workers, launcher)
            meter = GatewayMeter()
            app = create_app(
                coordinator, tokenizer, name, limits=self._gateway, keys=self._keys, meter=meter,
                pools=coordinator.pool_desk,
            )  # fmt: skip
            http = await serve_http(
                app, self._config.host, self._config.port, self._gateway, meter, self._fail
            )
            ending.push_async_callback(http.stop, HTTP_STOP_S)
            ending.push_async_callback(self._drain, coordinator, launcher)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal, number.name)
            if self._keys is not None:
                loop.add_signal_handler(signal.SIGHUP, self._read_keys_again, self._keys)
            scaler.begin()
            log.info("%s from %s; workers connect to %s", name, self._model.path, coordinator.endpoint)
            await self._until_ready(coordinator, scaler)
            if self._tuner is not None:
                ending.push_async_callback(_ended, asyncio.create_task(self._tuner.run(coordinator)))
            collector.begin()
            if self._is_ready:
                log.info("ready: http://%s:%d/v1", self._config.host, http.port)
            await self._stop_asked.wait()
        if self._failure is not None:
            raise self._failure
        return 0

    def _premises(self, coordinator: Coordinator, launcher: Launcher, secrets: Mapping[str, str]) -> Premises:
        return Premises(
            launcher=launcher,
            specs=self._workers,
            members=coordinator.members,
            num_blocks=coordinator.least_num_blocks,
            endpoint=coordinator.endpoint,
            secrets=secrets,
        )

    async def _until_ready(self, coordinator: Coordinator, scaler: Scaler) -> None:
        """Returns when every pool can execute, or when the server is to stop."""
        deadline = coordinator.now() + self._config.start_timeout_s
        while not self._stop_asked.is_set():
            self._is_ready, missing = coordinator.ready()
            if self._is_ready:
                return
            for name, reason in scaler.failed().items():
                self._fail(ConfigError(f"the server cannot start: {name}: {reason}"))
            if coordinator.now() > deadline:
                limit = f"{self._config.start_timeout_s:.0f} s"
                self._fail(
                    TwinpoolError(f"not ready within {limit}: {missing}; the workers' lines above say more")
                )
            await asyncio.sleep(POLL_S)

    async def _drain(self, coordinator: Coordinator, launcher: Launcher) -> None:
        """Lets running requests end, unless a second signal says to hurry. No worker is started again from here on."""
        launcher.start_no_more()
        self._told_to_stop = coordinator.members()
        draining = asyncio.create_task(coordinator.drain_and_stop())
        hurried = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if draining.done():
            draining.result()
        else:
            draining.cancel()

    async def _stop_workers(self, launcher: Launcher) -> None:
        await launcher.stop(0.0 if self._hurry.is_set() else LEAVE_S, self._told_to_stop)

    def _on_signal(self, name: str) -> None:
        if self._stop_asked.is_set():
            log.warning("%s again: stopping at once", name)
            self._hurry.set()
        else:
            log.info("%s: draining for at most %g s (again: stop at once)", name, self._config.drain_s)
            self._stop_asked.set()

    def _read_keys_again(self, keys: KeyRing) -> None:
        try:
            keys.reload()
        except ConfigError as exc:
            log.error("the API keys stay as they were: %s", exc)

    def _end_process(self, worker_id: str, pid: int) -> None:
        if self._launcher is not None:
            self._launcher.kill(worker_id, pid)

    def _on_given_up(self, coordinator: Coordinator, spec: WorkerSpec, reason: str) -> None:
        log.error("%s is not started again: %s; its lines above say why", spec.worker_id, reason)
        if not self._is_ready:
            self._fail(ConfigError(f"{spec.worker_id} cannot start ({reason}); its lines above say why"))
        if self._launcher is not None and not self._launcher.keeps(spec.role):
            coordinator.pool_given_up(spec.role, f"{spec.worker_id} is not started again ({reason})")

    def _fail(self, error: TwinpoolError) -> None:
        self._failure = self._failure or error
        self._stop_asked.set()


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


def _has_keys(gateway: GatewayConfig) -> bool:
    return bool(gateway.api_keys_file or gateway.api_keys)
