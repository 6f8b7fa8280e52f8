"""A worker process from its start to its exit status."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
import socket
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import setproctitle
import torch
import uvloop

from twinpool import collector
from twinpool.config import Role, TransportName, WorkerConfig, is_loopback
from twinpool.engine.compilation import compiling_once, noticing_compilation
from twinpool.engine.model_runner import Allocate, ModelRunner
from twinpool.engine.processor import processor
from twinpool.errors import (
    ConfigError,
    InvariantViolation,
    ModelError,
    NotAMember,
    StepStuck,
    TwinpoolError,
    WorkerDenied,
)
from twinpool.kernels.jit import KEEPS_COMPILED_CODE
from twinpool.kv_transfer import shm_pool, transports
from twinpool.kv_transfer.connector import KVRegion, LocalEnd
from twinpool.kv_transfer.life import Life
from twinpool.kv_transfer.probe import PROBE_BYTES
from twinpool.kv_transfer.shm_pool import SharedPool
from twinpool.kv_transfer.tcp_wire import family
from twinpool.layout import KVLayout
from twinpool.messages import Register
from twinpool.private_log import log_to_stderr
from twinpool.worker.core import StepTimed
from twinpool.worker.links import LinkSettings, LocalPool
from twinpool.worker.parts import CountingCore, WorkerParts
from twinpool.worker.pool_memory import PoolMemory
from twinpool.worker.process import EXIT_CONFIG, EXIT_FAILED, EXIT_START_ANEW, start_anew, watch_lifeline
from twinpool.worker.shell import WorkerShell
from twinpool.worker.timed_steps import timed_steps

log = logging.getLogger(__name__)

CoreFactory = Callable[[int, KVLayout, str, str], CountingCore]
"""(num_blocks, layout, fingerprint, incarnation) → the core of one role."""


def run_worker(config: WorkerConfig, core_of: Callable[[Role], CoreFactory]) -> int:
    """Runs a worker in this process until it is told to stop; returns the exit status. One that was started by hand
    and lost its coordinator begins anew instead, as a process that holds nothing; one that `serve` started leaves that
    to `serve`.
    """
    setproctitle.setproctitle(_title(config, config.role))
    log_to_stderr(config.link.worker_id)
    process = _Process(config, core_of)
    try:
        require_kv_host(config)
        _bind_threads(config)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            return loop.run(process.run())
    except (ConfigError, ModelError, WorkerDenied) as exc:
        log.error("%s", exc)
        return EXIT_CONFIG
    except NotAMember as exc:
        log.warning("%s; all that it holds is given up", exc)
    except Exception as exc:  # in our log whatever it is: Python's own words may quote a prompt
        if isinstance(exc, TwinpoolError) and not isinstance(exc, InvariantViolation):
            log.error("%s", exc)
        else:
            log.exception("a bug in Twinpool; please report it")
        return EXIT_FAILED
    if config.link.lifeline_fd is None:
        start_anew(process.role, config.link.worker_id)
    return EXIT_START_ANEW


def _title(config: WorkerConfig, role: Role) -> str:
    return f"twinpool worker --role {role} --id {config.link.worker_id}"


def _bind_threads(config: WorkerConfig) -> None:
    if config.engine.cpu_cores and hasattr(os, "sched_setaffinity"):
        wanted = set(config.engine.cpu_cores)
        if absent := wanted - os.sched_getaffinity(0):
            cores = ",".join(map(str, config.engine.cpu_cores))
            raise ConfigError(
                f"--cores is {cores}; this process may not run on {','.join(map(str, sorted(absent)))}"
            )
        os.sched_setaffinity(0, wanted)
    torch.set_num_threads(config.engine.threads)


def require_kv_host(config: WorkerConfig) -> None:
    """Raises ConfigError, before the model is loaded, if a decode worker's KV sockets cannot listen on `--kv-host`."""
    host = config.transfer.host
    if config.role is Role.DECODE:
        try:
            socket.create_server((host, 0), family=family(host)).close()
        except OSError as exc:
            raise ConfigError(
                f"--kv-host is {host!r}, where this machine cannot listen ({exc}); allowed: one of its own addresses"
            ) from exc


def require_graphs(config: WorkerConfig, why_none: str) -> None:
    """Raises ConfigError in strict mode if decode steps are not the CUDA graphs that they were to be: `why_none` says
    why, or is empty."""
    if config.strict and why_none:
        raise ConfigError(f"--strict: {why_none}; with --enforce-eager that is what was asked for")


class _Process:
    """A worker process: one model and one KV pool, and the roles that it has with them, one after the other. `role` is
    the one that it has, or is to have."""

    def __init__(self, config: WorkerConfig, core_of: Callable[[Role], CoreFactory]) -> None:
        self._config = config
        self._core_of = core_of
        self._shell: WorkerShell | None = None
        self._asked_to_stop = False
        self.role = config.role

    async def run(self) -> int:
        """Loads the model and works until told to stop. Raises as `WorkerShell.run` and `load_runner` do."""
        config, loop = self._config, asyncio.get_running_loop()

        def orphaned() -> None:
            loop.call_soon_threadsafe(self._stop, "the coordinator is gone")

        if config.link.lifeline_fd is not None:
            watch_lifeline(config.link.lifeline_fd, orphaned)
        loop.add_signal_handler(signal.SIGTERM, self._stop, "SIGTERM")
        loop.add_signal_handler(signal.SIGINT, self._stop, "Ctrl-C")
        memory = PoolMemory(config, _new_end(config))
        try:
            with noticing_compilation(_say_compiling):
                runner = await asyncio.to_thread(load_runner, config, memory.allocate)
                await asyncio.to_thread(_warm_up, runner, config)
            require_graphs(config, runner.why_no_graphs)
            if not self._asked_to_stop:
                await self._work(runner, memory)
            return 0
        except StepStuck as exc:
            log.error("%s", exc)
            memory.close()
            # No orderly end: the step thread never comes back, and may hold any lock. So this process's life goes on
            # until the process is no more.
            if config.link.lifeline_fd is None:
                start_anew(self.role, config.link.worker_id)
            os._exit(EXIT_FAILED)
        finally:
            memory.close()

    def _stop(self, reason: str) -> None:
        self._asked_to_stop = True
        if self._shell is not None:
            self._shell.stop(reason)

    async def _work(self, runner: ModelRunner, memory: PoolMemory) -> None:
        """In one role after the other, until told to stop."""
        parts = self._parts(runner, memory.shared, _new_end(self._config))
        if self._config.scheduler.hybrid:
            for timed in await asyncio.to_thread(_timed_steps, runner, self._config):
                parts.core.handle(timed, asyncio.get_running_loop().time())
        collector.begin()
        shell = _shell_of(parts)
        while True:
            self._shell = shell
            if self._asked_to_stop:  # while it was made
                shell.stop("the process was told to")
            try:
                reason = await shell.run()
            finally:
                self.role = shell.next_role or self.role
            if shell.next_role is None or self._asked_to_stop:
                log.info("stopped: %s", reason)
                return
            log.info("%s, with the same model and KV pool", reason)
            try:
                parts = await self._next_parts(runner, memory, parts)
                shell = _shell_of(parts)
            except ConfigError as exc:
                raise NotAMember(f"this process cannot be a {self.role} worker: {exc}") from exc

    async def _next_parts(self, runner: ModelRunner, memory: PoolMemory, past: WorkerParts) -> WorkerParts:
        """Those of another role, whose core can find what the `past` one could. Raises ConfigError."""
        end, cache = _new_end(self._config), past.core.pool
        setproctitle.setproctitle(_title(self._config, self.role))
        config = replace(self._config, role=self.role)
        await asyncio.to_thread(memory.fit, self.role, end, runner, cache)
        await asyncio.to_thread(runner.capture_decodes, most_captured_decodes(config))
        require_graphs(config, runner.why_no_graphs)
        parts = self._parts(runner, memory.shared, end)
        parts.core.pool.inherit(cache)
        return replace(
            parts, register=msgspec.structs.replace(parts.register, succeeds=past.register.incarnation)
        )

    def _parts(self, runner: ModelRunner, shared: SharedPool | None, end: LocalEnd) -> WorkerParts:
        config = replace(self._config, role=self.role)
        life = Life(end) if self.role is Role.PREFILL and shm_pool.why_unavailable() is None else None
        parts = worker_parts(config, self._core_of(self.role), runner, end, shared, life.name if life else "")
        return parts if life is None else replace(parts, on_silence=life.close)


def _new_end(config: WorkerConfig) -> LocalEnd:
    """The worker under a new incarnation."""
    transfer = config.transfer
    return LocalEnd(config.link.worker_id, uuid.uuid4().hex[:12], transfer.deployment, transfer.host)


def _shell_of(parts: WorkerParts) -> WorkerShell:
    try:
        return WorkerShell(parts)
    except BaseException:
        parts.on_silence()
        raise


def _warm_up(runner: ModelRunner, config: WorkerConfig) -> None:
    engine = config.engine
    what = f"{processor().name} {engine.model_dir} {runner.dtype} {runner.kv.dtype} {engine.weights}"
    with compiling_once(
        what, lambda: log.info("another process compiles the kernels; this one waits for them")
    ):
        runner.warm_up(most_captured_decodes(config))


def _say_compiling() -> None:
    kept = (
        "and kept for the next start" if KEEPS_COMPILED_CODE else "at each start (twinpool doctor says why)"
    )
    log.info(
        "kernels are compiled for this processor, --dtype and --weights, %s; that takes tens of seconds", kept
    )


def _timed_steps(runner: ModelRunner, config: WorkerConfig) -> list[StepTimed]:
    size, most = runner.num_blocks, config.scheduler.max_num_seqs
    return list(timed_steps(runner, size, runner.layout.block_size, runner.max_model_len, most))


def load_runner(config: WorkerConfig, allocate: Allocate) -> ModelRunner:
    """The worker's model and pool; that of a worker with links has blocks for probes beside those for sequences.

    Raises:
        ModelError: the model cannot be read or run.
        ConfigError: a setting does not fit the model or this machine.
    """
    return ModelRunner.load(config.engine, allocate, 0 if config.role is Role.COLOCATED else PROBE_BYTES)


def most_captured_decodes(config: WorkerConfig) -> int:
    """Of up to how many sequences decode steps are captured, where that can be: all that this worker decodes."""
    decodes = config.role is not Role.PREFILL or config.scheduler.hybrid
    return config.scheduler.max_num_seqs if decodes and not config.engine.enforce_eager else 0


def worker_parts(
    config: WorkerConfig,
    make_core: CoreFactory,
    runner: ModelRunner,
    end: LocalEnd,
    shared: SharedPool | None,
    life: str = "",
) -> WorkerParts:
    """The worker's parts around what `load_runner` gave, with a core and links of its role. `shared` is where its pool
    lies, `life` the name of the lock that it holds."""
    num_in_all = runner.num_blocks + runner.num_spare_blocks
    _announce(config, runner)
    usable = transports.offered()
    if shared is None and config.role is Role.DECODE:
        usable = tuple(name for name in usable if name is not TransportName.SHM)
    return WorkerParts(
        core=make_core(runner.num_blocks, runner.layout, runner.fingerprint, end.incarnation),
        runner=runner,
        pool=LocalPool(
            region=KVRegion(runner.memory, runner.layout, num_in_all),
            shared=shared,
            probe_blocks=tuple(range(runner.num_blocks, num_in_all)),
            fingerprint=runner.fingerprint,
            mirror=runner.mirror,
        ),
        register=Register(
            worker_id=end.worker_id,
            incarnation=end.incarnation,
            role=config.role,
            pid=os.getpid(),
            endpoint="",
            fingerprint=runner.fingerprint,
            layout=runner.layout,
            num_blocks=runner.num_blocks,
            max_model_len=runner.max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            itl_budget_s=config.scheduler.itl_budget_ms / 1e3 if config.scheduler.hybrid else None,
            fixed_role=why_fixed(config),
        ),
        link=config.link,
        settings=LinkSettings(
            end,
            _machine(),
            config.transfer.transport,
            usable,
            config.link.join_token,
            config.transfer.faults,
            config.strict,
            life=life,
            encryption=config.transfer.encryption,
        ),
        peer_bind=f"tcp://{config.transfer.host}:*",
        step_timeout_s=config.engine.step_timeout_s,
    )


def why_fixed(config: WorkerConfig) -> str:
    """Why such a worker cannot take another role; empty if it can."""
    if config.role is Role.COLOCATED:
        return "a colocated worker does both already"
    if config.scheduler.hybrid:
        return "a hybrid (--hybrid) helps the other pool by itself"
    is_alone = is_loopback(config.transfer.host) and not is_loopback(config.link.coordinator)
    if config.role is Role.PREFILL and is_alone:
        return (
            f"its --kv-host is {config.transfer.host}, where no worker of another host could reach it as a decode "
            "worker; start it with an address of its own"
        )
    return ""


def _announce(config: WorkerConfig, runner: ModelRunner) -> None:
    layout, size = runner.layout, runner.size
    log.info(
        "%s, %d thread(s)%s; KV pool %.2f GiB of %s: %d blocks of %d tokens = %d tokens, %d sequences of %d",
        runner.dtype, config.engine.threads,
        f" on core(s) {','.join(map(str, config.engine.cpu_cores))}" if config.engine.cpu_cores else "",
        size.num_blocks * layout.block_bytes / 2**30, layout.dtype, size.num_blocks, layout.block_size,
        size.num_tokens, size.num_max_len_seqs, runner.max_model_len,
    )  # fmt: skip


def _machine() -> str:
    """Tells this machine (its running kernel) from others: two workers share memory only if this is equal."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text().strip() if boot_id.exists() else platform.node()
