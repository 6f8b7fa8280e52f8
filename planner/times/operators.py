"""Service times added up from operators that were measured one by one: matrix products, attention, all-reduces.

The tables are those of one H100 SXM under vLLM (NVIDIA's aiconfigurator) and of a DGX H100's all-reduces (vidur).
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinpool.errors import ConfigError
from twinpool.planner.step_shape import StepShape
from twinpool.planner.times.curves import Curve
from twinpool.planner.times.devices import DEVICES, Precision
from twinpool.planner.times.model_shapes import ModelShape
from twinpool.planner.times.parquet import read_columns
from twinpool.planner.times.phases import Link
from twinpool.planner.times.public_data import file_of
from twinpool.planner.times.roofline import COLLECTIVES_PER_LAYER, TYPICAL
from twinpool.planner.times.service_times import Overheads

GEMM = "perf/h100_vllm_gemm.parquet"
CONTEXT_ATTENTION = "perf/h100_vllm_context_attention.parquet"
GENERATION_ATTENTION = "perf/h100_vllm_generation_attention.parquet"
ALL_REDUCE = "perf/vidur_h100_all_reduce.csv"
KERNEL_S = 3e-6
"""A kernel that only moves activations, however few, and the share of the bandwidth at which it does: aiconfigurator's
h100_sxm.yaml. A layer has two norms, a rotation and an activation."""
_MOVE_SHARE = 0.8
_MOVING_KERNELS = 4
_MS = 1e-3
_GEMM_TYPES = {Precision.BF16: "bfloat16", Precision.FP16: "bfloat16", Precision.FP8: "fp8"}
_LARGEST_BATCH_OF_CHUNKS = 8
"""In larger batches the table's prompts are short, and cost more for as many (query, key) pairs."""
_EMPTY = StepShape()


class Products:
    """Seconds of a product of tokens with weights [n, k], between the sizes that were measured: linear in n and k, and
    never less for more tokens. Beyond the largest size it grows in proportion."""

    def __init__(self, seconds: Mapping[tuple[int, int], Mapping[int, float]]) -> None:
        """`seconds[n, k][tokens]`; of every n with every k."""
        self._seconds = seconds
        self._ns = sorted({n for n, _ in seconds})
        self._ks = sorted({k for _, k in seconds})

    def curve(self, n: int, k: int) -> Curve:
        """By tokens."""
        corners: list[tuple[float, Mapping[int, float]]] = []
        for n_weight, n_known in _between(self._ns, n):
            for k_weight, k_known in _between(self._ks, k):
                if weight := n_weight * k_weight:
                    corners.append((weight, self._seconds[n_known, k_known]))
        common = set.intersection(*(set(points) for _, points in corners))
        return Curve(
            (tokens, sum(weight * points[tokens] for weight, points in corners)) for tokens in common
        )


class StreamAttention:
    """Seconds of one layer's attention of sequences that decode, by their number and their context together.

    On a lattice of both, where measured points (of equal contexts) are interpolated along the context; where more
    sequences or more context would take less, as long as the most before.
    """

    def __init__(self, seconds: Mapping[int, Mapping[int, float]]) -> None:
        """`seconds[batch][context of each]`."""
        self._batches = sorted(seconds)
        longest = max(batch * max(points) for batch, points in seconds.items())
        self._totals = [0, *(1 << i for i in range(longest.bit_length()))]
        rows: list[list[float]] = []
        for batch in self._batches:
            curve = Curve(seconds[batch].items())
            row = [curve(total / batch) for total in self._totals]
            rows.append([max(pair) for pair in zip(row, rows[-1], strict=True)] if rows else row)
        self._rows = rows

    def step_s(self, num_sequences: int, context_tokens: int) -> float:
        """Between the points of the lattice; beyond the most context as steeply as there, beyond the largest batch in
        proportion to it."""
        most = self._batches[-1]
        batches = (
            _places(self._batches, num_sequences)
            if num_sequences < most
            else ((num_sequences / most, len(self._batches) - 1),)
        )
        totals = _places(self._totals, context_tokens)
        return sum(
            batch_weight * total_weight * self._rows[batch][total]
            for batch_weight, batch in batches
            for total_weight, total in totals
        )


@dataclass(frozen=True, slots=True)
class Tables:
    """What was measured, for one model on so many devices. Seconds by tokens, or as the classes say.

    `layer_products` are those of one layer together, `head` the one that makes logits; `chunk_attention` goes by
    (query, key) pairs, `all_reduce` by bytes (None: of one device). That is NCCL's, which takes 20 to 40 µs for any few
    bytes; engines have kernels of their own for those, so the roofline's formula counts where it is quicker.
    """

    layer_products: Sequence[Curve]
    head: Curve
    chunk_attention: Curve
    stream_attention: StreamAttention
    all_reduce: Curve | None


class OperatorTimes:
    """`ServiceTimes` of `tp` H100."""

    def __init__(
        self,
        model: ModelShape,
        tp: int,
        precision: Precision,
        tables: Tables,
        link: Link,
        overheads: Overheads,
    ) -> None:
        self._model = model
        self._tp = tp
        self._tables = tables
        self._link = link
        self._overheads = overheads
        self._name = f"{model.name} in {precision} on {tp} × {DEVICES['h100'].title}, operators"
        matrices = 3 if model.is_gated else 2
        moved = 2 * (8 * model.hidden + (matrices * model.inner + 2 * model.num_heads * model.head_dim) / tp)
        self._token_moves_s = moved / (DEVICES["h100"].bytes_per_s * _MOVE_SHARE)
        self._reduced_byte_s = 2 * (tp - 1) / tp / (DEVICES["h100"].scale_up_bytes_per_s * TYPICAL.link)

    @property
    def name(self) -> str:
        """Model, hardware, and that operators were added up."""
        return self._name

    @property
    def overheads(self) -> Overheads:
        """What the caller said; none by itself."""
        return self._overheads

    def step_s(self, shape: StepShape, num_busy: int = 0) -> float:  # noqa: ARG002
        """All layers, the head, and a fixed cost; accelerators do not slow each other down."""
        if shape == _EMPTY:
            return 0.0
        tables = self._tables
        tokens = shape.num_sequences + shape.prompt_tokens
        layer_s = sum(curve(tokens) for curve in tables.layer_products)
        layer_s += _MOVING_KERNELS * KERNEL_S + tokens * self._token_moves_s
        if shape.num_sequences:
            layer_s += tables.stream_attention.step_s(shape.num_sequences, shape.context_tokens)
        if shape.num_chunks:
            reading_s = tables.stream_attention.step_s(1, shape.prompt_context)
            layer_s += max(tables.chunk_attention(shape.prompt_pairs), reading_s)
        if tables.all_reduce is not None:
            num_bytes = 2 * tokens * self._model.hidden
            own_s = TYPICAL.collective_s + num_bytes * self._reduced_byte_s
            layer_s += COLLECTIVES_PER_LAYER * min(tables.all_reduce(num_bytes), own_s)
        rows = shape.num_sequences + shape.num_chunks
        # Launching, sampling and scheduling are no operator: as in the roofline.
        return TYPICAL.step_s + self._model.num_layers * layer_s + tables.head(rows)

    def transfer_s(self, num_bytes: int) -> float:
        """As `ServiceTimes.transfer_s`."""
        return self._link.transfer_s(num_bytes, self._tp)


def read_tables(
    root: Path | None, model: ModelShape, tp: int, precision: Precision, kv_element_bytes: float
) -> Tables:
    """The tables for a dense model.

    Raises:
        ConfigError: a file or its reader is absent, or nobody measured such a model or precision.
    """
    if model.experts is not None or model.latent is not None or model.window is not None:
        raise ConfigError(
            f"--model is {model.name!r}; operators:h100 has dense models without windows only: use roofline:h100"
        )
    if precision not in _GEMM_TYPES:
        raise ConfigError(f"--precision is {precision.value!r}; operators:h100 has bf16, fp16, fp8")
    if model.num_heads % tp:
        raise ConfigError(f"TP is {tp}; allowed: a divisor of {model.name}'s {model.num_heads} query heads")
    wide = _products(root, "bfloat16")
    products = wide if _GEMM_TYPES[precision] == "bfloat16" else _products(root, _GEMM_TYPES[precision])
    heads, kv_heads = model.num_heads // tp, max(1, model.num_kv_heads // tp)
    hidden, head_dim, inner = model.hidden, model.head_dim, -(-model.inner // tp)
    layer = [
        products.curve((heads + 2 * kv_heads) * head_dim, hidden),
        products.curve(hidden, heads * head_dim),
        products.curve((2 if model.is_gated else 1) * inner, hidden),
        products.curve(hidden, inner),
    ]
    where = {
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "window_size": 0,
        "kv_cache_dtype": "bfloat16" if kv_element_bytes == 2.0 else "fp8",
    }
    return Tables(
        layer,
        wide.curve(-(-model.vocab // tp), hidden),
        _chunk_attention(root, where),
        _stream_attention(root, where),
        _all_reduce(root, tp) if tp > 1 else None,
    )


def _products(root: Path | None, gemm_type: str) -> Products:
    columns = ("m", "n", "k", "latency")
    found = read_columns(file_of(root, GEMM), columns, {"gemm_dtype": gemm_type})
    seconds: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for m, n, k, latency in zip(*(found[name] for name in columns), strict=True):
        seconds[n, k][m] = min(latency * _MS, seconds[n, k].get(m, float("inf")))
    return Products(seconds)


def _chunk_attention(root: Path | None, where: Mapping[str, object]) -> Curve:
    """Whole prompts, all lengths alike and without cached tokens."""
    columns = ("batch_size", "isl", "latency")
    found = _measured(root, CONTEXT_ATTENTION, columns, where)
    return Curve(
        (batch * length * (length + 1) / 2, latency * _MS)
        for batch, length, latency in zip(*(found[name] for name in columns), strict=True)
        if batch <= _LARGEST_BATCH_OF_CHUNKS
    )


def _stream_attention(root: Path | None, where: Mapping[str, object]) -> StreamAttention:
    columns = ("batch_size", "step", "latency")
    found = _measured(root, GENERATION_ATTENTION, columns, where)
    seconds: dict[int, dict[int, float]] = defaultdict(dict)
    for batch, step, latency in zip(*(found[name] for name in columns), strict=True):
        seconds[batch][step + 1] = latency * _MS
    return StreamAttention(seconds)


def _measured(
    root: Path | None, name: str, columns: Sequence[str], where: Mapping[str, object]
) -> dict[str, list[float]]:
    found = read_columns(file_of(root, name), columns, where)
    if not found["latency"]:
        asked = ", ".join(f"{key} {value}" for key, value in where.items())
        raise ConfigError(f"{name} has no rows with {asked}; choose another TP, or roofline:h100")
    return found


def _all_reduce(root: Path | None, tp: int) -> Curve:
    with file_of(root, ALL_REDUCE).open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["num_workers"]) == tp]
    if not rows:
        raise ConfigError(f"TP is {tp}; {ALL_REDUCE} has all-reduces of 2, 4 and 8 devices")
    return Curve((int(row["size"]), float(row["time_stats.all_reduce.median"]) * _MS) for row in rows)


def _places(known: Sequence[int], value: float) -> tuple[tuple[float, int], ...]:
    """Weights and places of the two neighbours of `value`; before the first it counts as that, beyond the last the
    weights extrapolate."""
    if value <= known[0] or len(known) == 1:
        return ((1.0, 0),)
    i = min(bisect_right(known, value) - 1, len(known) - 2)
    share = (value - known[i]) / (known[i + 1] - known[i])
    return ((1.0 - share, i), (share, i + 1))


def _between(known: Sequence[int], value: int) -> Iterable[tuple[float, int]]:
    """Weights and sizes of the two neighbours of `value`; beyond the last that one in proportion."""
    if value > known[-1]:
        return ((value / known[-1], known[-1]),)
    return [(weight, known[place]) for weight, place in _places(known, value)]
