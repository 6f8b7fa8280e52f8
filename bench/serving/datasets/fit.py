"""Makes `fitted.json` of the public traces, and says how well what is generated from it agrees with them.

    python -m twinpool.bench.serving.datasets.fit azure-code=FILE azure-conversation=FILE mooncake-conversation=FILE

The files: `AzureLLMInferenceTrace_code.csv` and `AzureLLMInferenceTrace_conv.csv` of
github.com/Azure/AzurePublicDataset (CC-BY 4.0), and `FAST25-release/traces/conversation_trace.jsonl` of
github.com/kvcache-ai/Mooncake (Apache-2.0).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from twinpool.bench.serving.datasets.fitted import (
    LEVELS,
    TABLES,
    Arrivals,
    Continued,
    FittedTrace,
    fitted_shapes,
)
from twinpool.bench.serving.datasets.settings import MOONCAKE_BLOCK, DatasetName
from twinpool.bench.serving.datasets.shapes import Shape
from twinpool.bench.serving.datasets.traces import csv_trace, jsonl_trace
from twinpool.bench.serving.distributions import Values
from twinpool.errors import ConfigError

_AZURE = (
    "Azure LLM inference trace 2023, github.com/Azure/AzurePublicDataset b469a11, Microsoft; Patel et al., Splitwise, "
    "ISCA 2024"
)
_MOONCAKE = (
    "Mooncake conversation trace, github.com/kvcache-ai/Mooncake 3b5a594; Qin et al., Mooncake, FAST 2025"
)
_SOURCES = {
    DatasetName.AZURE_CODE: (_AZURE, "CC-BY 4.0; changed: only these distributions were taken from it"),
    DatasetName.AZURE_CONVERSATION: (
        _AZURE,
        "CC-BY 4.0; changed: only these distributions were taken from it",
    ),
    DatasetName.MOONCAKE_CONVERSATION: (_MOONCAKE, "Apache-2.0; only these distributions were taken from it"),
}
_BIN_S = {
    DatasetName.AZURE_CODE: 10.0,
    DatasetName.AZURE_CONVERSATION: 60.0,
    DatasetName.MOONCAKE_CONVERSATION: 60.0,
}
"""Bins of the rate. Code completions come in bursts that last for seconds, so their rate needs shorter ones."""
RESOLUTION_S = {DatasetName.MOONCAKE_CONVERSATION: 3.0}
"""What times are rounded to. Gaps below it cannot be seen, so arrivals within are taken for a Poisson process."""


def read(name: DatasetName, path: str) -> list[Shape]:
    """The requests of a trace's public file. Raises ConfigError."""
    if name is DatasetName.MOONCAKE_CONVERSATION:
        return jsonl_trace(path, MOONCAKE_BLOCK).shapes
    return csv_trace(path).shapes


def fitted(name: DatasetName, shapes: Sequence[Shape]) -> FittedTrace:
    """The tables of one trace."""
    source, licence = _SOURCES[name]
    prefixes = common_prefixes(shapes)
    continued = None
    fresh = list(shapes)
    if any(prefix.num_blocks > 1 for prefix in prefixes):
        fresh = [shape for shape, prefix in zip(shapes, prefixes, strict=True) if prefix.num_blocks <= 1]
        pairs = [pair for pair in zip(shapes, prefixes, strict=True) if pair[1].num_blocks > 1]
        continued = Continued(
            share=round(len(pairs) / len(shapes), 4),
            block_size=MOONCAKE_BLOCK,
            input_tokens=_table(shape.input_tokens for shape, _ in pairs),
            common_share=_table((prefix.num_blocks / len(shape.hash_ids) for shape, prefix in pairs), 4),
            age_s=_table((prefix.age_s for _, prefix in pairs), 1),
        )
    return FittedTrace(
        source=source,
        licence=licence,
        num_requests=len(shapes),
        input_tokens=_table(shape.input_tokens for shape in fresh),
        output_tokens=_table(shape.output_tokens for shape in shapes),
        arrivals=_arrivals(_times(shapes), _BIN_S[name], name not in RESOLUTION_S),
        continued=continued,
    )


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """What a prompt has in common with an earlier one: the first so many blocks, last seen `age_s` before."""

    num_blocks: int
    age_s: float


def common_prefixes(shapes: Sequence[Shape]) -> list[CommonPrefix]:
    """Of each shape, its leading blocks that an earlier one had too."""
    seen: dict[int, float] = {}
    found: list[CommonPrefix] = []
    for shape in shapes:
        at_s = shape.at_s or 0.0
        num_blocks = next((n for n, id_ in enumerate(shape.hash_ids) if id_ not in seen), len(shape.hash_ids))
        found.append(
            CommonPrefix(num_blocks, at_s - seen[shape.hash_ids[num_blocks - 1]] if num_blocks else 0.0)
        )
        seen.update(dict.fromkeys(shape.hash_ids, at_s))
    return found


def reuse_share(shapes: Sequence[Shape]) -> float:
    """The share of prompt tokens that a prefix cache without bounds would hold when their prompt comes."""
    prefixes = common_prefixes(shapes)
    reused = sum(
        sum(piece.num_tokens for piece in shape.pieces[: prefix.num_blocks])
        for shape, prefix in zip(shapes, prefixes, strict=True)
    )
    return reused / sum(shape.input_tokens for shape in shapes)


def gamma_shape(gaps: Values) -> float:
    """The maximum-likelihood shape of a gamma distribution (Minka 2002, "Estimating a gamma distribution", eq. 10)."""
    s = math.log(gaps.mean()) - float(np.log(gaps).mean())
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    for _ in range(50):
        slope = 1 / shape - _trigamma(shape)
        shape = 1 / (1 / shape + (math.log(shape) - _digamma(shape) - s) / (shape**2 * slope))
    return shape


def ks_distance(one: Values, other: Values) -> float:
    """The largest difference between the two samples' distribution functions (Kolmogorov-Smirnov)."""
    one, other = np.sort(one), np.sort(other)
    at = np.concatenate([one, other])
    shares = (np.searchsorted(sample, at, side="right") / len(sample) for sample in (one, other))
    return float(np.abs(next(shares) - next(shares)).max())


def dispersion(times: Values, bin_s: float) -> float:
    """Variance over mean of the requests per bin: 1 for a Poisson process of constant rate, more if bursty."""
    counts = np.bincount((times / bin_s).astype(np.int64))
    return float(counts.var() / counts.mean())


@dataclass(frozen=True, slots=True)
class Goodness:
    """A trace beside as many generated requests: distances of the lengths and gaps, and pairs (trace, generated)."""

    input_ks: float
    output_ks: float
    gap_ks: float
    dispersion_1s: tuple[float, float]
    dispersion_10s: tuple[float, float]
    reuse: tuple[float, float]
    rank_correlation: float

    def __str__(self) -> str:
        pairs = {"per second": self.dispersion_1s, "per 10 s": self.dispersion_10s, "reuse": self.reuse}
        return (
            f"KS input {self.input_ks:.3f}, output {self.output_ks:.3f}, gaps {self.gap_ks:.3f}; "
            + ", ".join(f"{name} {one:.3g} → {other:.3g}" for name, (one, other) in pairs.items())
            + f"; rank correlation of input and output {self.rank_correlation:.3f}"
        )


def goodness(shapes: Sequence[Shape], trace: FittedTrace, resolution_s: float, seed: int) -> Goodness:
    """How well `trace` stands for `shapes`, whose times were rounded to `resolution_s` (0: were not)."""
    made = fitted_shapes(trace, len(shapes), seed)
    both = (shapes, made)
    inputs, outputs = zip(*(_lengths(each) for each in both), strict=True)
    times = [_seen(_times(each), resolution_s) for each in both]
    return Goodness(
        ks_distance(*inputs),
        ks_distance(*outputs),
        ks_distance(np.diff(times[0]), np.diff(times[1])),
        (dispersion(times[0], 1.0), dispersion(times[1], 1.0)),
        (dispersion(times[0], 10.0), dispersion(times[1], 10.0)),
        (reuse_share(shapes), reuse_share(made)),
        float(np.corrcoef(_ranks(inputs[0]), _ranks(outputs[0]))[0, 1]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the tables of all traces that are named, and keeps those of the others."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", metavar="NAME=FILE", help=f"NAME is one of {', '.join(_SOURCES)}")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    known = msgspec.json.decode(TABLES.read_bytes()) if TABLES.exists() else {}
    try:
        for name, path in (file.split("=", 1) for file in args.files):
            trace_name = DatasetName(name)
            shapes = read(trace_name, path)
            trace = known[name] = fitted(trace_name, shapes)
            found = goodness(shapes, trace, RESOLUTION_S.get(trace_name, 0.0), seed=0)
            print(f"{name}: gap shape {trace.arrivals.gap_shape:.3f}; {found}")
    except (ConfigError, ValueError, KeyError) as exc:
        print(f"fit: {exc}", file=sys.stderr)
        return 2
    if not args.check:
        lines = (f'"{name}": {msgspec.json.encode(known[name]).decode()}' for name in sorted(known))
        TABLES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return 0


def _arrivals(times: Values, bin_s: float, sees_gaps: bool) -> Arrivals:
    """The rate over whole bins, and the shape of the gaps on an axis that counts expected requests."""
    num_bins = int(times[-1] // bin_s)
    counts = np.bincount((times / bin_s).astype(np.int64))[:num_bins]
    shape = 1.0
    if sees_gaps:
        edges = bin_s * np.arange(num_bins + 1)
        expected = np.concatenate([[0], np.cumsum(counts)])
        gaps = np.diff(np.interp(times[times < edges[-1]], edges, expected))
        shape = round(gamma_shape(gaps[gaps > 0]), 3)
    return Arrivals(bin_s, tuple(counts.tolist()), shape)


def _table(values: Iterable[float], digits: int = 0) -> tuple[float, ...]:
    quantiles = np.quantile(np.array(list(values), dtype=np.float64), LEVELS)
    return tuple(round(value, digits) if digits else round(value) for value in quantiles.tolist())


def _seen(times: Values, resolution_s: float) -> Values:
    """`times` as a trace of that resolution has them."""
    return np.rint(times / resolution_s) * resolution_s if resolution_s else times


def _times(shapes: Sequence[Shape]) -> Values:
    return np.array([shape.at_s or 0.0 for shape in shapes])


def _lengths(shapes: Sequence[Shape]) -> tuple[Values, Values]:
    return (
        np.array([float(shape.input_tokens) for shape in shapes]),
        np.array([float(shape.output_tokens) for shape in shapes]),
    )


def _ranks(values: Values) -> Values:
    """Ranks from 0, equal values at their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    middles: Values = np.cumsum(counts) - (counts + 1) / 2
    return middles[inverse]


def _digamma(x: float) -> float:
    """By recurrence to x ≥ 6 and the asymptotic series (Abramowitz and Stegun 6.3.18)."""
    moved = 0.0
    while x < 6:
        moved -= 1 / x
        x += 1
    f = 1 / (x * x)
    return moved + math.log(x) - 0.5 / x - f * (1 / 12 - f * (1 / 120 - f / 252))


def _trigamma(x: float) -> float:
    """Likewise (6.4.12)."""
    moved = 0.0
    while x < 6:
        moved += 1 / (x * x)
        x += 1
    f = 1 / (x * x)
    return moved + 1 / x + f / 2 + f / x * (1 / 6 - f * (1 / 30 - f / 42))


if __name__ == "__main__":
    sys.exit(main())
