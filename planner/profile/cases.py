"""Which steps a profile measures: batches as the schedulers build them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from twinpool.bench.engine.floors import Piece
from twinpool.planner.step_shape import StepShape, of_chunk, of_sequences, together

BLOCK_SIZE = 16


class Part(StrEnum):
    """What a step is made of. The fit's residuals are told for each."""

    DECODE = "decode"
    PROMPT = "prompt"
    CACHED = "prompt after a cached one"
    CHUNKS = "several chunks"
    MIXED = "chunks beside sequences"


@dataclass(frozen=True, slots=True)
class StepCase:
    """One step: sequences with so many tokens each, of which the last is computed, and chunks as (new, cached).

    What `is_held_out` tests the fit and is not fitted.
    """

    part: Part
    lengths: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    is_held_out: bool = False

    @property
    def name(self) -> str:
        """For people."""
        words = []
        if self.lengths:
            low, high = min(self.lengths), max(self.lengths)
            words.append(f"{len(self.lengths)} sequences of {low}" + (f" to {high}" if high > low else ""))
        words += [f"{new} new after {cached}" if cached else f"{new} new" for new, cached in self.chunks]
        return ", ".join(words)

    @property
    def shape(self) -> StepShape:
        """As service times take it."""
        return together(of_sequences(self.lengths), *(of_chunk(new, cached) for new, cached in self.chunks))

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """As the engine takes it: decoding ones first, and each chunk ends its prompt."""
        return (
            *(Piece(length - 1, 1) for length in self.lengths),
            *(Piece(cached, new) for new, cached in self.chunks),
        )

    @property
    def num_rows(self) -> int:
        """Rows of its matrix products."""
        return len(self.lengths) + sum(new for new, _ in self.chunks)

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max((piece.start + piece.count for piece in self.pieces), default=0)

    @property
    def pool_tokens(self) -> int:
        """KV slots that it takes, in whole blocks."""
        return sum(-(-(p.start + p.count) // BLOCK_SIZE) * BLOCK_SIZE for p in self.pieces)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The steps of a profile. `busy` are measured beside a neighbour that does the other pool's work, too, `sleeping`
    after a worker had nothing to do, alone and beside a neighbour. At least `least_rounds` of all of them, for `most_s`
    if that allows more. Between the rows of `row_knots` the matrix products are interpolated."""

    alone: tuple[StepCase, ...]
    busy: tuple[StepCase, ...]
    sleeping: tuple[StepCase, ...]
    row_knots: tuple[int, ...]
    neighbour_decode: StepCase
    neighbour_prompt: StepCase
    least_rounds: int
    most_s: float

    def beside(self, case: StepCase) -> StepCase:
        """What the neighbour of a busy case does."""
        return self.neighbour_prompt if case.part is Part.DECODE else self.neighbour_decode

    @property
    def pool_tokens(self) -> int:
        """KV slots of the largest step."""
        every = (*self.alone, *self.busy, self.neighbour_decode, self.neighbour_prompt)
        return max(case.pool_tokens for case in every)


ROW_KNOTS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Where the products' time may bend: kernels turn from reading weights to arithmetic somewhere. Several shapes lie in
each segment, so one that was disturbed bends nothing by itself. Kernels work in tiles of 6, 16 or 32 rows, the last of
which may be nearly empty: so shapes have rows of all remainders, as traffic has, and not whole tiles alone, which cost
the least for each row."""
_RAGGED = (40, 90, 130, 210, 260, 330, 470, 520, 610, 700)


def full_plan(max_model_len: int) -> StepPlan:
    """Everything, as far as a context of `max_model_len` tokens holds it."""
    alone = (
        *_decode((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64), 256),
        *_decode((1, 2, 4, 8), 1024),
        *_decode((1, 4, 16, 32), 64),
        *_decode((1, 8), 1900),
        *_decode((16, 32), 600),
        *_prompts((4, 9, 16, 25, 32, 53, 64, 83, 97, 117, 128, 150, 179, 206, 240, 256, 283, 330, 390, 465, 512, 600)),
        *_prompts((778, 1024)),
        *_cached(((18, 256), (16, 1024), (70, 512), (99, 400), (128, 512), (135, 1536), (170, 300))),
        *_cached(((256, 1024), (500, 512))),
        *_chunks(((64, 0), (64, 0)), ((128, 0), (64, 0), (64, 0)), ((128, 512), (128, 0)), ((32, 0),) * 8),
        *_mixed(1, 256, ((127, 0),)),
        *_mixed(2, 200, ((67, 0),)),
        *_mixed(4, 256, ((124, 0),)),
        *_mixed(3, 200, ((92, 0),)),
        *_mixed(8, 256, ((120, 0),)),
        *_mixed(8, 512, ((120, 512),)),
        *_mixed(3, 400, ((96, 384),)),
        *_mixed(8, 256, ((24, 256),)),
        *_mixed(5, 300, ((35, 128),)),
        *_mixed(2, 200, ((160, 0),)),
        *_mixed(16, 256, ((114, 0),)),
        *_mixed(1, 200, ((233, 0),)),
        *_mixed(16, 256, ((240, 0),)),
        *_mixed(3, 250, ((345, 0),)),
        *_mixed(4, 256, ((508, 0),)),
        *_mixed(2, 300, ((1000, 0),)),
        StepCase(Part.DECODE, _RAGGED, (), True),
        *_decode((5, 20), 400, is_held_out=True),
        *_prompts((100, 300, 700), is_held_out=True),
        *_cached(((200, 300), (90, 800)), is_held_out=True),
        *_mixed(6, 400, ((122, 200),), is_held_out=True),
        *_mixed(3, 150, ((60, 0), (65, 300)), is_held_out=True),
    )  # fmt: skip
    busy = (
        *_decode((1, 4, 8, 16, 32), 256),
        *_decode((1, 8), 1024),
        *_prompts((16, 64, 128, 256, 512)),
        *_cached(((128, 512), (256, 1024))),
    )
    sleeping = (*_decode((1, 8), 256), *_prompts((32, 128, 256)), *_cached(((128, 512),)))
    return _fitting(alone, busy, sleeping, max_model_len, least_rounds=3, most_s=100.0)


def quick_plan(max_model_len: int) -> StepPlan:
    """What tells the parts of the model apart, and no more."""
    alone = (
        *_decode((1, 2, 4, 8, 16, 32, 64), 256),
        *_decode((1, 8), 1024),
        *_decode((16,), 64),
        *_prompts((8, 32, 67, 117, 256, 480)),
        *_cached(((18, 512), (117, 512), (256, 1024))),
        *_chunks(((64, 0), (64, 0))),
        *_mixed(2, 200, ((67, 0),)),
        *_mixed(8, 256, ((120, 0),)),
        *_mixed(4, 256, ((96, 512),)),
        *_mixed(3, 250, ((240, 0),)),
        StepCase(Part.DECODE, _RAGGED, (), True),
        *_prompts((300,), is_held_out=True),
        *_mixed(3, 150, ((60, 0), (65, 300)), is_held_out=True),
    )
    busy = (*_decode((1, 8), 256), *_decode((8,), 1024), *_prompts((64, 256)), *_cached(((128, 512),)))
    sleeping = (*_decode((1,), 256), *_prompts((32, 128)))
    return _fitting(alone, busy, sleeping, max_model_len, least_rounds=2, most_s=10.0)


def _fitting(
    alone: Sequence[StepCase], busy: Sequence[StepCase], sleeping: Sequence[StepCase], max_model_len: int, *,
    least_rounds: int, most_s: float,
) -> StepPlan:  # fmt: skip
    held = tuple(case for case in alone if case.longest <= max_model_len)
    most_rows = max(case.num_rows for case in held)
    return StepPlan(
        alone=held,
        busy=tuple(case for case in busy if case.longest <= max_model_len),
        sleeping=tuple(case for case in sleeping if case.longest <= max_model_len),
        row_knots=tuple(rows for rows in ROW_KNOTS if rows <= most_rows),
        neighbour_decode=StepCase(Part.DECODE, (min(256, max_model_len),) * 8),
        neighbour_prompt=StepCase(Part.PROMPT, (), ((min(256, max_model_len), 0),)),
        least_rounds=least_rounds,
        most_s=most_s,
    )


def _decode(batches: Sequence[int], length: int, *, is_held_out: bool = False) -> Iterator[StepCase]:
    return (StepCase(Part.DECODE, (length,) * batch, (), is_held_out) for batch in batches)


def _prompts(lengths: Sequence[int], *, is_held_out: bool = False) -> Iterator[StepCase]:
    return (StepCase(Part.PROMPT, (), ((length, 0),), is_held_out) for length in lengths)


def _cached(chunks: Sequence[tuple[int, int]], *, is_held_out: bool = False) -> Iterator[StepCase]:
    return (StepCase(Part.CACHED, (), (chunk,), is_held_out) for chunk in chunks)


def _chunks(*steps: tuple[tuple[int, int], ...]) -> Iterator[StepCase]:
    return (StepCase(Part.CHUNKS, (), chunks) for chunks in steps)


def _mixed(
    batch: int, length: int, chunks: tuple[tuple[int, int], ...], *, is_held_out: bool = False
) -> Iterator[StepCase]:
    yield StepCase(Part.MIXED, (length,) * batch, chunks, is_held_out)
