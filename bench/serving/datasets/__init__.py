"""Workloads: requests with prompts of exact lengths, from distributions, traces and files.

`settings` says what is wanted. `generated`, `fitted` and `traces` give *shapes*, requests as lengths; `shapes` fits
them to the model's context, and `text` makes the prompts. `prompts` reads data that has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import tokenizers

from twinpool.bench.serving.datasets.fitted import fitted_shapes, fitted_traces
from twinpool.bench.serving.datasets.generated import lognormal_shapes, prefix_shapes, random_shapes
from twinpool.bench.serving.datasets.prompts import custom, fit_prompts, sharegpt
from twinpool.bench.serving.datasets.settings import (
    FILE_DATASETS,
    DatasetName,
    DatasetSettings,
    LognormalLengths,
    PrefixRepetition,
    PromptAs,
    RandomLengths,
    TooLong,
    TraceSettings,
)
from twinpool.bench.serving.datasets.shapes import Drawn, fit_to_context, warm_up, windowed
from twinpool.bench.serving.datasets.text import Synthesizer
from twinpool.bench.serving.datasets.traces import csv_trace, jsonl_trace, record_trace
from twinpool.bench.serving.workload import Chat, PlannedRequest
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
    "make_shapes",
    "make_workload",
    "warm_up_requests",
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
    settings: DatasetSettings,
    tokenizer: tokenizers.Tokenizer,
    num_prompts: int,
    seed: int,
    *,
    is_bound: bool = False,
) -> Workload:
    """`num_prompts` requests of a dataset, of one with a file at most as many as that has (0: all of them). `at_s` is
    None unless the data has times. The same arguments make the same requests. If `num_prompts` is a bound that nobody
    asked for, that there are fewer is not noted.

    Raises:
        ConfigError: a file cannot be read or lacks something, a length is beyond the context, or nothing is left.
    """
    _check(settings, num_prompts, seed)
    match settings.name:
        case DatasetName.SHAREGPT | DatasetName.CUSTOM:
            workload = _prompted(settings, tokenizer, num_prompts, seed)
        case _:
            workload = _synthesized(_shapes(settings, num_prompts, seed), settings, tokenizer, seed)
    missing = num_prompts - len(workload.requests)
    if missing > 0 and not is_bound:
        note = f"there are {len(workload.requests)} requests, not {num_prompts}"
        workload = Workload(workload.requests, (*workload.notes, note))
    return workload


def make_shapes(settings: DatasetSettings, num_prompts: int, seed: int) -> Drawn:
    """The requests of `make_workload` as lengths, with no prompts made of them: no tokenizer is needed.

    Raises:
        ConfigError: as there, or the data has prompts of its own, whose lengths only a tokenizer tells.
    """
    own_prompts = (DatasetName.SHAREGPT, DatasetName.CUSTOM)
    allowed = f"one of lengths ({', '.join(sorted(set(DatasetName) - set(own_prompts)))})"
    require("--dataset-name", settings.name.value, settings.name not in own_prompts, allowed)
    _check(settings, num_prompts, seed)
    drawn = _shapes(settings, num_prompts, seed)
    fitted = fit_to_context(drawn.shapes, settings)
    return Drawn(fitted.shapes, (*drawn.notes, *fitted.notes))


def _check(settings: DatasetSettings, num_prompts: int, seed: int) -> None:
    has_file = settings.name in FILE_DATASETS
    allowed = "0 (all) or more" if has_file else "1 or more; 0 means all of a file, and this dataset has none"
    require("--num-prompts", num_prompts, num_prompts >= (0 if has_file else 1), allowed)
    require("--seed", seed, seed >= 0, "0 or more")


def warm_up_requests(
    requests: Sequence[PlannedRequest],
    prompt_as: PromptAs,
    tokenizer: tokenizers.Tokenizer,
    num_prompts: int,
    seed: int,
) -> list[PlannedRequest]:
    """As many other requests, as long as the first of `requests`, again and again if those are fewer.

    What a server has cached of them is of no use to the load, whatever dataset that came from.
    """
    synthesizer = Synthesizer(tokenizer, prompt_as, seed)
    lengths = [
        (max(request.input_tokens, synthesizer.least_tokens), request.output_tokens)
        for request in islice(cycle(requests), num_prompts)
    ]
    return [
        PlannedRequest(
            index=index,
            prompt=synthesizer.prompt([warm_up(index, input_tokens)]),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            group="warm-up",
        )
        for index, (input_tokens, output_tokens) in enumerate(lengths)
    ]


def _shapes(settings: DatasetSettings, num_prompts: int, seed: int) -> Drawn:
    """Requests of made prompts, with what was left out."""
    path = settings.path or ""
    match settings.name:
        case DatasetName.RANDOM:
            return Drawn(random_shapes(settings.random, num_prompts, seed))
        case DatasetName.LOGNORMAL:
            return Drawn(lognormal_shapes(settings.lognormal, num_prompts, seed))
        case DatasetName.PREFIX_REPETITION:
            return Drawn(prefix_shapes(settings.prefix_repetition, num_prompts, seed))
        case DatasetName.JSONL_TRACE:
            drawn = jsonl_trace(path, settings.trace.block_size)
        case DatasetName.CSV_TRACE:
            drawn = csv_trace(path)
        case DatasetName.RECORDS:
            drawn = record_trace(path)
        case _:
            table = fitted_traces()[settings.name]
            drawn = Drawn(fitted_shapes(table, num_prompts, seed, settings.trace.start_s))
    taken = windowed(drawn.shapes, settings.trace)
    if not taken:
        last_s = max(shape.at_s or 0.0 for shape in drawn.shapes)
        raise ConfigError(
            f"dataset {settings.name} has no request in the window that --trace-start and --trace-window leave: its "
            f"{len(drawn.shapes)} requests come within {last_s:.1f} s"
        )
    return Drawn(taken[: num_prompts or None], drawn.notes)


def _synthesized(
    drawn: Drawn, settings: DatasetSettings, tokenizer: tokenizers.Tokenizer, seed: int
) -> Workload:
    """Prompts for the shapes, of exactly their lengths."""
    synthesizer = Synthesizer(tokenizer, settings.prompt_as, seed)
    fitted = fit_to_context(drawn.shapes, settings, synthesizer.least_tokens)
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
    return Workload(requests, (*drawn.notes, *fitted.notes))


def _prompted(
    settings: DatasetSettings, tokenizer: tokenizers.Tokenizer, num_prompts: int, seed: int
) -> Workload:
    """The data's own prompts."""
    read = sharegpt if settings.name is DatasetName.SHAREGPT else custom
    fitted = fit_prompts(read(settings, tokenizer, seed), settings, tokenizer, num_prompts or None)
    requests = [
        PlannedRequest(
            index=index,
            prompt=_as_wanted(request.prompt, settings, tokenizer),
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            group=request.group,
        )
        for index, request in enumerate(fitted.requests)
    ]
    return Workload(requests, fitted.notes)


def _as_wanted(
    prompt: str | Chat, settings: DatasetSettings, tokenizer: tokenizers.Tokenizer
) -> str | tuple[int, ...] | Chat:
    if settings.prompt_as is PromptAs.TEXT:
        return prompt
    if isinstance(prompt, Chat):
        raise ConfigError("--prompt-as ids goes with prompts, and the data has messages; leave it out")
    return tuple(tokenizer.encode(prompt).ids)
