"""Distributions taken from public traces: what is shipped is whole, and agrees with the traces where they are there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from support.made_tokenizers import byte_level

from twinpool.bench.serving.datasets import (
    DatasetName,
    DatasetSettings,
    PromptAs,
    TooLong,
    TraceSettings,
    make_requests,
)
from twinpool.bench.serving.datasets.fit import (
    RESOLUTION_S,
    common_prefixes,
    dispersion,
    fitted,
    gamma_shape,
    goodness,
    ks_distance,
    read,
    reuse_share,
)
from twinpool.bench.serving.datasets.fitted import (
    LEVELS,
    Arrivals,
    arrival_times,
    fitted_shapes,
    fitted_traces,
)
from twinpool.bench.serving.datasets.shapes import Shape, hashed

FILES = {
    DatasetName.AZURE_CODE: ("AzureLLMInferenceTrace_code.csv", "azure_2023_code.csv"),
    DatasetName.AZURE_CONVERSATION: ("AzureLLMInferenceTrace_conv.csv", "azure_2023_conversation.csv"),
    DatasetName.MOONCAKE_CONVERSATION: ("conversation_trace.jsonl", "mooncake_conversation.jsonl"),
}
NAMES = pytest.mark.parametrize("name", sorted(fitted_traces()))


def _public_file(name: DatasetName) -> Path:
    directory = os.environ.get("TWINPOOL_TRACES")
    if not directory:
        pytest.skip(
            "TWINPOOL_TRACES names no directory with the public traces (docs/datasets.md says where they are)"
        )
    paths = [Path(directory) / file for file in FILES[name]]
    found = next((path for path in paths if path.is_file()), None)
    assert found, f"none of {', '.join(map(str, paths))} is there"
    return found


@NAMES
def test_tables_are_whole_and_name_their_source(name: DatasetName) -> None:
    trace = fitted_traces()[name]
    tables = [trace.input_tokens, trace.output_tokens]
    if trace.continued is not None:
        tables += [trace.continued.input_tokens, trace.continued.common_share, trace.continued.age_s]
    for table in tables:
        assert len(table) == len(LEVELS)
        assert list(table) == sorted(table)
    assert sum(trace.arrivals.requests) <= trace.num_requests
    assert "github.com" in trace.source
    assert trace.licence.startswith(("CC-BY 4.0", "Apache-2.0"))


@NAMES
def test_what_is_generated_has_the_lengths_and_the_rate_of_its_tables(name: DatasetName) -> None:
    trace = fitted_traces()[name]
    shapes = fitted_shapes(trace, 2000, seed=1)
    assert np.median([s.output_tokens for s in shapes]) == pytest.approx(trace.output_tokens[50], rel=0.1)
    times = arrival_times(trace.arrivals, trace.num_requests, np.random.default_rng(1))
    assert (np.diff(times) >= 0).all()
    length_s = trace.arrivals.bin_s * len(trace.arrivals.requests)
    assert times[-1] == pytest.approx(length_s, rel=0.1)
    assert {s.at_s for s in fitted_shapes(trace, 50, seed=1)} != {
        s.at_s for s in fitted_shapes(trace, 50, seed=2)
    }


@NAMES
def test_a_fitted_dataset_needs_no_file_and_starts_where_it_is_told(name: DatasetName) -> None:
    window = TraceSettings(start_s=600, speed=4)
    settings = DatasetSettings(
        name, prompt_as=PromptAs.IDS, max_model_len=512, too_long=TooLong.CLIP, trace=window
    )
    requests = make_requests(settings, byte_level(), 40, 2)
    assert len(requests) == 40
    shapes = fitted_shapes(fitted_traces()[name], 40, 2, start_s=600)
    assert [r.at_s for r in requests] == [pytest.approx(((s.at_s or 0) - 600) / 4) for s in shapes]
    assert max(r.input_tokens + r.output_tokens for r in requests) <= 512


def test_mooncake_conversations_continue_earlier_prompts_block_by_block() -> None:
    shapes = fitted_shapes(fitted_traces()[DatasetName.MOONCAKE_CONVERSATION], 1500, seed=1)
    prefixes = common_prefixes(shapes)
    continued = sum(prefix.num_blocks > 1 for prefix in prefixes) / len(shapes)
    assert 0.3 < continued < 0.45
    assert 0.25 < reuse_share(shapes) < 0.45
    assert {s.hash_ids[0] for s in shapes} == {0}
    where: dict[int, int] = {}
    for shape in shapes:
        for place, id_ in enumerate(shape.hash_ids):
            assert where.setdefault(id_, place) == place


def test_arrivals_follow_the_rate_of_their_bins_and_go_round() -> None:
    arrivals = Arrivals(10.0, (100, 0, 300), gap_shape=1.0)
    times = arrival_times(arrivals, 4000, np.random.default_rng(0))
    counts = np.bincount((times / 10).astype(int), minlength=30)[:27].reshape(9, 3).sum(axis=0)
    assert counts[1] == 0
    assert counts[2] / counts[0] == pytest.approx(3, rel=0.2)
    assert arrival_times(arrivals, 5, np.random.default_rng(0), start_s=12.0)[0] > 20


@pytest.mark.parametrize("shape", [0.3, 1.0, 4.0])
def test_the_shape_of_gamma_gaps_is_found_again(shape: float) -> None:
    gaps = np.random.default_rng(0).gamma(shape, 2.0, size=20_000)
    assert gamma_shape(gaps) == pytest.approx(shape, rel=0.05)


def test_the_distance_of_two_samples_is_that_of_their_distribution_functions() -> None:
    assert ks_distance(np.array([1.0, 2.0, 3.0, 4.0]), np.array([3.0, 4.0, 5.0, 6.0])) == 0.5
    assert ks_distance(np.array([1.0, 1.0, 2.0]), np.array([2.0, 1.0, 1.0])) == 0.0


def test_reuse_counts_leading_blocks_that_came_before() -> None:
    ids = ((1, 2, 3), (1, 2, 4), (5, 2), (1, 2, 3))
    shapes = [Shape(hashed(each, 8 * len(each) - 3, 8), 1, float(n), "", each) for n, each in enumerate(ids)]
    assert [(p.num_blocks, p.age_s) for p in common_prefixes(shapes)] == [
        (0, 0.0),
        (2, 1.0),
        (0, 0.0),
        (3, 3.0),
    ]
    assert reuse_share(shapes) == (16 + 21) / (21 + 21 + 13 + 21)


def test_dispersion_is_of_requests_per_bin() -> None:
    assert dispersion(np.array([0.1, 0.2, 1.5, 1.6]), 1.0) == 0.0
    assert dispersion(np.array([0.1, 0.2, 0.5, 0.6, 1.0, 1.1]), 1.0) == pytest.approx(1 / 3)


@NAMES
def test_the_shipped_tables_are_those_of_the_public_trace_and_close_to_it(name: DatasetName) -> None:
    shapes = read(name, str(_public_file(name)))
    trace = fitted_traces()[name]
    assert fitted(name, shapes) == trace
    found = goodness(shapes, trace, RESOLUTION_S.get(name, 0.0), seed=3)
    assert max(found.input_ks, found.output_ks) < 0.03
    assert found.gap_ks < (0.12 if name is DatasetName.AZURE_CODE else 0.03)
    assert found.reuse[1] == pytest.approx(found.reuse[0], abs=0.05)
    assert abs(found.rank_correlation) < 0.08
