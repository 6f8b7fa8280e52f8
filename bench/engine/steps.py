"""Whole steps of the model: prompts of several lengths, and decoding by batch and context."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from twinpool.bench.engine import floors
from twinpool.bench.engine.floors import Piece
from twinpool.bench.engine.measuring import Bench
from twinpool.bench.engine.model_bed import ModelBed


def prefill(bench: Bench, bed: ModelBed, lengths: Sequence[int]) -> None:
    """A prompt in one step, by its length."""
    for length in lengths:
        if bed.fits(pieces := [Piece(0, length)]):
            batch = bed.step(pieces)
            work = floors.step(bed.shape, pieces)
            bench.operation(
                "prefill",
                f"{length} tokens",
                partial(bed.runner.run, batch),
                work,
                length,
                "tokens",
            )


def decode(bench: Bench, bed: ModelBed, sizes: Sequence[tuple[int, int]]) -> None:
    """One token of each sequence, by (batch, context); the context counts the token itself."""
    for num_seqs, context in sizes:
        if bed.fits(pieces := [Piece(context - 1, 1)] * num_seqs):
            batch = bed.step(pieces)
            work = floors.step(bed.shape, pieces)
            name = f"batch {num_seqs}, context {context}"
            bench.operation("decode", name, partial(bed.runner.run, batch), work, num_seqs, "tokens")
