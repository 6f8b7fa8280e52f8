"""A layer's KV leaves the device after the kernels that write it, and before the step ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cuda import DEVICE, IS_REHEARSAL, slow_kernel
from support.gpu_engine import SMALL, mirror_of, prompts, runner_on

from twinpool.bench.engine.made_models import make_model
from twinpool.engine.batch import SequenceSlice, StepBatch
from twinpool.engine.gpu.step_inputs import StepInputs
from twinpool.engine.model_runner import ModelRunner
from twinpool.request import RequestKey, SamplingParams

BLOCKS = (9, 2, 30, 31, 4)
SLICE = SequenceSlice(
    RequestKey("a", 0), prompts((70,), SMALL.vocab_size)[0], 0, BLOCKS,
    SamplingParams(max_tokens=1, seed=0, temperature=0.0),
)  # fmt: skip


class Slow:
    """A model whose device is busy for long before it writes a layer."""

    def __init__(self, model: Any) -> None:
        self.logits = model.logits
        self._model = model

    def forward(
        self, token_ids: Any, batch: Any, kv: Any, rows: Any, on_layer_done: Callable[[int], None]
    ) -> Any:
        def layer_done(layer: int) -> None:
            on_layer_done(layer)
            slow_kernel()

        slow_kernel()
        return self._model.forward(token_ids, batch, kv, rows, layer_done)


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    runner = runner_on(DEVICE, make_model(tmp_path, SMALL, scale=0.1))
    runner.run(StepBatch((SLICE,)))  # compiles: that takes longer than any kernel
    runner.kv.fill_(7.0)
    runner._model = Slow(runner._model)
    return runner


def fetched(runner: ModelRunner) -> tuple[Callable[[int], None], list[torch.Tensor]]:
    """What hands a layer over: it copies the layer's blocks to the host and keeps what it got there."""
    mirror, memory = mirror_of(runner)
    host = torch.frombuffer(memory, dtype=runner.kv.dtype).view(runner.kv.shape)
    kept: list[torch.Tensor] = []

    def hand_over(layer: int) -> None:
        mirror.fetch(BLOCKS, layer, layer + 1)
        kept.append(host[list(BLOCKS), layer].clone())

    return hand_over, kept


def test_every_layer_that_is_handed_over_has_all_its_bytes(runner: ModelRunner) -> None:
    hand_over, kept = fetched(runner)
    still_computing: list[bool] = []

    def on_layer_done(layer: int) -> None:
        still_computing.append(not IS_REHEARSAL and not torch.cuda.default_stream(DEVICE).query())
        hand_over(layer)

    runner.run(StepBatch((SLICE,)), on_layer_done)
    final = runner.kv[list(BLOCKS)].cpu()
    assert [torch.equal(bytes_of, final[:, layer]) for layer, bytes_of in enumerate(kept)] == [True] * 3
    if not IS_REHEARSAL:
        assert still_computing[0]  # the device goes on with the next layers meanwhile


@pytest.mark.skipif(IS_REHEARSAL, reason="only a GPU is behind its host")
def test_without_waiting_for_the_kernels_the_bytes_would_be_others(runner: ModelRunner) -> None:
    """So the test above can fail."""
    hand_over, kept = fetched(runner)
    with torch.inference_mode():
        inputs = StepInputs.of([SLICE], np.array([SLICE.end - 1]), 16, DEVICE)
        runner._model.forward(inputs.token_ids, inputs.batch, runner.kv, inputs.rows, hand_over)
    torch.cuda.synchronize()
    final = runner.kv[list(BLOCKS)].cpu()
    assert not torch.equal(kept[0], final[:, 0])
