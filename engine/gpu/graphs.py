"""Decode steps as CUDA graphs: captured once for each size of batch, then launched as one.

A step of a small model is hundreds of kernels of some microseconds each: launched one by one, the host is slower than
the device. Batches are padded to the next captured size (`batch_sizes`), larger ones are left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from twinpool.engine.batch import SequenceSlice
from twinpool.engine.gpu.step_inputs import Room, StepInputs
from twinpool.engine.sampler import Chosen, StepSampling
from twinpool.errors import InvariantViolation

_DENSE_TO = 32
Sampled = tuple[torch.Tensor, torch.Tensor]
"""The logits of each of `StepInputs.rows`, and the tokens sampled from them, int64: both on the device."""
Compute = Callable[[StepInputs], Sampled]
"""Runs a step on its inputs."""


def batch_sizes(most: int) -> tuple[int, ...]:
    """The sizes that are captured for batches of up to `most`: powers of two to 32, then every 32, and `most`.

    >>> batch_sizes(80)
    (1, 2, 4, 8, 16, 32, 64, 80)
    """
    powers = [1 << i for i in range(_DENSE_TO.bit_length()) if 1 << i <= most]
    return tuple(sorted({*powers, *range(2 * _DENSE_TO, most + 1, _DENSE_TO), *([most] if most else [])}))


def size_for(num_seqs: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` that holds `num_seqs`; None if none does."""
    return next((size for size in sizes if size >= num_seqs), None)


def is_decode(slices: Sequence[SequenceSlice]) -> bool:
    """Whether every slice is one token that the next one is sampled after, and nothing else: what graphs are for."""
    return all(
        len(piece.token_ids) == 1 and piece.sampling is not None and piece.scoring is None for piece in slices
    )


@dataclass(frozen=True, slots=True)
class Recording:
    """A captured piece of work: `replay()` runs it again on the memory that it was captured on, into `output`."""

    replay: Callable[[], object]
    output: Sampled


class Recorder(Protocol):
    """Captures work."""

    def record(self, run: Callable[[], Sampled]) -> Recording:
        """Captures what `run` launches. It must not wait for the device, and may be called more than once."""
        ...


class CudaRecorder:
    """Captures on a CUDA device. All recordings share one memory pool: only the latest replay's output is valid."""

    def __init__(self, device: torch.device) -> None:
        stream: Any = torch.cuda.Stream  # torch leaves its constructor untyped
        self._stream = stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Sampled]) -> Recording:
        """As `Recorder.record`. Runs it twice before: compiling and the libraries' first calls cannot be captured."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                run()
        current.wait_stream(self._stream)
        graph: Any = torch.cuda.CUDAGraph()  # torch leaves it untyped
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()
        return Recording(graph.replay, output)


class DecodeGraphs:
    """The captured decode steps of one model over one pool. `num_replayed` counts decode steps."""

    def __init__(
        self,
        compute: Compute,
        recorder: Recorder,
        *,
        most_seqs: int,
        most_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """Captures every size, the largest first: smaller ones find room in its memory. Writes nothing to the pool."""
        self.sizes = batch_sizes(most_seqs)
        self.num_replayed = 0
        self._inputs: dict[int, StepInputs] = {}
        self._recordings: dict[int, Recording] = {}
        for size in reversed(self.sizes):
            inputs = StepInputs(
                Room(size, size, most_blocks, size, size),
                block_size,
                device,
                num_decodes=size,
                most_queries=0,
            )
            inputs.pad()
            self._inputs[size] = inputs
            self._recordings[size] = recorder.record(partial(compute, inputs))

    def holds(self, slices: Sequence[SequenceSlice]) -> bool:
        """Whether these slices are a captured kind of step: none is longer, and there are not too many."""
        return is_decode(slices) and size_for(len(slices), self.sizes) is not None

    def step(self, slices: Sequence[SequenceSlice], sampling: StepSampling) -> Chosen:
        """The tokens after slices that it `holds`, chosen as `sampling` says; the host waits once, for them. Where that
        changes logits, sampling is launched behind the graph: how many tokens are banned is not known to it."""
        size = size_for(len(slices), self.sizes)
        if size is None:
            raise InvariantViolation(
                f"{len(slices)} sequences; the largest captured step has {self.sizes[-1]}"
            )
        self.num_replayed += 1
        self._inputs[size].fill(slices, np.arange(len(slices)), sampling.rows)
        recording = self._recordings[size]
        recording.replay()
        logits, token_ids = (each[: len(slices)] for each in recording.output)
        return sampling.choose(logits, token_ids)

    def logits(self, num_seqs: int) -> torch.Tensor:
        """What the latest step, of so many sequences, sampled from: with biases and penalties, -inf where a token was
        banned."""
        return self._recordings[size_for(num_seqs, self.sizes) or 0].output[0][:num_seqs]
