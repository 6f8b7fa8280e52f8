"""Decode graphs without a GPU: where CUDA replays what was captured, the work is done again, on the CPU's kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from twinpool.engine.gpu.graphs import CudaRecorder, DecodeGraphs, Recording, Sampled
from twinpool.engine.gpu.step_inputs import NOWHERE, StepInputs
from twinpool.engine.model_runner import ModelRunner
from twinpool.kernels.batch_sampling import ROW, sample_rows
from twinpool.kernels.paged_attention import PagedBatch


class Rerun:
    """Records by remembering what to run, and where its first result lies."""

    def record(self, run: Callable[[], Sampled]) -> Recording:
        """As `Recorder.record`."""
        output = run()
        return Recording(lambda: [old.copy_(new) for old, new in zip(output, run(), strict=True)], output)


def capture(runner: ModelRunner, most_seqs: int) -> DecodeGraphs:
    """The runner's decode steps of up to `most_seqs` sequences: captured on a GPU, else done again."""
    if runner.device.type == "cuda":
        runner.capture(CudaRecorder(runner.device), most_seqs)
        assert runner.graphs is not None
        return runner.graphs
    return DecodeGraphs(
        on_host(runner), Rerun(), most_seqs=most_seqs,
        most_blocks=runner.layout.num_blocks(runner.max_model_len), block_size=runner.layout.block_size,
        device=runner.device,
    )  # fmt: skip


def on_host(runner: ModelRunner) -> Callable[[StepInputs], Sampled]:
    """The runner's model and the sampler's reference on what lies in the device's memory, as a GPU's kernels read it;
    garbage where they leave padding undefined."""

    def compute(inputs: StepInputs) -> Sampled:
        assert inputs.batch.on_device is not None
        live = inputs.batch.on_device.ends > 0
        num = int(live.sum())
        assert bool(live[:num].all())
        assert bool((inputs.batch.slots[num:] == NOWHERE).all())
        out = torch.full((len(live), runner.model_config.vocab_size), float("nan"))
        token_ids = torch.full((len(live),), -1)
        if num:
            batch = as_host(inputs, num)
            model = runner._model
            hidden = model.forward(
                inputs.token_ids[:num], batch, runner.kv, inputs.rows[:num], lambda _layer: None
            )
            out[:num] = model.logits(hidden)
            rows = inputs.sampling[:num].numpy().view(ROW)[:, 0]
            token_ids[:num] = sample_rows(out[:num].clone(), rows, np.empty((0, 2), np.int32))
        return out, token_ids

    return compute


def as_host(inputs: StepInputs, num_seqs: int) -> PagedBatch:
    """The device's numbers of the first sequences, as the CPU's kernels take them."""
    device = inputs.batch.on_device
    assert device is not None
    num_tokens = int(device.query_starts[num_seqs])
    return PagedBatch(
        query_starts=device.query_starts[: num_seqs + 1].numpy().astype(np.int64),
        ends=device.ends[:num_seqs].numpy().astype(np.int64),
        block_tables=device.block_tables[:num_seqs].flatten().numpy().astype(np.int64),
        table_starts=np.arange(num_seqs + 1, dtype=np.int64) * device.block_tables.shape[1],
        slots=inputs.batch.slots[:num_tokens],
        positions=inputs.batch.positions[:num_tokens],
    )
