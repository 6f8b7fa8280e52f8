"""Workloads: requests with prompts of exact lengths, from distributions, traces and files.

`settings` says what is wanted; `generated` (and the readers of files) give *shapes*, requests as lengths; `shapes` fits
them to the model's context; `text` makes the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

from twinpool.bench.serving.datasets.generated import lognormal_shapes, prefix_shapes, random_shapes
from twinpool.bench.serving.datasets.settings import (
    DatasetName,
    DatasetSettings,
    LognormalLengths,
    PrefixRepetition,
    PromptAs,
    RandomLengths,
    TooLong,
    TraceSettings,
)
from twinpool.bench.serving.datasets.shapes import Shape, fit
from twinpool.bench.serving.datasets.text import Synthesizer
from twinpool.bench.serving.workload import PlannedRequest
from twinpool.config import require
from twinpool.errors import ConfigError

__all__ = [
    "DatasetName",
    "DatasetSettings",
    "LognormalLengths",
    "PrefixRepetition",
    "PromptAs",
    "RandomLengths",
    "TooLong",
    "TraceSettings",
    "Workload",
    "make_requests",
    "make_workload",
]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order in which they are to come, and in words what of the dataset was changed or left out."""

    requests: list[PlannedRequest]
    notes: tuple[str, ...] = ()


def make_requests(
    settings: DatasetSettings, tokenizer: tokenizers.Tokenizer, num_prompts: int, seed: int
) -> list[PlannedRequest]:
    """The requests of `make_workload`, without its notes. Raises ConfigError."""
    return make_workload(settings, tokenizer, num_prompts, seed).requests


def make_workload(
    settings: DatasetSettings, tokenizer: tokenizers.Tokenizer, num_prompts: int, seed: int
) -> Workload:
    """`num_prompts` requests of a dataset, of one with a file at most as many as that has (0: all of them). `at_s` is
    None unless the data has times. The same arguments make the same requests.

    Raises:
        ConfigError: a file cannot be read or lacks something, a length is beyond the context, or nothing is left.
    """
    require("--num-prompts", num_prompts, num_prompts >= 1, "at least 1")
    shapes = _drawn(settings, num_prompts, seed)
    return _synthesized(shapes, settings, tokenizer, seed)


def _drawn(settings: DatasetSettings, num_prompts: int, seed: int) -> list[Shape]:
    match settings.name:
        case DatasetName.RANDOM:
            return random_shapes(settings.random, num_prompts, seed)
        case DatasetName.LOGNORMAL:
            return lognormal_shapes(settings.lognormal, num_prompts, seed)
        case DatasetName.PREFIX_REPETITION:
            return prefix_shapes(settings.prefix_repetition, num_prompts, seed)
        case _:
            raise ConfigError(f"--dataset-name {settings.name} cannot be read yet")


def _synthesized(
    shapes: Sequence[Shape], settings: DatasetSettings, tokenizer: tokenizers.Tokenizer, seed: int
) -> Workload:
    """Prompts for `shapes`, of exactly their lengths."""
    synthesizer = Synthesizer(tokenizer, settings.prompt_as, seed)
    fitted = fit(shapes, settings, synthesizer.least_tokens)
    requests = [
        PlannedRequest(
            index=index,
            prompt=synthesizer.prompt(shape.pieces),
            input_tokens=shape.input_tokens,
            output_tokens=shape.output_tokens,
            at_s=shape.at_s,
            group=shape.group,
            hash_ids=shape.hash_ids,
        )
        for index, shape in enumerate(fitted.shapes)
    ]
    synthesizer.check(
        [request.prompt for request in requests], [request.input_tokens for request in requests]
    )
    return Workload(requests, fitted.notes)
