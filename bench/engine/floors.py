"""What a step or an operation must at least move and compute, and how long this machine's limits take for that.

Pure, and from the model's shape alone. Counted is what no implementation can avoid: each weight once per step, each
cached key and value once per sequence, new ones written once, every multiplication and addition of the matrix products
and of attention (a causal query attends to the keys before it and to its own). Of the last layer only what leads to the
sampled rows counts, besides its keys and values. Not counted: activations, which stay in caches, and the arithmetic
between the products. The time is the roofline's: the larger of bytes over bandwidth and FLOPs over the rate of matrix
products (Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes moved to or from memory, and floating-point operations (a multiplication and an addition are two)."""

    num_bytes: float
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops)

    def __mul__(self, times: float) -> Work:
        return Work(self.num_bytes * times, self.flops * times)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine does at best: bytes read per second, and FLOPs per second of a large matrix product."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, work: Work) -> float:
        """The least time that `work` takes."""
        return max(work.num_bytes / self.bytes_per_s, work.flops / self.flops_per_s)

    def is_bound_by_memory(self, work: Work) -> bool:
        """Whether bytes, not FLOPs, set the floor."""
        return work.num_bytes / self.bytes_per_s >= work.flops / self.flops_per_s


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's shape in elements, and the bytes of an element.

    `windows[layer]` is how many last positions, its own included, a query sees; None: all.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    windows: tuple[int | None, ...]
    element_bytes: int
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_head_norms: bool = False

    @property
    def query_dim(self) -> int:
        """Elements of all query heads of a token."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Elements of all key heads of a token; as many for values."""
        return self.kv_heads * self.head_dim

    @property
    def kv_products(self) -> int:
        """Weights of a layer that make keys and values."""
        return 2 * self.kv_dim * self.hidden

    @property
    def other_products(self) -> int:
        """Weights of a layer's other matrix products: queries, output, feed-forward."""
        return (2 * self.query_dim + 3 * self.inner) * self.hidden

    @property
    def layer_vectors(self) -> int:
        """Weights of a layer that are no matrices: norms and biases."""
        return (
            2 * self.hidden
            + self.has_qkv_bias * (self.query_dim + 2 * self.kv_dim)
            + self.has_output_bias * self.hidden
            + self.has_mlp_bias * (2 * self.inner + self.hidden)
            + self.has_head_norms * 2 * self.head_dim
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, the embeddings once."""
        layer = self.kv_products + self.other_products + self.layer_vectors
        return self.element_bytes * (len(self.windows) * layer + (self.vocab + 1) * self.hidden)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence in a step: at positions [start, start + count), the last one sampled or not."""

    start: int
    count: int
    is_sampled: bool = True


def step(shape: Shape, pieces: Sequence[Piece]) -> Work:
    """One step of the whole model."""
    num_tokens = sum(piece.count for piece in pieces)
    num_rows = sum(piece.is_sampled for piece in pieces)
    last = len(shape.windows) - 1
    full_layer = shape.kv_products + shape.other_products
    weights = last * (full_layer + shape.layer_vectors) + shape.kv_products + num_tokens * shape.hidden
    flops = 2.0 * num_tokens * (last * full_layer + shape.kv_products)
    if num_rows:
        weights += shape.other_products + shape.layer_vectors + (shape.vocab + 1) * shape.hidden
        flops += 2.0 * num_rows * (shape.other_products + shape.vocab * shape.hidden)
    kv_elements = 0
    for layer, window in enumerate(shape.windows):
        for piece in pieces:
            reads = layer < last or piece.is_sampled
            before = piece.start if window is None else min(piece.start, window - 1)
            kv_elements += 2 * shape.kv_dim * (before * reads + piece.count)
            first = piece.start if layer < last else piece.start + piece.count - piece.is_sampled
            keys = _keys_seen(first, piece.start + piece.count, window)
            flops += 4.0 * keys * shape.query_dim
    return Work(shape.element_bytes * (weights + kv_elements), flops)


def attention(shape: Shape, pieces: Sequence[Piece]) -> Work:
    """Attention alone, of all layers: queries and the KV of all positions read, outputs written."""
    elements, keys = 0, 0
    for window in shape.windows:
        for piece in pieces:
            end = piece.start + piece.count
            seen = end if window is None else min(end, window - 1 + piece.count)
            elements += 2 * shape.kv_dim * seen + 2 * shape.query_dim * piece.count
            keys += _keys_seen(piece.start, end, window)
    return Work(shape.element_bytes * elements, 4.0 * keys * shape.query_dim)


def linear(rows: int, inputs: int, outputs: int, element_bytes: int) -> Work:
    """A matrix product with `inputs` × `outputs` weights."""
    elements = inputs * outputs + rows * (inputs + outputs)
    return Work(element_bytes * elements, 2.0 * rows * inputs * outputs)


def elementwise(elements_read: int, elements_written: int, element_bytes: int) -> Work:
    """What only moves: norms, rotations, activations, copies."""
    return Work(element_bytes * (elements_read + elements_written))


def requests(shape: Shape, num_requests: int, num_prompt: int, num_output: int) -> Work:
    """That many equal requests at once, best batched: all prompts in one step, then all decode together."""
    steps = [step(shape, [Piece(0, num_prompt)] * num_requests)]
    steps += [step(shape, [Piece(num_prompt + i, 1)] * num_requests) for i in range(num_output - 1)]
    return total(steps)


def total(works: Iterable[Work]) -> Work:
    """All of them one after the other."""
    return sum(works, start=Work(0.0))


def _keys_seen(first: int, end: int, window: int | None) -> int:
    """Keys that the queries at positions [first, end) attend to, all together."""
    if window is None:
        return (end * (end + 1) - first * (first + 1)) // 2
    growing = range(first, max(first, min(end, window)))
    return sum(position + 1 for position in growing) + (end - max(first, min(end, window))) * window
