"""Tiny models with random weights, made by transformers, and what transformers itself computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from twinpool.config import EngineConfig
from twinpool.engine.batch import SequenceSlice, StepBatch
from twinpool.engine.model_runner import ModelRunner
from twinpool.request import RequestKey, SamplingParams

TINY = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
}


def save_tiny_model(
    directory: Path, config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Any:
    """Saves a model of `config` with random weights large enough to matter; returns it for reference, in eager mode."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape) * scale + (0.0 if parameter.dim() > 1 else 1.0))
    model.tie_weights()
    model.to(dtype).save_pretrained(directory)
    return model


def load_runner(directory: Path, **settings: Any) -> ModelRunner:
    """A runner in float32 with 8-token blocks unless `settings` say otherwise, its pool filled with garbage."""
    config = EngineConfig(
        str(directory), **{"dtype": "float32", "block_size": 8, "num_blocks": 160} | settings
    )
    runner = ModelRunner.load(config, lambda num_bytes: memoryview(bytearray(num_bytes)))
    torch.manual_seed(1)
    runner.kv.normal_(std=30)
    return runner


def reference_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Float32 [tokens, vocab] of the whole sequence in one pass."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()
    return logits


def tokens(length: int, seed: int = 0, vocab_size: int = 131) -> list[int]:
    """`length` random token ids."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(vocab_size, (length,), generator=generator).tolist()
    return drawn


def piece(
    name: str, token_ids: Sequence[int], start: int, blocks: Sequence[int], **sampling: Any
) -> SequenceSlice:
    """A slice; with `sampling`, the parameters of its next token."""
    params = SamplingParams(**{"max_tokens": 64, "seed": 0} | sampling) if sampling else None
    return SequenceSlice(RequestKey(name, 0), token_ids, start, blocks, params)


def step(*pieces: SequenceSlice) -> StepBatch:
    """The slices as one step."""
    return StepBatch(pieces)
