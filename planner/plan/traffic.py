"""The traffic that a plan is for: requests of a trace as lengths, and stretches of it at any rate.

A stretch is a run of consecutive requests whose gaps are all multiplied by one factor: lengths, what prompts share,
order and burstiness stay, only the rate changes. Stretches begin at places spread evenly over the trace, so several of
them tell how much its parts differ (a moving-block bootstrap with one block for each replication). One that goes on
beyond the trace's end goes on at its beginning, with prompts that share nothing with those before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from twinpool.bench.serving.datasets.shapes import Piece, Shape
from twinpool.bench.serving.distributions import Values, percentile
from twinpool.errors import ConfigError
from twinpool.planner.step_shape import StepShape

_GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, without their whole part, lie evenly in [0, 1), however many there are (three-distance theorem)."""
_SILVER = math.sqrt(2) - 1
"""Likewise, and no multiple of the other one is near one of its own."""
_LONGER, _ROUND_TO = 1.25, 1024
"""What workers should take, over the longest request of a trace, and of how many tokens that is a multiple."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """What a closed form needs to know of requests, in tokens: means, unless said otherwise.

    `new_tokens` are those of a prompt that a prefix cache without bounds would not hold. `prompt_pairs` are the (query,
    key) pairs of their attention. `context` is what a running sequence has on average over its steps, so that long
    answers count as often as they are there.
    """

    input_tokens: float
    output_tokens: float
    new_tokens: float
    prompt_pairs: float
    context: float
    longest: int
    median_input: int
    median_output: int

    @property
    def steps(self) -> float:
        """Decode steps of a request: prefill gives the first token."""
        return max(0.0, self.output_tokens - 1)

    @property
    def request(self) -> StepShape:
        """The means of what the steps of a request sum up to (`step_shape.of_request`)."""
        return StepShape(
            num_sequences=round(self.steps),
            context_tokens=round(self.steps * self.context),
            num_chunks=1,
            prompt_tokens=round(self.new_tokens),
            prompt_pairs=round(self.prompt_pairs),
            prompt_context=round(self.input_tokens),
        )

    @property
    def reused_share(self) -> float:
        """Of the prompt tokens."""
        return 1 - self.new_tokens / self.input_tokens


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in the order in which they come, and the seconds from each to the next (the last one's: to the first
    again). `rate_per_s` is what is to be served; None: nobody said. Without `gaps_s` arrivals are a Poisson process.
    """

    shapes: tuple[Shape, ...]
    rate_per_s: float | None
    gaps_s: tuple[float, ...] | None = None
    name: str = "the trace"

    def longer(self, factor: float) -> Traffic:
        """The same with all prompts `factor` times as long; their shared parts grow in the same measure."""
        longer = tuple(_longer(shape, factor) for shape in self.shapes)
        return replace(self, shapes=longer, name=f"{self.name} with prompts × {factor:g}")

    def stretch(self, rate_per_s: float, num_requests: int, replication: int, seed: int = 0) -> list[Shape]:
        """So many consecutive requests from a place that follows from the other arguments, at `rate_per_s` on average.
        The same arguments give the same ones, and other rates the same requests."""
        size = len(self.shapes)
        start = int(size * ((seed * _SILVER + replication * _GOLDEN) % 1.0))
        gaps = self._gaps(start, num_requests, replication, seed)
        factor = num_requests / rate_per_s / float(gaps.sum())
        times = (np.cumsum(gaps) - gaps[0]) * factor
        found = []
        for place, at_s in zip(range(start, start + num_requests), times.tolist(), strict=True):
            lap, index = divmod(place, size)
            shape = _on_lap(self.shapes[index], lap)
            found.append(Shape(shape.pieces, shape.output_tokens, at_s, shape.group, shape.hash_ids))
        return found

    def _gaps(self, start: int, count: int, replication: int, seed: int) -> Values:
        if self.gaps_s is None:
            return np.random.default_rng([seed, replication]).exponential(size=count)
        places = (start + np.arange(count)) % len(self.shapes)
        gaps = np.asarray(self.gaps_s, dtype=np.float64)[places]
        return gaps if gaps.sum() > 0 else np.ones(count)


def traffic_of(shapes: Sequence[Shape], rate_per_s: float | None = None, name: str = "the trace") -> Traffic:
    """Traffic of such requests at `rate_per_s`, None: at the mean rate of their own times, if they have any.

    Raises:
        ConfigError: there are fewer than two requests, or none of them has an output of more than one token.
    """
    if len(shapes) < 2:
        count = "1 request" if len(shapes) == 1 else f"{len(shapes)} requests"
        raise ConfigError(f"{name} has {count}; a plan needs 2 at least, better some hundreds")
    if max(shape.output_tokens for shape in shapes) < 2:
        raise ConfigError(
            f"{name} has no outputs: none is longer than 1 token, so nothing would be decoded; give the lengths of "
            "the answers, or set --output-len (or the dataset's own flag for it)"
        )
    times = [shape.at_s for shape in shapes if shape.at_s is not None]
    if len(times) < len(shapes) or max(times) <= min(times):
        return Traffic(tuple(shapes), rate_per_s, name=name)
    ordered = sorted(shapes, key=lambda shape: shape.at_s or 0.0)
    gaps = np.diff([shape.at_s or 0.0 for shape in ordered])
    mean_s = float(gaps.mean())
    rate = 1 / mean_s if rate_per_s is None else rate_per_s
    return Traffic(tuple(ordered), rate, (*gaps.tolist(), mean_s), name)


def context_for(traffic: Traffic) -> int:
    """Tokens that workers should take in all: of the longest request and a quarter more, a multiple of 1,024."""
    longest = max(shape.input_tokens + shape.output_tokens for shape in traffic.shapes)
    return -(-int(_LONGER * longest) // _ROUND_TO) * _ROUND_TO


def lengths_of(shapes: Sequence[Shape]) -> Lengths:
    """What the closed forms need of them, in this order of arrival."""
    new = new_tokens(shapes)
    inputs = np.array([shape.input_tokens for shape in shapes], dtype=np.float64)
    outputs = np.array([shape.output_tokens for shape in shapes], dtype=np.float64)
    cached = inputs - new
    steps = np.maximum(outputs - 1, 0)
    # A sequence has its prompt and the tokens before: on average half of those that come.
    context = float((steps * (inputs + outputs / 2)).sum() / max(1.0, steps.sum()))
    return Lengths(
        input_tokens=float(inputs.mean()),
        output_tokens=float(outputs.mean()),
        new_tokens=float(new.mean()),
        prompt_pairs=float((new * cached + new * (new + 1) / 2).mean()),
        context=context,
        longest=int((inputs + outputs).max()),
        median_input=int(percentile(inputs, 50)),
        median_output=int(percentile(outputs, 50)),
    )


def new_tokens(shapes: Sequence[Shape]) -> Values:
    """Of each request, the tokens of its prompt behind the longest beginning that an earlier one had; at least one, as
    the last token of a prompt is always computed."""
    known: set[tuple[object, ...]] = set()
    found = np.empty(len(shapes))
    for number, shape in enumerate(shapes):
        cached, is_known = 0, True
        chain: tuple[object, ...] = ()
        for piece in shape.pieces:
            if not piece.is_shared:
                break
            chain = (hash(chain), piece.key, piece.num_tokens)
            is_known = is_known and chain in known
            cached += piece.num_tokens if is_known else 0
            known.add(chain)
        found[number] = max(1, shape.input_tokens - cached)
    return found


def _longer(shape: Shape, factor: float) -> Shape:
    lengths = [max(1, round(piece.num_tokens * factor)) for piece in shape.pieces]
    pieces = (Piece(piece.key, length) for piece, length in zip(shape.pieces, lengths, strict=True))
    return replace(shape, pieces=tuple(pieces))


def _on_lap(shape: Shape, lap: int) -> Shape:
    """The request as it comes again on a later round through the trace: with pieces that no earlier round had."""
    if not lap:
        return shape
    pieces = tuple(Piece((*piece.key, lap), piece.num_tokens) for piece in shape.pieces)
    ids = tuple(id_ + lap * _FAR for id_ in shape.hash_ids)
    return replace(shape, pieces=pieces, hash_ids=ids)


_FAR = 1 << 40
"""Beyond all hash ids of a trace."""
