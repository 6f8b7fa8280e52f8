"""Copies of byte ranges, at every alignment, in arrays with room around them."""

from __future__ import annotations

import numpy as np
import pytest

from twinpool.kernels import byte_copy
from twinpool.kernels.byte_copy import copy_ranges

SIZE = 4096


@pytest.fixture(params=["compiled", "without a compiler"])
def _compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "compiled":
        monkeypatch.setattr(byte_copy, "HAS_COMPILER", False)
    elif not byte_copy.HAS_COMPILER:
        pytest.skip("no compiler is installed here; numba brings one")


@pytest.mark.usefixtures("_compiler")
def test_ranges_arrive_at_any_alignment_and_nothing_around_them_changes() -> None:
    source = np.random.default_rng(0).integers(256, size=SIZE, dtype=np.uint8)
    for num_bytes in (0, 1, 63, 64, 200, 513):
        for shift in (0, 1, 37):
            target = np.zeros(SIZE, np.uint8)
            starts, to = np.array([7, 1500, 0]), np.array([64, 1024, 2048]) + shift
            copy_ranges(source, starts, target, to, num_bytes)
            wanted = np.zeros(SIZE, np.uint8)
            for start, place in zip(starts, to, strict=True):
                wanted[place : place + num_bytes] = source[start : start + num_bytes]
            np.testing.assert_array_equal(target, wanted)


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(
    ("starts", "to"), [([0], [SIZE - 99]), ([-1], [0]), ([SIZE], [0]), ([0, 100], [0])], ids=str
)
def test_a_range_outside_is_refused_before_anything_is_written(starts: list[int], to: list[int]) -> None:
    source, target = np.ones(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    with pytest.raises(IndexError):
        copy_ranges(source, np.array([0, *starts]), target, np.array([0, *to]), 100)
    assert not target.any()
