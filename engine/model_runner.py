"""Runs steps: packs a batch, runs the model over the paged pool, samples."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from twinpool.config import EngineConfig, require
from twinpool.engine.batch import SequenceSlice, StepBatch, StepOutput
from twinpool.engine.gpu.device import current
from twinpool.engine.gpu.graphs import CudaRecorder, DecodeGraphs, Recorder, is_decode
from twinpool.engine.gpu.host_mirror import HostMirror
from twinpool.engine.gpu.layer_handover import LayerHandover, mark
from twinpool.engine.gpu.step_inputs import StepInputs
from twinpool.engine.head_rows import HeadRows, Scores
from twinpool.engine.host_inputs import HostInputs
from twinpool.engine.job_grammars import JobGrammars
from twinpool.engine.kv_memory import PoolSize, free_host_memory, free_memory, pool_size
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.models import LayerDone, Model, ignore_layer
from twinpool.engine.processor import processor
from twinpool.engine.sampler import Chosen, StepSampling
from twinpool.engine.weights import Weights, fingerprint, weight_files
from twinpool.errors import ConfigError
from twinpool.kernels.compiler import HAS_COMPILER
from twinpool.kernels.quantized_kv import pool_view
from twinpool.layout import KV_CACHE_DTYPES, Dtype, KVLayout
from twinpool.request import RequestKey, SamplingParams

log = logging.getLogger(__name__)

Allocate = Callable[[int], memoryview]
"""Gives so many bytes: zeroed, writable, for as long as the runner lives."""
_WARM_UP_TOKENS = 24
_WARM_UP_CONTEXT = 64
_WARM_UP_BLOCKS = 8


class ModelRunner:
    """One worker's model and KV pool.

    `memory` is the pool as bytes, `kv` the same memory as [block, layer, k|v, kv_head, slot, head_dim]. Behind the
    `num_blocks` that sequences may have lie `num_spare_blocks` for other uses. On a GPU the pool is on the device;
    `memory` is that of its `mirror`, or empty if there are no spare blocks. Steps run one at a time, on any thread.
    After `warm_up`, `why_no_graphs` says why decode steps are not the CUDA graphs that they were to be, or is empty.
    """

    def __init__(
        self, directory: Path, model: Model, model_config: ModelConfig, layout: KVLayout, size: PoolSize,
        kv: torch.Tensor, memory: memoryview, max_model_len: int, model_fingerprint: str, dtype: Dtype,
    ) -> None:  # fmt: skip
        """Use `ModelRunner.load`."""
        self._directory = directory
        self._model = model
        self.model_config = model_config
        self.layout = layout
        self.size = size
        self.num_blocks = size.num_blocks
        self.num_spare_blocks = kv.shape[0] - size.num_blocks
        self.kv = kv
        self.memory = memory
        self.max_model_len = max_model_len
        self.dtype = dtype
        self.device = kv.device
        self.fingerprint = model_fingerprint
        self._inputs = HostInputs(layout.block_size)
        self.grammars = JobGrammars(directory, model_config.vocab_size)
        self.graphs: DecodeGraphs | None = None
        self.why_no_graphs = ""
        self.mirror = HostMirror(kv, memory) if kv.device.type == "cuda" and len(memory) else None

    @classmethod
    def load(cls, config: EngineConfig, allocate: Allocate, spare_bytes: int = 0) -> ModelRunner:
        """Reads the model and lays out the pool in what `allocate(num_bytes)` gives: zeroed, writable memory. A pool on
        a GPU has its mirror there, if it has spare blocks: those serve links to other workers.

        As many spare blocks as `spare_bytes` hold, one at least unless it is 0, come on top of the pool's size.

        Raises:
            ModelError: the model cannot be read or run.
            ConfigError: a setting does not fit the model or this machine.
        """
        directory = Path(config.model_dir)
        model_config = ModelConfig.from_dir(directory)
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        max_model_len = model_config.context(config.max_model_len)
        free_bytes = free_memory(device)
        kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, device)
        layout = model_config.kv_layout(config.block_size, kv_dtype)
        check_weights(config.weights, model_config, device)
        weight_bytes = _weight_bytes(model_config, directory, dtype, config.weights)
        on_gpu = device.type == "cuda"
        size = pool_size(
            config, layout, max_model_len, free_bytes, weight_bytes,
            num_sharing=config.workers_on_device if on_gpu else config.workers_on_host,
            mirror_bytes=free_host_memory() if on_gpu and spare_bytes else None,
        )  # fmt: skip
        with current(device):
            model = _load_model(model_config, directory, max_model_len, dtype, device, config.weights)
        num_spare = max(1, spare_bytes // layout.block_bytes) if spare_bytes else 0
        kv, memory = _lay_out(layout, size.num_blocks + num_spare, device, allocate, mirrored=num_spare > 0)
        name = fingerprint(model_config, directory)
        if kv_dtype is not dtype:
            name += f" in {dtype}"  # 8-bit KV does not tell what computed it
        if config.weights == "int8":
            name += " with int8 weights"
        return cls(directory, model, model_config, layout, size, kv, memory, max_model_len, name, dtype)

    @torch.inference_mode()
    def run(self, batch: StepBatch, on_layer_done: LayerDone | None = None) -> StepOutput:
        """Runs one step. KV goes to the pool in place; `on_layer_done(layer)` is called, one layer after the other, as
        soon as that layer's KV of all the batch's tokens is there: on this thread, or where a GPU goes on computing
        meanwhile, on another; in any case before this returns."""
        start, start_cpu = time.perf_counter(), time.thread_time()
        pieces = [piece for piece in batch.slices if piece.sampling is not None]
        sampling = StepSampling(pieces, self.grammars.matcher)
        scores: Scores = {}
        missed = bool(self.graphs or self.why_no_graphs) and on_layer_done is None and is_decode(batch.slices)
        with current(self.device):
            if self.device.type == "cuda" and on_layer_done is not None:
                with LayerHandover(on_layer_done, partial(mark, self.device)) as handover:
                    chosen, scores = self._step(batch, sampling, handover.layer_launched)
            elif self.graphs is not None and on_layer_done is None and self.graphs.holds(batch.slices):
                chosen, missed = self.graphs.step(batch.slices, sampling), False
            else:
                chosen, scores = self._step(batch, sampling, on_layer_done)
        token_ids = {piece.key: token for piece, token in zip(pieces, chosen.token_ids, strict=True)}
        cpu_s, seconds = time.thread_time() - start_cpu, time.perf_counter() - start
        return StepOutput(token_ids, seconds, missed, chosen.logprobs, scores, chosen.failed, cpu_s)

    def _step(
        self, batch: StepBatch, sampling: StepSampling, on_layer_done: LayerDone | None
    ) -> tuple[Chosen, Scores]:
        head = HeadRows(batch.slices)
        hidden = self._forward(batch.slices, head.rows, on_layer_done)
        logits, scores = head.finish(hidden, self._model.logits)
        if logits is not None:
            return sampling.choose(logits), scores
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return Chosen([], {}, {}), scores

    @torch.inference_mode()
    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Runs the step without sampling: float32 [tokens, vocab], for every token of the batch."""
        rows = np.arange(batch.num_tokens, dtype=np.int64)
        with current(self.device):
            return self._model.logits(self._forward(batch.slices, rows, None)).clone()

    def warm_up(self, most_decodes: int = 0) -> None:
        """Compiles, or loads the compiled kernels, by running a small prefill and steps of every kind after it. On a
        GPU it also captures, as CUDA graphs, decode steps of up to `most_decodes` sequences: of an own family, for
        those launch nothing but what a graph can hold.

        Writes to the first blocks: call it before the pool is used.
        """
        length = max(1, min(_WARM_UP_TOKENS, self.max_model_len - 2))
        blocks = list(range(self.layout.num_blocks(length + 2)))
        key = RequestKey("warm-up", 0)
        for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 2)):
            sampling = SamplingParams(max_tokens=1, seed=0, temperature=temperature, top_k=top_k)
            for token_ids, start in (([0] * length, 0), ([0], length), ([0] * 2, length)):
                if start + len(token_ids) <= self.max_model_len:
                    piece = SequenceSlice(key, token_ids, start, blocks, sampling, banned_token_ids=(0,))
                    self.run(StepBatch((piece,)))
        self._warm_up_head(SequenceSlice(key, [0] * length, 0, blocks))
        self.capture_decodes(most_decodes)

    def capture_decodes(self, most_decodes: int) -> None:
        """On a GPU, captures decode steps of up to `most_decodes` sequences, unless that is done. Writes no KV."""
        if self.device.type != "cuda" or not most_decodes or self.graphs is not None:
            return
        if self.model_config.family is None:
            self.why_no_graphs = (
                "this model runs through transformers: its decode steps are launched kernel by kernel"
            )
            log.warning("%s", self.why_no_graphs)
            return
        self.capture(CudaRecorder(self.device), most_decodes)
        log.info("decode steps of up to %d sequences are captured as CUDA graphs", most_decodes)

    def move_pool(self, memory: memoryview, block_ids: Sequence[int]) -> None:
        """From now on the pool, or on a GPU its mirror, lies in `memory`, which is as large: of a pool, only the blocks
        `block_ids` go along. No step runs meanwhile."""
        past, self.memory = self.memory, memory.cast("B")[: len(self.memory)]
        if self.device.type == "cuda":
            self.mirror = HostMirror(self.kv, self.memory)
            return
        shape = (-1, self.layout.block_bytes)
        old, new = (np.frombuffer(each, np.uint8).reshape(shape) for each in (past, self.memory))
        for block in block_ids:
            new[block] = old[block]
        self.kv = pool_view(torch.frombuffer(self.memory, dtype=torch.uint8), self.kv.shape, self.kv.dtype)

    @torch.inference_mode()
    def _warm_up_head(self, piece: SequenceSlice) -> None:
        """The head by itself, as long prompts are scored with."""
        hidden = self._forward([piece], np.arange(len(piece.token_ids), dtype=np.int64), None)
        self._model.logits(hidden[1:])

    @torch.inference_mode()
    def capture(self, recorder: Recorder, most_decodes: int) -> None:
        """From now on decode steps of up to `most_decodes` sequences are what `recorder` recorded."""
        # One buffer for the logits of all sizes: what a recording gives out, no other may use.
        logits = torch.empty(most_decodes, self.model_config.vocab_size, device=self.device)
        with current(self.device):
            self.graphs = DecodeGraphs(
                partial(self._sample, logits), recorder, most_seqs=most_decodes,
                most_blocks=self.layout.num_blocks(self.max_model_len), block_size=self.layout.block_size,
                device=self.device,
            )  # fmt: skip

    def _sample(self, logits: torch.Tensor, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole step on a GPU: its logits, in the first rows of `logits`, and its tokens."""
        from twinpool.kernels.gpu import sampling

        hidden = self._model.forward(inputs.token_ids, inputs.batch, self.kv, inputs.rows, ignore_layer)
        found = logits[: len(hidden)]
        found.copy_(self._model.logits(hidden))
        return found, sampling.sample_rows(found, inputs.sampling, None)

    def _forward(
        self, slices: Sequence[SequenceSlice], rows: np.ndarray[tuple[int], np.dtype[np.int64]],
        on_layer_done: LayerDone | None,
    ) -> torch.Tensor:  # fmt: skip
        layer_done = on_layer_done or ignore_layer
        if self.device.type == "cuda":
            inputs = StepInputs.of(slices, rows, self.layout.block_size, self.device)
            return self._model.forward(inputs.token_ids, inputs.batch, self.kv, inputs.rows, layer_done)
        token_ids, batch = self._inputs.pack(slices)
        return self._model.forward(token_ids, batch, self.kv, torch.from_numpy(rows), layer_done)


def compile_kernels(model_dir: Path, weights: str = "auto") -> None:
    """Compiles what a worker on this CPU would at its first start with such `weights`, for each element type that it
    can serve in.

    Raises:
        ModelError: the model cannot be read or run.
        ConfigError: not with such weights.
    """
    types = sorted({resolve_dtype("auto", torch.device("cpu")), Dtype.FLOAT32})
    for dtype in types:
        config = EngineConfig(
            str(model_dir), dtype, "cpu", num_blocks=_WARM_UP_BLOCKS, max_model_len=_WARM_UP_CONTEXT,
            weights=weights,
        )  # fmt: skip
        ModelRunner.load(config, lambda num_bytes: memoryview(bytearray(num_bytes))).warm_up()


def resolve_device(name: str) -> torch.device:
    """The device that "auto" means here, or the named one.

    Raises:
        ConfigError: it is no device, or not on this machine.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError(f"--device is {name!r}; allowed: auto, cpu, cuda, cuda:N") from exc
    found = device.type == "cpu" or (
        device.type == "cuda"
        and torch.cuda.is_available()
        and (device.index or 0) < torch.cuda.device_count()
    )
    require(
        "--device", name, found, f"auto, cpu, or one of the {torch.cuda.device_count()} CUDA devices found"
    )
    return device


def resolve_dtype(name: str, device: torch.device) -> Dtype:
    """The element type that "auto" means on `device`, or the named one.

    Raises:
        ConfigError: the device does not compute in it.
    """
    if name == "auto":
        return Dtype.BFLOAT16 if device.type == "cuda" or processor().has_bfloat16 else Dtype.FLOAT32
    dtype = Dtype(name)
    supported = device.type == "cuda" or dtype is not Dtype.FLOAT16
    require("--dtype", name, supported, "auto, float32, bfloat16 on a CPU")
    return dtype


def resolve_kv_dtype(name: str, dtype: Dtype, device: torch.device) -> Dtype:
    """The element type of KV: `dtype`, the model's, for "auto".

    Raises:
        ConfigError: the device's attention does not read it.
    """
    require("--kv-cache-dtype", name, name == "auto" or device.type == "cuda", "auto on a CPU")
    return dtype if name == "auto" else KV_CACHE_DTYPES[name]


def check_weights(name: str, config: ModelConfig, device: torch.device) -> None:
    """Checks that `device` runs this model with such weights.

    Raises:
        ConfigError: it does not.
    """
    if name == "auto":
        return
    require("--weights", name, device.type == "cpu", f"auto on {device.type}")
    require("--weights", name, HAS_COMPILER, "auto without numba; install it for int8")
    require("--weights", name, config.family is not None,
            f"auto for {config.architecture}, which runs through transformers")  # fmt: skip


def _weight_bytes(config: ModelConfig, directory: Path, dtype: Dtype, weights_format: str) -> int:
    """What the weights take in memory."""
    if weights_format == "int8":
        from twinpool.engine.models.packed_weights import packed_bytes

        return packed_bytes(config, getattr(torch, dtype.value), as_integers=True)
    stored_bytes = sum(path.stat().st_size for path in weight_files(directory))
    return stored_bytes * dtype.num_bytes // config.dtype.num_bytes


def _load_model(
    config: ModelConfig, directory: Path, max_model_len: int, compute_dtype: Dtype, device: torch.device,
    weights_format: str,
) -> Model:  # fmt: skip
    dtype: torch.dtype = getattr(torch, compute_dtype.value)
    if config.family is None:
        from twinpool.engine.models.foreign import (
            ForeignModel,
        )  # imports transformers: seconds, and only for these

        return ForeignModel(config, directory, max_model_len, dtype, device)
    with torch.inference_mode(), Weights(directory, dtype, device) as weights:
        if HAS_COMPILER and device.type == "cpu":
            from twinpool.engine.models.compiled_decoder import CompiledDecoder

            return CompiledDecoder(
                config, weights, max_model_len, dtype, as_integers=weights_format == "int8"
            )
        from twinpool.engine.models.decoder import Decoder

        return Decoder(config, weights, max_model_len, device)


def _lay_out(
    layout: KVLayout, num_blocks: int, device: torch.device, allocate: Allocate, *, mirrored: bool
) -> tuple[torch.Tensor, memoryview]:
    """The pool, and the host memory that it, or its mirror, lies in."""
    shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    dtype: torch.dtype = getattr(torch, layout.dtype.value)
    num_bytes = num_blocks * layout.block_bytes
    memory = memoryview(b"")
    if device.type == "cpu" or mirrored:
        memory = allocate(num_bytes)
        if memory.nbytes < num_bytes or memory.readonly:
            raise ConfigError(f"the KV pool needs {num_bytes} writable bytes; {memory.nbytes} were given")
        memory = memory.cast("B")[:num_bytes]
    if device.type == "cpu":
        return pool_view(torch.frombuffer(memory, dtype=torch.uint8), shape, dtype), memory
    return pool_view(torch.zeros(num_bytes, dtype=torch.uint8, device=device), shape, dtype), memory
