"""Cosines and sines of the rotary embedding for every position, with the scalings that stretch a model's context."""

from __future__ import annotations

import math

import torch

from twinpool.engine.model_config import ModelConfig, RopeConfig


def rope_tables(config: ModelConfig, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [num_positions, head_dim / 2] in float32."""
    frequencies, factor = _frequencies(config.rope, config.head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return angles.cos() * factor, angles.sin() * factor


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair, and the factor on cosines and sines."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32)
    plain = 1.0 / rope.theta ** (pairs / head_dim)
    match rope.kind:
        case "linear":
            return plain / rope.factor, 1.0
        case "llama3":
            return _llama3(plain, rope), 1.0
        case "yarn":
            return _yarn(plain, rope, head_dim), _yarn_factor(rope)
        case _:
            return plain, 1.0


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: pairs that turn slowly over the trained context are slowed down, fast ones kept, a ramp between.

    (The Llama 3 Herd of Models, arXiv:2407.21783, §3.4; the numbers are in config.json.)
    """
    trained = float(rope.original_max_positions or 0)
    turns = trained * plain / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / rope.factor


def _yarn(plain: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """YaRN: as above, with a ramp over the pair's index between `beta_fast` and `beta_slow` turns (Peng et al. 2023,
    arXiv:2309.00071, §3.2)."""
    trained = float(rope.original_max_positions or 0)

    def pair_with(turns: float) -> float:
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    slow = ((steps - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return slow * plain / rope.factor + (1.0 - slow) * plain


def _yarn_factor(rope: RopeConfig) -> float:
    """YaRN's factor on cosines and sines, which sharpens attention over the longer context."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
