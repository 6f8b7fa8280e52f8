"""Any other decoder-only architecture: transformers runs the model, Twinpool's paged attention is its attention.

Only models that are proven right are accepted: at load the model runs a short prompt with its own attention and, in
two chunks, with ours, and both must agree. So a feature that a paged cache does not hold (attention biases, sinks,
recurrent states) refuses the model instead of changing its answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from twinpool.engine.model_config import ModelConfig
from twinpool.engine.models import LayerDone
from twinpool.errors import ModelError
from twinpool.kernels.gpu.batch import DeviceBatch
from twinpool.kernels.kv_write import kv_write
from twinpool.kernels.paged_attention import AttentionParams, PagedBatch, paged_attention

_NAME = "twinpool_paged"
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_PROOF_TOKENS = 24
_PROOF_CHUNK = 15
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}
"""Largest norm of the difference over the norm of the logits; the 16-bit ones round at every operation."""


@dataclass(slots=True)
class _Step:
    """What the attention function needs to know of the step that runs on this thread."""

    batch: PagedBatch
    kv: torch.Tensor
    on_layer_done: LayerDone
    config: ModelConfig
    layers_seen: set[int] = field(default_factory=set)


_current_step: ContextVar[_Step] = ContextVar("current_step")


class ForeignModel:
    """A model of transformers on packed ragged batches."""

    def __init__(
        self,
        config: ModelConfig,
        directory: Path,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Loads and proves the model.

        Raises:
            ModelError: transformers cannot run it, or it has a feature that Twinpool does not do.
        """
        self._config = config
        ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
        self._model = _load(config, directory, dtype, device)
        _refuse_length_dependent_rope(config, self._model.config, max_model_len)
        with torch.inference_mode():
            self._prove(min(_PROOF_TOKENS, max_model_len), dtype, device)

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: PagedBatch,
        kv: torch.Tensor,
        rows: torch.Tensor,
        on_layer_done: LayerDone,
    ) -> torch.Tensor:
        """As `Model.forward`, but what comes back are the logits already: some models bound or scale them."""
        step = _Step(batch, kv, on_layer_done, self._config)
        with _running(step):
            output = self._model(
                input_ids=token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=rows,
            )
        if len(step.layers_seen) != self._config.num_layers:
            raise _refusal(self._config, "layers without attention")
        logits: torch.Tensor = output.logits[0]
        return logits

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `forward` gave, in float32."""
        return hidden.float()

    def _prove(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError unless our attention gives the logits that the model's own attention gives."""
        config = self._config
        generator = torch.Generator().manual_seed(0)
        token_ids = torch.randint(config.vocab_size, (length,), generator=generator).to(device)
        wanted = self._model(input_ids=token_ids[None], use_cache=False).logits[0].float()
        self._model.set_attn_implementation(_NAME)
        kv = torch.zeros(
            2, config.num_layers, 2, config.num_kv_heads, 16, config.head_dim, dtype=dtype, device=device
        )
        found = []
        for start, end in ((0, min(_PROOF_CHUNK, length)), (min(_PROOF_CHUNK, length), length)):
            if start < end:
                chunk = _one_sequence(start, end, device)
                rows = torch.arange(end - start, device=device)
                found.append(self.forward(token_ids[start:end], chunk, kv, rows, lambda _layer: None).float())
        error = float((torch.cat(found) - wanted).norm() / wanted.norm())
        if not error <= _TOLERANCE[dtype]:
            raise _refusal(
                config, f"attention of a kind that Twinpool does not do (logits are off by {error:.1%})"
            )


def _load(config: ModelConfig, directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with its own attention, ready to run. Raises ModelError."""
    auto: Any = AutoModelForCausalLM
    quiet: Any = transformers_logging.disable_progress_bar
    quiet()
    try:
        model = auto.from_pretrained(
            directory, dtype=dtype, attn_implementation="eager", local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError, ImportError, KeyError) as exc:
        raise ModelError(f"transformers cannot load {config.architecture} from {directory}: {exc}") from exc
    return model.to(device).eval()


def _one_sequence(start: int, end: int, device: torch.device) -> PagedBatch:
    """Positions [start, end) of a sequence in blocks 0 and 1 of 16 slots."""
    positions = torch.arange(start, end, device=device)
    on_device = None
    if device.type == "cuda":
        query_starts, ends, block_tables = (
            torch.tensor(numbers, dtype=torch.int32, device=device)
            for numbers in ([0, end - start], [end], [[0, 1]])
        )
        on_device = DeviceBatch(query_starts, ends, block_tables, num_decodes=0, most_queries=end - start)
    return PagedBatch(
        query_starts=np.array([0, end - start]),
        ends=np.array([end]),
        block_tables=np.array([0, 1]),
        table_starts=np.array([0, 2]),
        slots=positions,
        positions=positions,
        on_device=on_device,
    )


@contextmanager
def _running(step: _Step) -> Iterator[None]:
    token = _current_step.set(step)
    try:
        yield
    finally:
        _current_step.reset(token)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: [1, heads, tokens, head_dim] → [1, tokens, heads, head_dim]."""
    step = _current_step.get()
    layer: int = module.layer_idx  # type: ignore[assignment]  # modules type every attribute as a tensor or module
    config = step.config
    shape = (1, config.num_kv_heads, key.shape[2], config.head_dim)
    if key.shape != shape or value.shape != shape:
        raise _refusal(
            config, f"keys {tuple(key.shape)} and values {tuple(value.shape)} where {shape} was expected"
        )
    if attention_mask is not None:
        raise _refusal(config, "an attention mask or bias of its own")
    if (feature := _unknown_feature(module, features)) is not None:
        raise _refusal(config, feature)
    if sliding_window != config.windows[layer]:
        raise _refusal(
            config, f"a sliding window of {sliding_window} where config.json says {config.windows[layer]}"
        )
    kv_write(step.kv, layer, key[0].transpose(0, 1), value[0].transpose(0, 1), step.batch.slots)
    step.layers_seen.add(layer)
    step.on_layer_done(layer)
    scale = config.head_dim**-0.5 if scaling is None else float(scaling)
    params = AttentionParams(scale, sliding_window, softcap)
    return paged_attention(query[0].transpose(0, 1), step.kv, layer, step.batch, params)[None], None


def _unknown_feature(module: torch.nn.Module, features: Mapping[str, Any]) -> str | None:
    """What would change the attention and is not done here, in words."""
    if features.get("s_aux") is not None or getattr(module, "sinks", None) is not None:
        return "attention sinks"
    if features.get("position_bias") is not None:
        return "a position bias"
    causal = features.get("is_causal")
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        return "attention that is not causal"
    return None


def _refusal(config: ModelConfig, feature: str) -> ModelError:
    return ModelError(
        f"model type {config.model_type!r} ({config.architecture}) has {feature}; Twinpool cannot serve it"
    )


def _refuse_length_dependent_rope(config: ModelConfig, raw: Any, max_model_len: int) -> None:
    """Rotations that change with the longest sequence of a batch would make answers depend on the batch."""
    numbers = getattr(raw, "rope_parameters", None) or {}
    kinds = [numbers, *(value for value in numbers.values() if isinstance(value, dict))]
    for kind in kinds:
        trained = kind.get("original_max_position_embeddings") or config.max_positions
        if kind.get("rope_type") in _LENGTH_DEPENDENT_ROPE and max_model_len > trained:
            raise ModelError(
                f"model type {config.model_type!r} has {kind['rope_type']} rotary embeddings, which change beyond "
                f"{trained} tokens, and --max-model-len is {max_model_len}; set it to {trained} or less"
            )
