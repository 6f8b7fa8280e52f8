"""Workloads from stated distributions: lengths, shared prefixes, and what becomes of those that are too long."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from support.made_tokenizers import byte_level, metaspace

from twinpool.bench.serving.datasets import (
    DatasetName,
    DatasetSettings,
    LognormalLengths,
    PrefixRepetition,
    PromptAs,
    RandomLengths,
    TooLong,
    TraceSettings,
    make_requests,
    make_workload,
    warm_up_requests,
)
from twinpool.bench.serving.datasets.shapes import Shape, own, scaled, windowed
from twinpool.bench.serving.workload import PlannedRequest
from twinpool.errors import ConfigError


def _made(num_prompts: int = 50, seed: int = 3, **settings: Any) -> list[PlannedRequest]:
    return make_requests(DatasetSettings(prompt_as=PromptAs.IDS, **settings), byte_level(), num_prompts, seed)


def test_random_lengths_are_fixed_without_a_range_and_fill_it_with_one() -> None:
    fixed = _made(random=RandomLengths(40, 7))
    assert {(r.input_tokens, len(r.prompt), r.output_tokens) for r in fixed} == {(40, 40, 7)}
    ranged = _made(400, random=RandomLengths(10, 4, range_ratio=0.25))
    assert {r.input_tokens for r in ranged} == set(range(7, 14))  # floor(7.5) to ceil(12.5)
    assert {r.output_tokens for r in ranged} == {3, 4, 5}


def test_random_prompts_share_the_prefix_and_nothing_else() -> None:
    requests = _made(random=RandomLengths(20, 1, prefix_len=12))
    assert {len(r.prompt) for r in requests} == {32}
    assert len({r.prompt[:12] for r in requests}) == 1
    assert len({r.prompt[12:20] for r in requests}) == len(requests)


def test_the_same_seed_makes_the_same_requests_and_another_others() -> None:
    settings = DatasetSettings(random=RandomLengths(20, 5, range_ratio=0.5))
    first, again, other = (make_requests(settings, byte_level(), 20, seed) for seed in (1, 1, 2))
    assert first == again
    assert not {r.prompt for r in first} & {r.prompt for r in other}


def test_special_tokens_count_as_the_server_will_count_them() -> None:
    (request,) = make_requests(DatasetSettings(random=RandomLengths(9, 1)), metaspace(), 1, 0)
    assert len(metaspace().encode(request.prompt).ids) == request.input_tokens == 9
    assert len(metaspace().encode(request.prompt, add_special_tokens=False).ids) == 8


def test_prompts_too_short_for_the_special_tokens_are_lengthened_and_that_is_said() -> None:
    workload = make_workload(DatasetSettings(random=RandomLengths(1, 1)), metaspace(), 3, 0)
    assert {r.input_tokens for r in workload.requests} == {2}
    assert workload.notes == ("3 of 3 prompts were lengthened to 2 tokens, the fewest that can be made",)


def test_lognormal_lengths_have_their_median_and_keep_their_bounds() -> None:
    lengths = LognormalLengths(200, 0.5, 600, 20, 1.0, 60)
    requests = _made(600, name=DatasetName.LOGNORMAL, lognormal=lengths)
    inputs, outputs = [r.input_tokens for r in requests], [r.output_tokens for r in requests]
    assert max(inputs) <= 600
    assert max(outputs) <= 60
    assert median(inputs) == pytest.approx(200, rel=0.1)
    assert min(outputs) < 10 < 50 < max(outputs)
    even = LognormalLengths(50, 0, 50, 5, 0, 5)
    assert {
        (r.input_tokens, r.output_tokens) for r in _made(9, name=DatasetName.LOGNORMAL, lognormal=even)
    } == {(50, 5)}


def _reuse_share(requests: list[PlannedRequest]) -> float:
    """By its definition: the longest beginning in common with an earlier prompt, over all tokens."""
    known: set[tuple[int, ...]] = set()
    reused = total = 0
    for request in requests:
        prefixes = [request.prompt[:length] for length in range(1, len(request.prompt) + 1)]
        reused += sum(prefix in known for prefix in prefixes)
        total += len(request.prompt)
        known.update(prefixes)
    return reused / total


def test_shared_prefixes_are_as_many_as_wanted_and_each_is_shared_alike() -> None:
    settings = PrefixRepetition(prefix_len=12, suffix_len=6, num_prefixes=5, output_len=2)
    requests = _made(40, name=DatasetName.PREFIX_REPETITION, prefix_repetition=settings)
    groups = [r.group for r in requests]
    assert {group: groups.count(group) for group in groups} == {f"prefix-{n}": 8 for n in range(5)}
    assert len({(r.group, r.prompt[:12]) for r in requests}) == 5
    assert groups[:5] != sorted(groups[:5])


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6, 0.88])
def test_a_reuse_share_is_met(share: float) -> None:
    settings = PrefixRepetition(30, 30, num_prefixes=4, reuse_share=share)
    requests = _made(40, name=DatasetName.PREFIX_REPETITION, prefix_repetition=settings)
    assert {len(r.prompt) for r in requests} == {60}
    assert _reuse_share(requests) == pytest.approx(share, abs=0.02)


def test_a_reuse_share_that_so_few_prompts_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reuse-share is 0\.9; allowed: at most 0\.4"):
        _made(
            8,
            name=DatasetName.PREFIX_REPETITION,
            prefix_repetition=PrefixRepetition(5, 5, 4, reuse_share=0.9),
        )
    with pytest.raises(ConfigError, match="num-prompts is 3; allowed: at least"):
        _made(3, name=DatasetName.PREFIX_REPETITION)


TOO_LONG = {"random": RandomLengths(100, 60, range_ratio=0.5), "max_model_len": 150}


def test_what_is_beyond_the_context_is_refused_unless_said_otherwise() -> None:
    with pytest.raises(
        ConfigError, match=r"\d+ of 50 requests of dataset random are longer than .* 150 tokens"
    ):
        _made(**TOO_LONG)


def test_clipped_requests_fill_the_context_and_are_counted() -> None:
    settings = DatasetSettings(too_long=TooLong.CLIP, **TOO_LONG)
    workload = make_workload(settings, byte_level(), 50, 3)
    sums = [r.input_tokens + r.output_tokens for r in workload.requests]
    assert max(sums) == 150
    (note,) = workload.notes
    whole = _made(**{**TOO_LONG, "max_model_len": None})
    assert note.startswith(
        f"{sum(r.input_tokens + r.output_tokens > 150 for r in whole)} of 50 requests were clipped"
    )


def test_dropped_requests_are_missing_and_that_is_said() -> None:
    workload = make_workload(DatasetSettings(too_long=TooLong.DROP, **TOO_LONG), byte_level(), 50, 3)
    assert 0 < len(workload.requests) < 50
    assert [r.index for r in workload.requests] == list(range(len(workload.requests)))
    assert workload.notes[-1] == f"there are {len(workload.requests)} requests, not 50"
    with pytest.raises(ConfigError, match="no workload of dataset random fits"):
        _made(too_long=TooLong.DROP, random=RandomLengths(100, 60), max_model_len=150)


def test_scaled_requests_keep_their_proportions() -> None:
    whole = _made(**{**TOO_LONG, "max_model_len": None})
    requests = _made(too_long=TooLong.SCALE, **TOO_LONG)
    assert 147 <= max(r.input_tokens + r.output_tokens for r in requests) <= 150
    ratios = [r.input_tokens / w.input_tokens for r, w in zip(requests, whole, strict=True)]
    assert max(ratios) - min(ratios) < 0.02


def test_scaled_blocks_stay_shared() -> None:
    short = scaled(Shape((own(0, 512), own(1, 512), own(2, 100)), 50, hash_ids=(1, 2, 3)), 0.1)
    assert [piece.num_tokens for piece in short.pieces] == [52, 52, 8]
    assert (short.output_tokens, short.hash_ids) == (5, (1, 2, 3))
    assert scaled(Shape((own(0, 512), own(1, 1)), 50, hash_ids=(1, 2)), 0.1).hash_ids == (1,)


def test_a_window_counts_from_its_start_and_speed_moves_arrivals_together() -> None:
    shapes = [Shape((own(n, 1),), 1, at_s) for n, at_s in enumerate((9.0, 0.0, 4.0, 5.0, 12.0))]
    times = [shape.at_s for shape in windowed(shapes, TraceSettings(speed=2, start_s=4, window_s=8))]
    assert times == [0.0, 0.5, 2.5]
    assert all(one <= other for one, other in pairwise(times))


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"path": "x.csv"}, "--dataset-path"),
        ({"name": DatasetName.CSV_TRACE}, "--dataset-path"),
        ({"max_model_len": 1}, "--max-model-len"),
        ({"length_scale": 0.0}, "--length-scale"),
        ({"output_len": 0}, "--output-len"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        DatasetSettings(**settings)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: RandomLengths(input_len=0), "--random-input-len"),
        (lambda: RandomLengths(range_ratio=1.0), "--random-range-ratio"),
        (lambda: LognormalLengths(input_sigma=9), "--lognormal-input-sigma"),
        (lambda: LognormalLengths(output_most=5), "--lognormal-output-most"),
        (lambda: PrefixRepetition(reuse_share=1.0), "--prefix-repetition-reuse-share"),
        (lambda: TraceSettings(speed=0), "--trace-speed"),
        (lambda: TraceSettings(window_s=0), "--trace-window"),
    ],
)
def test_numbers_out_of_range_are_refused_by_the_name_of_their_flag(make: Any, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        make()


def test_no_requests_are_none_of_a_generated_dataset() -> None:
    with pytest.raises(ConfigError, match="--num-prompts is 0; allowed: 1 or more; 0 means all of a file"):
        _made(0)


def test_warm_ups_are_as_long_as_the_load_and_share_nothing_with_it() -> None:
    load = _made(3, random=RandomLengths(20, 5, range_ratio=0.5, prefix_len=10))
    others = warm_up_requests(load, PromptAs.IDS, byte_level(), 5, seed=3)
    assert [(r.input_tokens, r.output_tokens) for r in others] == [
        (r.input_tokens, r.output_tokens) for r in (*load, *load[:2])
    ]
    assert len({r.prompt[:8] for r in (*load, *others)}) == 1 + 5
    assert warm_up_requests(load, PromptAs.IDS, byte_level(), 0, seed=3) == []
