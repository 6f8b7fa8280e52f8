"""The engine's operations alone, over all layers or at the sizes of one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from twinpool.bench.engine import floors
from twinpool.bench.engine.floors import Piece, Shape
from twinpool.bench.engine.measuring import Bench
from twinpool.bench.engine.model_bed import ModelBed
from twinpool.bench.engine.timing import Run
from twinpool.engine.batch import SequenceSlice
from twinpool.engine.sampler import choose_tokens
from twinpool.kernels.activation import silu_mul
from twinpool.kernels.kv_write import kv_write
from twinpool.kernels.linear import Linear
from twinpool.kernels.paged_attention import AttentionParams, paged_attention
from twinpool.kernels.rms_norm import add_rms_norm, rms_norm
from twinpool.kernels.rope_kv_write import rope_kv_write_
from twinpool.request import RequestKey, SamplingParams

_EPS = 1e-5
_LAYERS = 8
"""What is measured at the sizes of one layer runs so often in a row, as in a model: the code is then in the caches, and
weights, of which each layer has its own, are not."""
_GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
_PLAIN = SamplingParams(max_tokens=1, seed=0, temperature=1.0)
_NUCLEUS = SamplingParams(max_tokens=1, seed=0, temperature=0.8, top_k=50, top_p=0.95)


def attention(bench: Bench, bed: ModelBed, cases: Sequence[tuple[str, Sequence[Piece]]]) -> None:
    """Attention of one step, all layers one after the other."""
    for name, pieces in cases:
        if bed.fits(pieces):
            work = floors.attention(bed.shape, pieces)
            bench.operation("attention", name, _attention(bed, pieces), work)


def kv(bench: Bench, bed: ModelBed, counts: Sequence[int]) -> None:
    """Writing the keys and values of so many tokens, all layers one after the other."""
    shape = bed.shape
    for count in counts:
        if bed.fits([Piece(0, count)]):
            elements = len(shape.windows) * 2 * count * shape.kv_dim
            work = floors.elementwise(elements, elements, shape.element_bytes)
            bench.operation("kv write", f"{count} tokens", _kv_write(bed, count), work, count, "tokens")


def linear(bench: Bench, bed: ModelBed, row_counts: Sequence[int]) -> None:
    """The matrix products of several layers, each kind alone, and that of the head."""
    shape = bed.shape
    sizes = {
        "qkv": (shape.hidden, shape.query_dim + 2 * shape.kv_dim),
        "output": (shape.query_dim, shape.hidden),
        "gate and up": (shape.hidden, 2 * shape.inner),
        "down": (shape.inner, shape.hidden),
        "head": (shape.hidden, shape.vocab),
    }
    for name, (inputs, outputs) in sizes.items():
        count = 1 if name == "head" else _LAYERS
        products = [Linear(_random(bed, outputs, inputs)) for _ in range(count)]
        for rows in row_counts:
            work = floors.linear(rows, inputs, outputs, shape.element_bytes) * count
            x = _random(bed, rows, inputs)
            bench.operation("linear", f"{name}, {rows} rows", partial(_each, products, x), work)


def elementwise(bench: Bench, bed: ModelBed, row_counts: Sequence[int]) -> None:
    """Norms and the rotation and writing of KV of several layers; on a GPU also what a CPU does within products. Their
    data may stay in a cache: ratios below 1 are possible."""
    shape = bed.shape
    for rows in row_counts:
        for name, run, (read, written) in _elementwise(bed, shape, rows):
            work = floors.elementwise(rows * read, rows * written, shape.element_bytes) * _LAYERS
            bench.operation("elementwise", f"{name}, {rows} rows", partial(_repeat, run), work)


def sampling(bench: Bench, bed: ModelBed, batches: Sequence[int]) -> None:
    """Choosing the tokens of a batch from its logits, float32."""
    vocab, device = bed.shape.vocab, bed.runner.device
    for num_seqs in batches:
        logits = torch.randn(num_seqs, vocab, device=device)
        work = floors.elementwise(num_seqs * vocab, 0, 4)
        for name, params in (("greedy", _GREEDY), ("temperature", _PLAIN), ("top-k and top-p", _NUCLEUS)):
            pieces = [SequenceSlice(RequestKey(f"{i}", 0), [0], i, [0], params) for i in range(num_seqs)]
            bench.operation(
                "sampling",
                f"{name}, batch {num_seqs}",
                partial(choose_tokens, logits, pieces),
                work,
                num_seqs,
                "tokens",
            )


def _each(products: Sequence[Linear], x: torch.Tensor) -> None:
    for product in products:
        product(x)


def _repeat(run: Run) -> None:
    for _ in range(_LAYERS):
        run()


def _attention(bed: ModelBed, pieces: Sequence[Piece]) -> Run:
    runner, shape = bed.runner, bed.shape
    batch = bed.batch(pieces)
    query = _random(bed, sum(piece.count for piece in pieces), shape.heads, shape.head_dim)
    params = [AttentionParams(shape.head_dim**-0.5, window) for window in shape.windows]

    def run() -> None:
        for layer, how in enumerate(params):
            paged_attention(query, runner.kv, layer, batch, how)

    return run


def _kv_write(bed: ModelBed, count: int) -> Run:
    runner, shape = bed.runner, bed.shape
    batch = bed.batch([Piece(0, count)])
    key, value = (_random(bed, count, shape.kv_heads, shape.head_dim) for _ in range(2))

    def run() -> None:
        for layer in range(len(shape.windows)):
            kv_write(runner.kv, layer, key, value, batch.slots)

    return run


def _elementwise(bed: ModelBed, shape: Shape, rows: int) -> list[tuple[str, Run, tuple[int, int]]]:
    """Name, run, and the elements that a row reads and writes."""
    device = bed.runner.device
    x, residual = _random(bed, rows, shape.hidden), _random(bed, rows, shape.hidden)
    weight = _random(bed, shape.hidden)
    gate_up = _random(bed, rows, 2 * shape.inner)
    qkv = _random(bed, rows, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    moved = shape.query_dim + 2 * shape.kv_dim
    kv, slots = bed.runner.kv, bed.batch([Piece(0, rows)]).slots
    angles = torch.rand(rows, shape.head_dim // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.arange(rows, device=device)
    operations: list[tuple[str, Run, tuple[int, int]]] = [
        ("RMS norm", lambda: rms_norm(x, weight, _EPS), (shape.hidden, shape.hidden)),
        ("RoPE and KV", lambda: rope_kv_write_(qkv, cos, sin, positions, kv, 0, slots), (moved, moved)),
    ]
    if device.type == "cuda":
        operations += [
            (
                "add and RMS norm",
                lambda: add_rms_norm(x, residual, weight, _EPS),
                (2 * shape.hidden, 2 * shape.hidden),
            ),
            ("SiLU × up", lambda: silu_mul(gate_up), (2 * shape.inner, shape.inner)),
        ]
    return operations


def _random(bed: ModelBed, *size: int) -> torch.Tensor:
    return torch.randn(*size, device=bed.runner.device).to(bed.runner.kv.dtype)
