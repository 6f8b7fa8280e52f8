"""Times added up from operators: between measured sizes, and never falling."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.public_data import public_data, public_file

from twinpool.errors import ConfigError
from twinpool.planner.step_shape import StepShape, of_chunk, of_sequences, together
from twinpool.planner.times.devices import Precision
from twinpool.planner.times.floor import refuse_faster_times
from twinpool.planner.times.model_shapes import SHAPES
from twinpool.planner.times.operators import CONTEXT_ATTENTION, GEMM, Products, StreamAttention
from twinpool.planner.times.parquet import read_columns
from twinpool.planner.times.registry import Conditions, roofline, service_times
from twinpool.planner.times.service_times import ServiceTimes


def test_a_product_between_sizes_is_linear_in_both() -> None:
    """Here every product takes tokens · n · k nanoseconds and 1 µs."""
    sizes = (64, 128, 256)
    seconds = {(n, k): {m: 1e-6 + 1e-9 * m * n * k for m in (1, 16, 64)} for n in sizes for k in sizes}
    products = Products(seconds)
    for n, k, m in ((64, 128, 16), (96, 128, 16), (96, 200, 40), (256, 256, 64)):
        assert products.curve(n, k)(m) == pytest.approx(1e-6 + 1e-9 * m * n * k)
    assert products.curve(512, 256)(16) == pytest.approx(2 * (1e-6 + 1e-9 * 16 * 256 * 256))


def test_attention_of_streams_follows_its_points() -> None:
    seconds = {batch: {2**i: 1e-6 * batch * 2**i + 1e-5 for i in range(12)} for batch in (1, 2, 4, 8)}
    attention = StreamAttention(seconds)
    for batch, context in ((1, 64), (4, 512), (8, 1_024), (3, 512)):
        assert attention.step_s(batch, batch * context) == pytest.approx(1e-6 * batch * context + 1e-5)
    assert attention.step_s(8, 8 * 4_096) == pytest.approx(1e-6 * 8 * 4_096 + 1e-5)


@given(st.integers(1, 20), st.integers(1, 50_000), st.integers(0, 20), st.integers(0, 50_000))
def test_where_more_streams_were_quicker_the_most_before_holds(
    batch: int, context: int, more_batch: int, more_context: int
) -> None:
    seconds = {1: {1: 1.0, 100: 5.0, 1_000: 3.0}, 4: {1: 2.0, 100: 2.0, 1_000: 2.5}, 16: {1: 1.0, 100: 9.0}}
    attention = StreamAttention(seconds)
    less, more = (
        attention.step_s(batch, context),
        attention.step_s(batch + more_batch, context + more_context),
    )
    assert 0 < less <= more * (1 + 1e-12)


@pytest.fixture(scope="module")
def measured() -> ServiceTimes:
    public_file(GEMM)
    if importlib.util.find_spec("pyarrow") is None:
        pytest.skip(
            "pyarrow is not installed (the extra `parquet`), which reads the published operator tables"
        )
    return service_times("operators:h100", SHAPES["llama-3.1-8b"], Conditions(public_data=public_data()))


@given(
    st.lists(st.integers(1, 40_000), max_size=200),
    st.lists(st.tuples(st.integers(1, 9_000), st.integers(0, 40_000)), max_size=4),
    st.lists(st.integers(1, 40_000), max_size=200),
    st.integers(0, 500),
)
def test_measured_operators_never_add_up_to_less_for_more(
    measured: ServiceTimes,
    sequences: list[int],
    prompts: list[tuple[int, int]],
    more_sequences: list[int],
    num_steps: int,
) -> None:
    less = together(of_sequences(sequences), *(of_chunk(*prompt) for prompt in prompts))
    longer = [of_chunk(new + num_steps, cached) for new, cached in prompts]
    taken_s = measured.step_s(less)
    assert (taken_s > 0) == bool(sequences or prompts)
    for more in (
        together(less, of_sequences(more_sequences)),
        less.after(num_steps),
        together(of_sequences(sequences), *longer),
    ):
        assert measured.step_s(more) >= taken_s * (1 - 1e-12)


def test_measured_operators_are_not_faster_than_the_data_sheet(measured: ServiceTimes) -> None:
    refuse_faster_times(measured, roofline("h100", SHAPES["llama-3.1-8b"]))
    assert measured.name == "llama-3.1-8b in bf16 on 1 × H100 SXM, operators"
    assert measured.step_s(StepShape()) == 0.0


@pytest.mark.parametrize(
    ("model", "conditions", "message"),
    [
        ("mixtral-8x7b", Conditions(), r"operators:h100 has dense models without windows only: use roofline:h100"),
        ("qwen3-8b", Conditions(precision=Precision.FP4), r"--precision is 'fp4'; operators:h100 has bf16, fp16, fp8"),
        ("qwen3-8b", Conditions(tp=3), r"TP is 3; allowed: a divisor of qwen3-8b's 32 query heads"),
        ("qwen3-8b", Conditions(), r"perf/h100_vllm_gemm.parquet is needed, .* published at github.com/ai-dynamo"),
    ],
)  # fmt: skip
def test_what_nobody_measured_is_refused(model: str, conditions: Conditions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        service_times("operators:h100", SHAPES[model], conditions)


def test_a_file_that_is_not_parquet_is_told_of(tmp_path: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        pytest.skip("pyarrow is not installed (the extra `parquet`), whose errors this is about")
    path = tmp_path / CONTEXT_ATTENTION.rsplit("/", 1)[-1]
    path.write_bytes(b"no parquet")
    with pytest.raises(
        ConfigError, match=r"context_attention.parquet is no parquet file with the columns latency"
    ):
        read_columns(path, ["latency"], {})
