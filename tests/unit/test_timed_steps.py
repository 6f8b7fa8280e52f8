"""Which steps a hybrid times at its start."""

from __future__ import annotations

import pytest

from twinpool.worker.timed_steps import CONTEXT_TOKENS, SIZES, StepSize, sizes_that_fit


def test_a_worker_of_the_usual_size_times_all() -> None:
    found = list(sizes_that_fit(4096, 16, 8192, 64))
    assert [(each.num_sequences, each.num_prompt_tokens) for each in found] == list(SIZES)
    assert {each.context_tokens for each in found} == {CONTEXT_TOKENS}


@pytest.mark.parametrize(
    ("limits", "left_out"),
    [((4096, 16, 8192, 16), (24, 0)), ((4096, 16, 128, 64), (0, 256)), ((8, 16, 8192, 64), (0, 256))],
)
def test_what_is_beyond_its_sequences_its_context_or_its_pool_is_left_out(
    limits: tuple[int, int, int, int], left_out: tuple[int, int]
) -> None:
    found = list(sizes_that_fit(*limits))
    assert [(each.num_sequences, each.num_prompt_tokens) for each in found] == [
        size for size in SIZES if size != left_out
    ]


def test_sequences_have_no_more_context_than_there_is() -> None:
    assert next(sizes_that_fit(4096, 16, 100, 64)) == StepSize(1, 0, 100)
