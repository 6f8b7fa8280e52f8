"""Requests as lengths: what a prompt is made of before there is text, when it comes, and whether the model can hold it.

Everything here is a pure function of its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from twinpool.bench.serving.datasets.settings import DatasetSettings, TooLong, TraceSettings
from twinpool.errors import ConfigError

Key = tuple[int, ...]
"""What a piece's words are drawn from: pieces of one key begin with the same words."""
_OWN, _PREFIX, _HASH, _WARM_UP = range(4)


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of a made prompt."""

    key: Key
    num_tokens: int

    @property
    def is_shared(self) -> bool:
        """Whether other requests may have it too."""
        return self.key[0] in (_PREFIX, _HASH)


@dataclass(frozen=True, slots=True)
class Shape:
    """One request: the pieces of the prompt that is to be made, the output's length, and when it comes (None: the data
    has no times). `hash_ids` are one for each piece, or none."""

    pieces: tuple[Piece, ...]
    output_tokens: int
    at_s: float | None = None
    group: str = ""
    hash_ids: tuple[int, ...] = ()

    @property
    def input_tokens(self) -> int:
        """The prompt's length."""
        return sum(piece.num_tokens for piece in self.pieces)


def own(index: int, num_tokens: int) -> Piece:
    """A piece that no other request has."""
    return Piece((_OWN, index), num_tokens)


def shared_prefix(number: int, num_tokens: int) -> Piece:
    """The beginning that all prompts with this prefix share."""
    return Piece((_PREFIX, number), num_tokens)


def warm_up(index: int, num_tokens: int) -> Piece:
    """A piece that no request of any load has."""
    return Piece((_WARM_UP, index), num_tokens)


def hashed(hash_ids: Sequence[int], input_tokens: int, block_size: int) -> tuple[Piece, ...]:
    """The blocks of a trace's prompt: all of `block_size` tokens, the last one of what is left."""
    rest = input_tokens - block_size * (len(hash_ids) - 1)
    lengths = [block_size] * (len(hash_ids) - 1) + [rest]
    return tuple(Piece((_HASH, id_), length) for id_, length in zip(hash_ids, lengths, strict=True))


def windowed(shapes: Sequence[Shape], trace: TraceSettings) -> list[Shape]:
    """Those that came within the window, in the order in which they came, counted from the window's start and moved
    together by the speed. Shapes without times are all taken, as they are."""
    if any(shape.at_s is None for shape in shapes):
        return list(shapes)
    end_s = math.inf if trace.window_s is None else trace.start_s + trace.window_s
    timed = sorted((shape.at_s or 0.0, number) for number, shape in enumerate(shapes))
    return [
        replace(shapes[number], at_s=(at_s - trace.start_s) / trace.speed)
        for at_s, number in timed
        if trace.start_s <= at_s < end_s
    ]


def scaled(shape: Shape, factor: float) -> Shape:
    """With all lengths multiplied by `factor`, at least 1 token each. Blocks become smaller in the same measure, so
    prompts share as large a part of themselves as before."""
    wanted = max(1, round(shape.input_tokens * factor))
    pieces: list[Piece] = []
    left = wanted
    for number, piece in enumerate(shape.pieces):
        is_last = number == len(shape.pieces) - 1
        length = left if is_last else min(left, math.ceil(piece.num_tokens * factor))
        if length > 0:
            pieces.append(Piece(piece.key, length))
        left -= length
    output = max(1, round(shape.output_tokens * factor))
    return replace(shape, pieces=tuple(pieces), output_tokens=output, hash_ids=shape.hash_ids[: len(pieces)])


def clipped(shape: Shape, context: int) -> Shape:
    """Without the end of the prompt, so that it and the output fit into `context` tokens."""
    output = min(shape.output_tokens, context // 2)
    left = context - output
    pieces: list[Piece] = []
    for piece in shape.pieces:
        if left <= 0:
            break
        pieces.append(Piece(piece.key, min(piece.num_tokens, left)))
        left -= pieces[-1].num_tokens
    return replace(shape, pieces=tuple(pieces), output_tokens=output, hash_ids=shape.hash_ids[: len(pieces)])


@dataclass(frozen=True, slots=True)
class Drawn:
    """The requests of a dataset, and in words what of it was changed or left out."""

    shapes: list[Shape]
    notes: tuple[str, ...] = ()


def fit_to_context(shapes: Sequence[Shape], settings: DatasetSettings, least_input: int = 1) -> Drawn:
    """Shapes whose prompts have at least `least_input` tokens and fit into the context with their output.

    Raises:
        ConfigError: some do not fit and are to be refused, or none is left.
    """
    notes: list[str] = []
    if settings.length_scale != 1:
        shapes = [scaled(shape, settings.length_scale) for shape in shapes]
        notes.append(f"all lengths were multiplied by {settings.length_scale:g}")
    shapes = _at_least(shapes, least_input, notes)
    context = settings.max_model_len
    too_long = [] if context is None else [shape for shape in shapes if _length(shape) > context]
    if context is None or not too_long:
        return Drawn(list(shapes), tuple(notes))
    count = f"{len(too_long)} of {len(shapes)} requests"
    longest = max(map(_length, too_long))
    match settings.too_long:
        case TooLong.REFUSE:
            raise ConfigError(
                f"{count} of dataset {settings.name} are longer than the context of {context} tokens (the longest has "
                f"{longest} with its output); shorten them, or say --too-long clip, scale or drop"
            )
        case TooLong.CLIP:
            made = [clipped(shape, context) if _length(shape) > context else shape for shape in shapes]
            notes.append(f"{count} were clipped to the context of {context} tokens")
        case TooLong.SCALE:
            factor = (context - 2) / longest  # two roundings, of prompt and output, add less than two tokens
            made = [scaled(shape, factor) for shape in shapes]
            notes.append(
                f"all lengths were multiplied by {factor:.4g}, as the longest of {longest} tokens has to fit into "
                f"{context}"
            )
            made = _at_least(made, least_input, notes)
        case TooLong.DROP:
            made = [shape for shape in shapes if _length(shape) <= context]
            notes.append(f"{count} were dropped: they are longer than the context of {context} tokens")
    if not made or max(map(_length, made)) > context:
        raise ConfigError(
            f"no workload of dataset {settings.name} fits into a context of {context} tokens with "
            f"--too-long {settings.too_long}"
        )
    return Drawn(made, tuple(notes))


def _length(shape: Shape) -> int:
    return shape.input_tokens + shape.output_tokens


def _at_least(shapes: Sequence[Shape], least: int, notes: list[str]) -> list[Shape]:
    short = sum(shape.input_tokens < least for shape in shapes)
    if short:
        notes.append(
            f"{short} of {len(shapes)} prompts were lengthened to {least} tokens, the fewest that can be made"
        )
    return [shape if shape.input_tokens >= least else _lengthened(shape, least) for shape in shapes]


def _lengthened(shape: Shape, least: int) -> Shape:
    *first, last = shape.pieces
    missing = least - shape.input_tokens
    return replace(shape, pieces=(*first, Piece(last.key, last.num_tokens + missing)))
