"""Shapes drawn from distributions that the settings state."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from twinpool.bench.serving.datasets.settings import LognormalLengths, PrefixRepetition, RandomLengths
from twinpool.bench.serving.datasets.shapes import Shape, own, shared_prefix
from twinpool.config import require


def random_shapes(lengths: RandomLengths, num_prompts: int, seed: int) -> list[Shape]:
    """Uniform lengths; bounds are rounded outwards, and at least 1."""
    rng = np.random.default_rng(seed)
    inputs = _uniform(rng, lengths.input_len, lengths.range_ratio, num_prompts)
    outputs = _uniform(rng, lengths.output_len, lengths.range_ratio, num_prompts)
    prefix = (shared_prefix(0, lengths.prefix_len),) if lengths.prefix_len else ()
    return [
        Shape((*prefix, own(index, input_len)), output_len)
        for index, (input_len, output_len) in enumerate(zip(inputs.tolist(), outputs.tolist(), strict=True))
    ]


def lognormal_shapes(lengths: LognormalLengths, num_prompts: int, seed: int) -> list[Shape]:
    """Log-normal lengths, rounded; input and output are independent."""
    rng = np.random.default_rng(seed)
    inputs = _lognormal(rng, lengths.input_median, lengths.input_sigma, lengths.input_most, num_prompts)
    outputs = _lognormal(rng, lengths.output_median, lengths.output_sigma, lengths.output_most, num_prompts)
    return [
        Shape((own(index, input_len),), output_len)
        for index, (input_len, output_len) in enumerate(zip(inputs.tolist(), outputs.tolist(), strict=True))
    ]


def prefix_shapes(settings: PrefixRepetition, num_prompts: int, seed: int) -> list[Shape]:
    """Prompts of all prefixes, in a random order.

    Raises:
        ConfigError: there are fewer prompts than prefixes, or so much reuse is not possible with so few prompts.
    """
    count = settings.num_prefixes
    require(
        "--num-prompts",
        num_prompts,
        num_prompts >= count,
        f"at least --prefix-repetition-num-prefixes, {count}",
    )
    total = settings.prefix_len + settings.suffix_len
    prefix_len = settings.prefix_len
    if settings.reuse_share is not None:
        # Of N prompts with P prefixes, P come first with theirs: (N − P) · prefix of N · total tokens are known.
        most = (num_prompts - count) * (total - 1) / (num_prompts * total)
        require(
            "--prefix-repetition-reuse-share",
            settings.reuse_share,
            settings.reuse_share <= most,
            f"at most {most:.4g} with {num_prompts} prompts of {total} tokens and {count} prefixes",
        )
        repeated = num_prompts - count
        prefix_len = round(settings.reuse_share * num_prompts * total / repeated) if repeated else 0
    numbers = np.random.default_rng(seed).permutation(num_prompts) % count
    return [
        Shape(
            (*((shared_prefix(number, prefix_len),) if prefix_len else ()), own(index, total - prefix_len)),
            settings.output_len,
            group=f"prefix-{number}",
        )
        for index, number in enumerate(numbers.tolist())
    ]


def _uniform(rng: np.random.Generator, center: int, ratio: float, size: int) -> NDArray[np.int64]:
    low, high = math.floor(center * (1 - ratio)), math.ceil(center * (1 + ratio))
    return rng.integers(max(1, low), max(1, high) + 1, size=size)


def _lognormal(
    rng: np.random.Generator, median: float, sigma: float, most: int, size: int
) -> NDArray[np.int64]:
    """Draws again what is out of bounds. The median is within, so about half of each draw can be kept at least."""
    kept = np.empty(0, dtype=np.int64)
    while len(kept) < size:
        drawn = np.rint(median * np.exp(sigma * rng.standard_normal(2 * size + 16))).astype(np.int64)
        kept = np.concatenate([kept, drawn[(drawn >= 1) & (drawn <= most)]])
    return kept[:size]
