"""The batched sampler of a GPU chooses the reference's tokens; without a CUDA device, in Triton's interpreter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.triton_device import DEVICE

from twinpool.kernels.batch_sampling import ROW, adjust_reference, marks_of, sample_rows_reference
from twinpool.kernels.gpu import sampling as gpu
from twinpool.kernels.sampling import filter_reference

Rows = np.ndarray[Any, Any]


def row(**fields: float) -> np.ndarray[Any, Any]:
    """One row's parameters; no filter and no penalty unless named."""
    values = {"temperature": 1.0, "top_p": 1.0, "repetition": 1.0} | fields
    rows = np.zeros(1, ROW)
    for name, value in values.items():
        rows[name] = value
    return rows


def sample_rows(logits: torch.Tensor, rows: Rows, marks: np.ndarray[Any, Any] | None = None) -> list[int]:
    words = torch.from_numpy(rows.view(np.int32)).to(DEVICE)
    given = None if marks is None else torch.from_numpy(marks).to(DEVICE)
    return gpu.sample_rows(logits.to(DEVICE, copy=True), words, given).tolist()


def reference(logits: torch.Tensor, rows: Rows, marks: np.ndarray[Any, Any] | None = None) -> list[int]:
    given = np.zeros((0, 2), np.int32) if marks is None else marks
    return sample_rows_reference(logits, rows, torch.from_numpy(given)).tolist()


CHOICES: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 0.3, 1.0, 2.5),
    "top_k": (0, 1, 2, 7, 50, 1102, 1103, 5000),
    "top_p": (0.0, 1e-6, 0.2, 0.5, 0.9, 0.99, 1.0),
    "min_p": (0.0, 0.02, 0.3, 1.0),
}


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_the_batch_gets_the_tokens_that_the_reference_chooses_row_by_row(spread: float) -> None:
    """Random parameters, and any seeds and positions; the interpreter has time for few."""
    rng, count = np.random.default_rng(int(spread)), 500 if DEVICE.type == "cuda" else 12
    logits = torch.from_numpy(rng.standard_normal((count, 1103), np.float32)) * spread
    drawn = {name: rng.choice(values, count) for name, values in CHOICES.items()}
    rows = np.concatenate([row()] * count)
    for name, values in drawn.items():
        rows[name] = values
    rows["seed"] = rng.integers(0, 2**64, count, np.uint64)
    rows["position"] = rng.integers(0, 2**40, count, np.uint64)
    assert sample_rows(logits, rows) == reference(logits, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_long_row_takes_several_tiles_of_every_kind(dtype: torch.dtype) -> None:
    logits = (torch.randn(6, 4999, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)
    rows = np.concatenate(
        [row(temperature=0.0), row(seed=1), row(top_k=20, top_p=0.7, seed=2), row(top_p=0.3, seed=3),
         row(top_k=3, seed=4, position=2**33), row(min_p=0.2, seed=5, temperature=0.7)]
    )  # fmt: skip
    assert sample_rows(logits, rows) == reference(logits, rows)


def test_greedy_takes_the_lowest_id_of_equal_logits_across_tiles() -> None:
    logits = torch.zeros(2, 2500)
    logits[1, [700, 1300, 2400]] = 5.0
    assert sample_rows(logits, np.concatenate([row(temperature=0.0)] * 2)) == [0, 700]


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.37}, {"top_k": 5, "top_p": 0.5}], ids=str)
def test_ties_at_a_filters_border_are_the_references(filters: dict[str, float]) -> None:
    """Many equal logits: top-k keeps all that equal the last, top-p the lowest ids; ±0 are equal."""
    logits = torch.tensor([[1.0, 2.0, 0.0, 1.0, -0.0, 1.0, 1.0, 2.0, 1.0, -3.0]] * 40)
    rows = np.concatenate([row(**filters, seed=seed) for seed in range(40)])
    chosen = sample_rows(logits, rows)
    assert chosen == reference(logits, rows)
    kept = filter_reference(logits[0], 1.0, int(rows["top_k"][0]), float(rows["top_p"][0]), 0.0).isfinite()
    assert set(chosen) == set(kept.nonzero().flatten().tolist())  # every one of these few has its turn


def test_tokens_follow_the_filtered_distribution() -> None:
    """Chi-square over positions of a fixed seed: the statistic stays below its 99.9 % point. The interpreter has time
    for few: that each token is the reference's, whose test has many, says more."""
    vocab_size, draws = (23, 6000) if DEVICE.type == "cuda" else (6, 100)
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(2)) * 1.5
    rows = np.concatenate([row(top_p=0.9, seed=99, position=position) for position in range(draws)])
    probabilities = filter_reference(logits, 1.0, 0, float(rows["top_p"][0]), 0.0).softmax(-1).numpy()
    counts = np.bincount(sample_rows(logits.expand(draws, -1), rows), minlength=vocab_size)
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * draws
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = int(possible.sum()) - 1
    # Wilson and Hilferty's approximation of the chi-square quantile at 0.999 (normal quantile 3.09).
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


def test_the_noise_of_the_largest_uniform_number_is_above_zero() -> None:
    """Seed 7, position 35, token 12376, as in the reference's test."""
    assert sample_rows(torch.zeros(1, 12377), row(seed=7, position=35)) == [12376]


@pytest.mark.parametrize("broken", [float("-inf"), float("nan")])
def test_a_row_of_broken_logits_gets_a_token_and_the_others_theirs(broken: float) -> None:
    logits = torch.randn(4, 1100, generator=torch.Generator().manual_seed(3))
    logits[:3] = broken
    rows = np.concatenate(
        [row(temperature=0.0), row(seed=3), row(seed=1, top_k=4, top_p=0.6, min_p=0.1), row(seed=2)]
    )
    found = sample_rows(logits, rows)
    assert found[:3] == [0, 0, 0]
    assert found[3] == reference(logits[3:], rows[3:])[0]


def penalised(
    logits: torch.Tensor, prompt: list[int], output: list[int], r: float, p: float, f: float
) -> torch.Tensor:
    """The definition, token by token."""
    wanted = logits.clone()
    for token in range(len(logits)):
        if token in prompt or token in output:
            wanted[token] = wanted[token] / r if wanted[token] > 0 else wanted[token] * r
        wanted[token] -= f * output.count(token) + p * (token in output)
    return wanted


def test_penalties_are_their_definition() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(4)) * 3
    prompt, output = [1, 5, 5, 9, 30], [5, 6, 6, 6, 30]
    found = adjust_reference(logits, torch.from_numpy(marks_of(prompt, output, [])), 1.3, 0.4, 0.25)
    torch.testing.assert_close(found, penalised(logits, prompt, output, 1.3, 0.4, 0.25))


def test_each_rows_penalties_and_bans_are_its_own() -> None:
    logits = torch.randn(3, 60, generator=torch.Generator().manual_seed(5)) * 2
    top = logits.argmax(1).tolist()
    marks = [
        marks_of([top[0], 3], [top[0]] * 4, [7]),
        marks_of([], [], []),
        marks_of([1], [2], [top[2], 999]),
    ]
    ends = np.cumsum([len(mine) for mine in marks])
    rows = np.concatenate([row(temperature=0.0, repetition=1.5, presence=1.0, frequency=0.5)] * 3)
    rows["first_mark"], rows["end_mark"] = [0, *ends[:2]], ends
    chosen = sample_rows(logits, rows, np.concatenate(marks))
    assert chosen == reference(logits, rows, np.concatenate(marks))
    assert chosen[0] != top[0]
    assert chosen[1] == top[1]
    assert chosen[2] != top[2]
