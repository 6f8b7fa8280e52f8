"""Service times read from a table of measurements: Splitwise's."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from twinpool.errors import ConfigError
from twinpool.planner.profile.nnls import nnls
from twinpool.planner.step_shape import StepShape
from twinpool.planner.times.curves import Curve
from twinpool.planner.times.model_shapes import ModelShape
from twinpool.planner.times.public_data import file_of

_HARDWARE = {"a100": "a100-80gb", "h100": "h100-80gb"}
_MODELS = {"llama-2-70b": "llama2-70b", "bloom-176b": "bloom-176b"}
_FAILED_SHARE = 0.5
"""A prompt that took less than this share of what a shorter one took was not computed: such rows are left out."""


class _Row(NamedTuple):
    prompt_size: int
    batch_size: int
    token_size: int
    prompt_s: float
    token_s: float

    @property
    def prompt_tokens(self) -> int:
        return self.prompt_size * self.batch_size

    @property
    def context_tokens(self) -> float:
        """What a step read on average while the outputs grew."""
        return self.batch_size * (self.prompt_size + self.token_size / 2)


@dataclass(frozen=True, slots=True)
class SplitwiseTable:
    """Prompts by their tokens, streams by their number, and a little for each token of context.

    `num_failed` rows were left out: their prompts were not computed.
    """

    prompt_curve: Curve
    sequence_curve: Curve
    context_token_s: float
    num_failed: int

    @property
    def fixed_s(self) -> float:
        """A step of one sequence."""
        return self.sequence_curve(1)

    def prompts_s(self, shape: StepShape) -> float:
        """By the tokens that are new; what those that are cached cost was not measured."""
        return self.prompt_curve(shape.prompt_tokens)

    def sequences_s(self, shape: StepShape) -> float:
        """By the number of sequences and their context."""
        return self.sequence_curve(shape.num_sequences) + self.context_token_s * shape.context_tokens


def splitwise(root: Path | None, hardware: str, model: ModelShape, tp: int) -> SplitwiseTable:
    """What the authors of Splitwise (Patel et al., ISCA 2024) measured of `model` on so many A100 or H100.

    Rows of `h100-80gb-pcap` are not offered: they are those of `h100-80gb` with prompts times 1.3, not measurements.

    Raises:
        ConfigError: the file is absent, or has no rows for these.
    """
    if hardware not in _HARDWARE:
        derived = "; h100-80gb-pcap was derived from h100, not measured" if "pcap" in hardware else ""
        raise ConfigError(
            f"--times is 'splitwise:{hardware}'; allowed: splitwise:a100, splitwise:h100{derived}"
        )
    if model.name not in _MODELS:
        raise ConfigError(f"--model is {model.name!r}; splitwise has {', '.join(_MODELS)}")
    path = file_of(root, "perf/splitwise_a100_h100.csv")
    with path.open(encoding="utf-8", newline="") as file:
        found = [
            row
            for row in csv.DictReader(file)
            if row["hardware"] == _HARDWARE[hardware] and row["model"] == _MODELS[model.name]
        ]
    degrees = sorted({int(row["tensor_parallel"]) for row in found})
    rows = [_row(row) for row in found if int(row["tensor_parallel"]) == tp]
    if not rows:
        allowed = ", ".join(map(str, degrees)) or "none"
        raise ConfigError(f"TP is {tp}; splitwise has {model.name} on {hardware} at {allowed}")
    return _table(rows)


def _row(row: dict[str, str]) -> _Row:
    return _Row(
        int(row["prompt_size"]),
        int(row["batch_size"]),
        int(row["token_size"]),
        float(row["prompt_time"]) / 1e3,
        float(row["token_time"]) / 1e3,
    )


def _table(rows: Sequence[_Row]) -> SplitwiseTable:
    computed = _without_failed(rows)
    single = [
        row
        for row in computed
        if row.batch_size == 1 and row.token_size == min(r.token_size for r in computed)
    ]
    columns = np.array([[1.0, row.context_tokens] for row in single])
    context_token_s = float(nnls(columns, np.array([row.token_s for row in single]))[1])
    return SplitwiseTable(
        Curve((row.prompt_tokens, row.prompt_s) for row in computed),
        Curve((row.batch_size, row.token_s - context_token_s * row.context_tokens) for row in computed),
        context_token_s,
        len(rows) - len(computed),
    )


def _without_failed(rows: Sequence[_Row]) -> list[_Row]:
    longest_s, computed = 0.0, []
    for row in sorted(rows, key=lambda row: row.prompt_tokens):
        longest_s = max(longest_s, row.prompt_s)
        if row.prompt_s >= _FAILED_SHARE * longest_s:
            computed.append(row)
    return computed
