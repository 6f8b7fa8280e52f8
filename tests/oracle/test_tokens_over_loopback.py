"""Two workers and a coordinator in one process, KV by the loopback transport: the same tokens as `transformers`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import torch
from support.http_gateway import must_not_fail
from support.join_token import TEST_TOKEN
from support.reference import Reference, prompts

from twinpool.config import (
    CoordinatorConfig,
    EngineConfig,
    LinkConfig,
    Role,
    SchedulerConfig,
    TransferConfig,
    TransportName,
    WorkerConfig,
)
from twinpool.coordinator.server import Coordinator
from twinpool.coordinator.service import Submission
from twinpool.decode_pool.core import DecodeCore
from twinpool.kv_transfer.connector import LocalEnd
from twinpool.prefill_pool.core import PrefillCore
from twinpool.request import SamplingParams
from twinpool.worker.main import CoreFactory, load_runner, worker_parts
from twinpool.worker.shell import WorkerShell

NUM_TOKENS = 32
SCHEDULER = SchedulerConfig(token_budget=256)
CORES: dict[Role, CoreFactory] = {
    Role.PREFILL: lambda blocks, layout, name, _: PrefillCore(blocks, layout, name, SCHEDULER),
    Role.DECODE: lambda blocks, layout, name, life: DecodeCore(blocks, layout, name, SCHEDULER, life, True),
}


@asynccontextmanager
async def worker(role: Role, model_dir: Path, endpoint: str) -> AsyncIterator[WorkerShell]:
    """One worker on this event loop."""
    config = WorkerConfig(
        role=role,
        link=LinkConfig(coordinator=endpoint, worker_id=f"{role}-0", join_token=TEST_TOKEN),
        engine=EngineConfig(str(model_dir), "float32", "cpu", num_blocks=600),
        scheduler=SCHEDULER,
        transfer=TransferConfig(transport=TransportName.LOOPBACK),
        strict=True,
    )
    runner = load_runner(config, lambda num_bytes: memoryview(bytearray(num_bytes)))
    end = LocalEnd(config.link.worker_id, "life-1")
    shell = WorkerShell(worker_parts(config, CORES[role], runner, end, None))
    running = asyncio.create_task(shell.run())
    try:
        yield shell
    finally:
        shell.stop("the test is over")
        await running


async def answer(coordinator: Coordinator, name: str, prompt: tuple[int, ...]) -> list[int]:
    """The greedy tokens."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0, ignore_eos=True)
    now = coordinator.now()
    tokens: list[int] = []
    async for output in coordinator.submit(Submission(name, prompt, sampling, now, now, now)):
        assert output.error is None
        tokens += output.token_ids
    return tokens


@pytest.fixture
def one_thread_per_worker() -> Iterator[None]:
    """Two step threads share this process's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("one_thread_per_worker")
async def test_twenty_prompts_over_loopback(model_dir: Path, reference: Reference) -> None:
    """All prompts at once; afterwards every block of both pools is free or cached."""
    asked = prompts(model_dir)[::2]
    async with AsyncExitStack() as stack:
        coordinator = Coordinator(CoordinatorConfig(join_token=TEST_TOKEN), (), on_failure=must_not_fail)
        await coordinator.start()
        stack.push_async_callback(coordinator.drain_and_stop)
        for role in CORES:
            await stack.enter_async_context(worker(role, model_dir, coordinator.endpoint))
        await until(lambda: coordinator.ready()[0], 30)
        given = await asyncio.gather(
            *(answer(coordinator, f"request-{i}", prompt) for i, prompt in enumerate(asked))
        )
        await until(lambda: not any(held_blocks(coordinator)), 10)
        assert b'transport="loopback"' in coordinator.metrics_text()
    faults = [
        judgement.fault
        for prompt, tokens in zip(asked, given, strict=True)
        if (judgement := reference.judge(prompt, tokens)).fault
    ]
    assert not faults
    assert all(len(tokens) == NUM_TOKENS for tokens in given)


async def until(condition: Callable[[], bool], limit_s: float) -> None:
    """Returns once `condition()` is true; raises TimeoutError when it is not within `limit_s`."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  nobody tells when it becomes true
            await asyncio.sleep(0.02)


def held_blocks(coordinator: Coordinator) -> list[float]:
    """Blocks that are neither free nor cached, by the workers' last heartbeats."""
    lines = coordinator.metrics_text().decode().splitlines()
    held = [line for line in lines if line.startswith("twinpool_kv_blocks{")]
    assert held
    return [float(line.rpartition(" ")[2]) for line in held if not ('"free"' in line or '"cached"' in line)]
