"""A model, its pool full of scattered sequences, and steps over them: what the measurements run on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from twinpool.bench.engine.floors import Piece, Shape
from twinpool.config import EngineConfig
from twinpool.engine.batch import SequenceSlice, StepBatch
from twinpool.engine.gpu.step_inputs import StepInputs
from twinpool.engine.host_inputs import HostInputs
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.model_runner import Allocate, ModelRunner
from twinpool.kernels.paged_attention import PagedBatch
from twinpool.layout import Dtype
from twinpool.request import RequestKey, SamplingParams

BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


def shape_of(config: ModelConfig, dtype: Dtype) -> Shape:
    """What floors are counted from. A model that runs through transformers is taken for a gated one without experts."""
    return Shape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        inner=config.intermediate_size,
        vocab=config.vocab_size,
        windows=config.windows,
        element_bytes=dtype.num_bytes,
        has_qkv_bias=config.qkv_bias,
        has_output_bias=config.output_bias,
        has_mlp_bias=config.mlp_bias,
        has_head_norms=config.qk_norm,
    )


def _zeroed(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))


def load_runner(
    directory: Path,
    dtype: str,
    device: str,
    threads: int,
    num_tokens: int,
    allocate: Allocate = _zeroed,
    weights: str = "auto",
) -> ModelRunner:
    """The model with a pool for `num_tokens` tokens, and for one sequence of the model's context at least.

    Raises:
        ModelError: the model cannot be read or run.
        ConfigError: a setting does not fit the model or this machine.
    """
    longest = ModelConfig.from_dir(directory).max_positions
    num_blocks = -(-max(num_tokens, longest) // BLOCK_SIZE)
    config = EngineConfig(
        str(directory), dtype, device, block_size=BLOCK_SIZE, num_blocks=num_blocks, threads=threads,
        weights=weights,
    )  # fmt: skip
    return ModelRunner.load(config, allocate)


class ModelBed:
    """A loaded model on one device. Every sequence has blocks of its own, anywhere in the pool, as after long use."""

    def __init__(
        self, directory: Path, dtype: str, device: str, threads: int, num_tokens: int, most_decodes: int = 64,
        allocate: Allocate = _zeroed, weights: str = "auto",
    ) -> None:  # fmt: skip
        """Loads the model with a pool for `num_tokens` tokens in sequences of any length, and compiles its kernels; on
        a GPU captures decode steps of up to `most_decodes` sequences.

        Raises:
            ModelError: the model cannot be read or run.
            ConfigError: a setting does not fit the model or this machine.
        """
        self.runner = load_runner(directory, dtype, device, threads, num_tokens, allocate, weights)
        self.runner.warm_up(most_decodes)
        self.shape = shape_of(self.runner.model_config, self.runner.dtype)
        self._random = np.random.default_rng(0)
        # Pages that were only zeroed may all be the same page of physical memory.
        self.runner.kv[:] = torch.randn(self.runner.kv.shape[1:]).to(self.runner.kv)

    def slices(self, pieces: Sequence[Piece]) -> tuple[SequenceSlice, ...]:
        """Each piece as a sequence of its own, with random tokens."""
        block_ids = self._random.permutation(self.runner.num_blocks)
        made, taken = [], 0
        for number, piece in enumerate(pieces):
            num_blocks = self.runner.layout.num_blocks(piece.start + piece.count)
            table = block_ids[taken : taken + num_blocks].tolist()
            taken += num_blocks
            token_ids = self._random.integers(self.shape.vocab, size=piece.count).tolist()
            sampling = GREEDY if piece.is_sampled else None
            made.append(SequenceSlice(RequestKey(f"{number}", 0), token_ids, piece.start, table, sampling))
        return tuple(made)

    def step(self, pieces: Sequence[Piece]) -> StepBatch:
        """The pieces as one step of the whole model."""
        return StepBatch(self.slices(pieces))

    def batch(self, pieces: Sequence[Piece]) -> PagedBatch:
        """Where the pieces have their KV, as the device's kernels take it."""
        slices, device = self.slices(pieces), self.runner.device
        if device.type == "cuda":
            return StepInputs.of(slices, np.empty(0, np.int64), BLOCK_SIZE, device).batch
        return HostInputs(BLOCK_SIZE).pack(slices)[1]

    def fits(self, pieces: Sequence[Piece]) -> bool:
        """Whether every piece is within the model's context."""
        return all(piece.start + piece.count <= self.runner.max_model_len for piece in pieces)
