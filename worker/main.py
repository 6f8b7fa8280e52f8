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
from pathlib import Path

import setproctitle
import torch
import uvloop

from twinpool import collector
from twinpool.config import Role, TransportName, WorkerConfig
from twinpool.engine.compilation import noticing_compilation
from twinpool.engine.host_memory import host_memory
from twinpool.engine.model_runner import Allocate, ModelRunner
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
from twinpool.worker.process import EXIT_CONFIG, EXIT_FAILED, EXIT_START_ANEW, start_anew, watch_lifeline
from twinpool.worker.shell import CountingCore, WorkerParts, WorkerShell
from twinpool.worker.timed_steps import timed_steps

log = logging.getLogger(__name__)

CoreFactory = Callable[[int, KVLayout, str, str], CountingCore]
"""(num_blocks, layout, fingerprint, incarnation) → the core of the worker's role."""


def run_worker(config: WorkerConfig, make_core: CoreFactory) -> int:
    """Runs a worker in this process until it is told to stop; returns the exit status."""
    worker_id = config.link.worker_id
    setproctitle.setproctitle(f"twinpool worker --role {config.role} --id {worker_id}")
    log_to_stderr(worker_id)
    try:
        require_kv_host(config)
        _bind_threads(config)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            return loop.run(_run(config, make_core))
    except (ConfigError, ModelError, WorkerDenied) as exc:
        log.error("%s", exc)
        return EXIT_CONFIG
    except NotAMember as exc:
        log.warning("%s; all that it holds is given up", exc)
        return EXIT_START_ANEW
    except Exception as exc:  # in our log whatever it is: Python's own words may quote a prompt
        if isinstance(exc, TwinpoolError) and not isinstance(exc, InvariantViolation):
            log.error("%s", exc)
        else:
            log.exception("a bug in Twinpool; please report it")
        return EXIT_FAILED


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


async def _run(config: WorkerConfig, make_core: CoreFactory) -> int:
    loop = asyncio.get_running_loop()
    shell: WorkerShell | None = None
    asked_to_stop: list[str] = []

    def stop(reason: str) -> None:
        asked_to_stop.append(reason)
        if shell is not None:
            shell.stop(reason)

    def orphaned() -> None:
        loop.call_soon_threadsafe(stop, "the coordinator is gone")

    if config.link.lifeline_fd is not None:
        watch_lifeline(config.link.lifeline_fd, orphaned)
    loop.add_signal_handler(signal.SIGTERM, stop, "SIGTERM")
    loop.add_signal_handler(signal.SIGINT, stop, "Ctrl-C")

    transfer = config.transfer
    end = LocalEnd(config.link.worker_id, uuid.uuid4().hex[:12], transfer.deployment, transfer.host)
    shared: list[SharedPool] = []
    life = Life(end) if config.role is Role.PREFILL and shm_pool.why_unavailable() is None else None

    def allocate(num_bytes: int) -> memoryview:
        if _wants_shared_memory(config):
            shared.append(SharedPool(num_bytes, end))
            return shared[0].memory
        return host_memory(num_bytes)

    try:
        with noticing_compilation(_say_compiling):
            runner = await asyncio.to_thread(load_runner, config, allocate)
            await asyncio.to_thread(runner.warm_up, most_captured_decodes(config))
        require_graphs(config, runner.why_no_graphs)
        if not asked_to_stop:
            pool = shared[0] if shared else None
            parts = worker_parts(config, make_core, runner, end, pool, life.name if life else "")
            if config.scheduler.hybrid:
                for timed in await asyncio.to_thread(_timed_steps, runner, config):
                    parts.core.handle(timed, loop.time())
            collector.begin()
            shell = WorkerShell(parts)
            log.info("stopped: %s", await shell.run())
        return 0
    except StepStuck as exc:
        log.error("%s", exc)
        for pool in shared:
            pool.close()
        # No orderly end: the step thread never comes back, and may hold any lock. So this process's life goes on until
        # the process is no more.
        if config.link.lifeline_fd is None:
            start_anew()
        os._exit(EXIT_FAILED)
    finally:
        for pool in shared:
            pool.close()
        if life is not None:
            life.close()


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


def _wants_shared_memory(config: WorkerConfig) -> bool:
    if config.role is not Role.DECODE or config.transfer.transport not in (
        TransportName.AUTO,
        TransportName.SHM,
    ):
        return False
    missing = shm_pool.why_unavailable()
    if missing and config.transfer.transport is TransportName.SHM:
        raise ConfigError(f"--transport is shm; {missing}")
    return missing is None


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
