"""Service times as sums of a few coefficients: DistServe's, and ours for NVIDIA's curves of an H200."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinpool.errors import ConfigError
from twinpool.planner.profile.nnls import nnls
from twinpool.planner.step_shape import StepShape
from twinpool.planner.times.model_shapes import ModelShape
from twinpool.planner.times.public_data import file_of

_MS = 1e-3


@dataclass(frozen=True, slots=True)
class DecodeTerms:
    """Seconds of a step of sequences: `fixed_s`, each sequence's `sequence_s`, each of their tokens' `context_token_s`.
    Holds from `from_batch` sequences on."""

    fixed_s: float
    sequence_s: float
    context_token_s: float
    from_batch: int = 1

    def step_s(self, num_sequences: int, context_tokens: int) -> float:
        """Their sum."""
        return self.fixed_s + self.sequence_s * num_sequences + self.context_token_s * context_tokens


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Two phases as sums. A step of chunks takes `prompt_fixed_s` + `prompt_token_s` · tokens + `prompt_square_s` ·
    Σ tokens², where a chunk of n tokens after c counts as n² + 2 · n · c: so chunks of a prompt sum to the prompt.

    Sums for larger batches follow each other in `decode`. Where the next one would begin lower than the one before it
    ends, as DistServe's do, the end holds until the other has caught up.
    """

    prompt_fixed_s: float
    prompt_token_s: float
    prompt_square_s: float
    decode: tuple[DecodeTerms, ...]

    def __post_init__(self) -> None:
        numbers = [self.prompt_fixed_s, self.prompt_token_s, self.prompt_square_s]
        numbers += [
            number
            for terms in self.decode
            for number in (terms.fixed_s, terms.sequence_s, terms.context_token_s)
        ]
        if not all(0 <= number < float("inf") for number in numbers):
            raise ConfigError(f"coefficients are {numbers}; allowed: 0 or more seconds each")
        if [terms.from_batch for terms in self.decode][:1] != [1]:
            raise ConfigError("coefficients of decode steps begin with a batch of 1")
        for one, two in pairwise(self.decode):
            if one.from_batch >= two.from_batch:
                raise ConfigError(f"batches from {two.from_batch} on follow those from {one.from_batch} on")

    @property
    def fixed_s(self) -> float:
        """What the smallest batches have."""
        return self.decode[0].fixed_s

    def prompts_s(self, shape: StepShape) -> float:
        """As `Phases.prompts_s`."""
        squares = 2 * shape.prompt_pairs - shape.prompt_tokens
        return (
            self.prompt_fixed_s + self.prompt_token_s * shape.prompt_tokens + self.prompt_square_s * squares
        )

    def sequences_s(self, shape: StepShape) -> float:
        """As `Phases.sequences_s`."""
        least = 0.0
        for i, terms in enumerate(self.decode):
            end = self.decode[i + 1].from_batch if i + 1 < len(self.decode) else None
            if end is None or shape.num_sequences < end:
                return max(least, terms.step_s(shape.num_sequences, shape.context_tokens))
            least = max(least, terms.step_s(end - 1, shape.context_tokens))
        raise AssertionError("the last terms have no end")


DYNAMO_H200 = Coefficients(18.55e-3, 14.11e-6, 0.4919e-9, (DecodeTerms(4.385e-3, 37.67e-6, 30.35e-9),))
"""What `fit_dynamo` finds. |predicted / measured - 1|: prompts 1.7 % at the median, 9.3 % at worst of 17 points; steps
2.2 % and 16.5 % of 41. The curves are test data of github.com/ai-dynamo/dynamo, Apache-2.0."""


def distserve(root: Path | None, model: ModelShape, tp: int) -> Coefficients:
    """DistServe's coefficients for `model` on so many A100-80GB, fitted by its authors to their engine.

    Prefill ms = a + b · tokens + c · Σ tokens²; decode ms = a + b · Σ context + c · batch, with other coefficients from
    `decoding_large_small_bs_threshold` sequences on (simdistserve, Zhong et al., OSDI 2024).

    Raises:
        ConfigError: the file is absent, or does not have this model and degree.
    """
    path = file_of(root, "perf/distserve_a100.json")
    known: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
    by_name = {name.rsplit("/", 1)[-1]: degrees for name, degrees in known.items()}
    if model.name not in by_name:
        raise ConfigError(f"--model is {model.name!r}; distserve has {', '.join(by_name)}")
    degrees = by_name[model.name]
    if str(tp) not in degrees:
        raise ConfigError(f"TP is {tp}; distserve has {model.name} at {', '.join(degrees)}")
    found = degrees[str(tp)]
    fixed, token, square = (value * _MS for value in found["prefill"])
    batches = (
        ("decoding_smallbs", 1),
        ("decoding_largebs", int(found["decoding_large_small_bs_threshold"])),
    )
    decode = []
    for name, from_batch in batches:
        start, context, sequence = (value * _MS for value in found[name])
        decode.append(DecodeTerms(start, sequence, context, from_batch))
    return Coefficients(fixed, token, square, tuple(decode))


def fit_dynamo(root: Path | None) -> Coefficients:
    """Coefficients for one H200 (vLLM, Llama-3.1-8B in FP8), fitted to NVIDIA's curves: relative least squares without
    negative coefficients. The batch of a decode point is its throughput times its ITL: at the end of the curves fewer
    sequences ran than were asked for.

    Raises:
        ConfigError: a file is absent.
    """
    with np.load(file_of(root, "perf/dynamo_h200_prefill.npz"), allow_pickle=False) as prefill:
        length = prefill["prefill_isl"].astype(float)
        ttft_s = prefill["prefill_ttft"] * _MS
    with np.load(file_of(root, "perf/dynamo_h200_decode.npz"), allow_pickle=False) as decode:
        itl_s = decode["z_itl"] * _MS
        batch = decode["z_thpt_per_gpu"] * itl_s
        context = batch * decode["y_context_length"]
    fixed, token, square = _relative_fit([np.ones_like(length), length, length**2], ttft_s)
    start, sequence, context_token = _relative_fit([np.ones_like(batch), batch, context], itl_s)
    return Coefficients(fixed, token, square, (DecodeTerms(start, sequence, context_token),))


def _relative_fit(columns: list[NDArray[np.float64]], seconds: NDArray[np.float64]) -> list[float]:
    """Coefficients that minimize the squares of predicted / measured - 1."""
    return [
        float(value) for value in nnls(np.stack(columns, axis=1) / seconds[:, None], np.ones_like(seconds))
    ]
