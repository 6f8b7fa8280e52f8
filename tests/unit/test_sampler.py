"""Sampling: the generator, the filters, the distribution, and that a token depends on nothing but its own inputs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from twinpool.engine.batch import SequenceSlice
from twinpool.engine.sampler import StepSampling, choose_tokens
from twinpool.kernels.batch_sampling import ROW, marks_of, sample_rows, sample_rows_reference
from twinpool.kernels.sampling import (
    exponential_reference,
    filter_reference,
    philox_reference,
    sample_reference,
)
from twinpool.request import RequestKey, SamplingParams

ONES = 0xFFFFFFFF
# The known answers of philox4x32-10 that its authors publish with their library (Random123, kat_vectors).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_philox_gives_its_authors_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], wanted: tuple[int, ...]
) -> None:
    assert tuple(philox_reference(key, torch.tensor([counter]))[0].tolist()) == wanted


FILTERS = [
    {}, {"top_k": 1}, {"top_k": 7}, {"top_k": 5000}, {"top_p": 0.5}, {"top_p": 0.99}, {"top_p": 1e-6}, {"min_p": 0.2},
    {"min_p": 1.0}, {"top_k": 40, "top_p": 0.8}, {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 100, "top_p": 0.95, "min_p": 0.02},
]  # fmt: skip


NO_MARKS = np.empty((0, 2), np.int32)


def row(**fields: float) -> np.ndarray[Any, Any]:
    """One row of what a batch is sampled by."""
    made = np.zeros(1, ROW)
    for name, value in ({"repetition": 1.0} | fields).items():
        made[name] = value
    return made


def sample(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    """The token of a batch of one."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    values = (temperature, top_k, top_p, min_p, seed % 2**64, position)
    return int(
        sample_rows(logits.unsqueeze(0).clone(), row(**dict(zip(names, values, strict=True))), NO_MARKS)
    )


def settings(**changes: float) -> dict[str, float]:
    return {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0} | changes


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_fast_path_chooses_the_reference_token(filters: dict[str, float], temperature: float) -> None:
    torch.manual_seed(5)
    for trial in range(12):
        logits = torch.randn(1003) * 3
        chosen = settings(**filters, temperature=temperature, seed=trial * 2**40 + 77, position=trial * 2**31)
        assert sample(logits, **chosen) == sample_reference(logits, **chosen)  # type: ignore[arg-type]


def test_top_k_keeps_k_tokens_and_ties_of_the_last() -> None:
    kept = filter_reference(torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0]), 1.0, 2, 1.0, 0.0).isfinite()
    assert kept.tolist() == [False, True, True, True, False]


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for top_p, size in ((0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4), (1e-9, 1)):
        assert int(filter_reference(logits, 1.0, 0, top_p, 0.0).isfinite().sum()) == size


def test_of_equal_tokens_at_the_border_of_the_nucleus_the_lowest_ids_stay() -> None:
    assert filter_reference(torch.zeros(8), 1.0, 0, 0.5, 0.0).isfinite().tolist() == [True] * 4 + [False] * 4


def test_min_p_is_relative_to_the_likeliest_token() -> None:
    logits = torch.tensor([0.6, 0.3, 0.07, 0.03]).log()
    assert filter_reference(logits, 1.0, 0, 1.0, 0.2).isfinite().tolist() == [True, True, False, False]


def test_temperature_comes_before_top_p() -> None:
    logits = torch.tensor([0.7, 0.2, 0.1]).log()
    assert int(filter_reference(logits, 1.0, 0, 0.7, 0.0).isfinite().sum()) == 1
    assert int(filter_reference(logits, 3.0, 0, 0.7, 0.0).isfinite().sum()) == 2


@pytest.mark.parametrize("filters", [{}, {"top_k": 12}, {"top_p": 0.9}, {"temperature": 2.0}], ids=str)
def test_tokens_follow_the_filtered_distribution(filters: dict[str, float]) -> None:
    """Chi-square over 6,000 positions of a fixed seed: the statistic stays below its 99.9 % point."""
    torch.manual_seed(2)
    logits, draws = torch.randn(23) * 1.5, 6000
    params = settings(**filters)
    probabilities = filter_reference(
        logits, params["temperature"], int(params["top_k"]), params["top_p"], params["min_p"]
    ).softmax(-1)
    counts = np.zeros(23)
    for position in range(draws):
        counts[sample(logits, **(params | {"seed": 99, "position": position}))] += 1  # type: ignore[arg-type]
    possible = probabilities.numpy() > 0
    assert counts[~possible].sum() == 0
    expected = probabilities.numpy()[possible] * draws
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = int(possible.sum()) - 1
    # Wilson and Hilferty's approximation of the chi-square quantile at 0.999 (normal quantile 3.09).
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound


def test_noise_of_neighbouring_positions_and_seeds_is_unrelated() -> None:
    base = exponential_reference(1, 10, 4096, torch.device("cpu"))
    for seed, position in ((1, 11), (2, 10), (1 + 2**32, 10), (1, 10 + 2**32)):
        other = exponential_reference(seed, position, 4096, torch.device("cpu"))
        correlation = float(torch.corrcoef(torch.stack((base, other)))[0, 1])
        assert abs(correlation) < 4 / math.sqrt(4096)


def test_the_largest_uniform_number_gives_noise_above_zero() -> None:
    """Seed 7, position 35: the generator's 24 bits for token 12376 are all ones, and float32 rounds the number to 1."""
    noise = exponential_reference(7, 35, 12377, torch.device("cpu"))
    assert float(noise[12376]) == 2.0**-25
    logits = torch.zeros(12377)
    logits[5] = 80.0
    for choose in (sample, sample_reference):
        assert choose(torch.zeros(12377), 1.0, 0, 1.0, 0.0, 7, 35) == 12376
        assert choose(logits, 1.0, 1, 1.0, 0.0, 7, 35) == 5  # token 12376's share is 0, and 0 / 0 would win


def slice_of(name: str, position: int, **params: float) -> SequenceSlice:
    sampling = SamplingParams(**{"max_tokens": 9, "seed": 7} | params)  # type: ignore[arg-type]
    return SequenceSlice(RequestKey(name, 0), [0], position - 1, [0], sampling)


def test_a_token_does_not_depend_on_the_rest_of_the_batch() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, 211) * 2
    slices = [
        slice_of("a", 5), slice_of("b", 5, seed=8), slice_of("c", 9, temperature=0.0), slice_of("d", 3, top_p=0.7),
        slice_of("e", 3, top_k=9), slice_of("f", 1, min_p=0.1),
    ]  # fmt: skip
    together = choose_tokens(logits.clone(), slices)
    order = [3, 0, 5, 1, 4, 2]
    shuffled = choose_tokens(logits[order].clone(), [slices[i] for i in order])
    alone = [choose_tokens(logits[i : i + 1].clone(), [slices[i]])[0] for i in range(6)]
    assert together == alone
    assert shuffled == [alone[i] for i in order]


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    piece = slice_of("a", 1, temperature=0.0)
    assert choose_tokens(torch.tensor([[0.0, 2.0, 2.0], [5.0, 5.0, 5.0]]), [piece, piece]) == [1, 0]
    many = torch.zeros(2, 3001)
    many[0, [1777, 2999]] = 1.0
    many[1, 3000] = 1.0  # beyond the last whole vector
    assert choose_tokens(many, [piece, piece]) == [1777, 3000]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_never_chosen_and_unknown_ones_ignored(temperature: float) -> None:
    logits = torch.full((1, 5), -50.0)
    logits[0, [1, 3]] = torch.tensor([100.0, 90.0])
    piece = slice_of("a", 4, temperature=temperature)
    banned = SequenceSlice(
        piece.key, piece.token_ids, piece.start, piece.block_table, piece.sampling, (1, 4, 999)
    )
    assert choose_tokens(logits, [banned]) == [3]


def test_a_whole_batch_gets_the_reference_s_tokens_whatever_its_rows_ask_for() -> None:
    """Rows with all mixtures of filters, penalties and bans, ties in every second batch, lengths of no round number."""
    draw = np.random.default_rng(4)
    for trial, vocab_size in enumerate((5, 64, 211, 1003, 4099) * 4):
        logits = torch.from_numpy(
            draw.normal(size=(8, vocab_size)).astype(np.float32) * draw.choice([0.1, 1, 3, 8])
        )
        if trial % 2:
            logits = (logits * 2).round() / 2
        rows, marks = [], [NO_MARKS]
        for number in range(8):
            seen = draw.integers(0, vocab_size + 9, size=12).tolist()
            marks.append(marks_of(seen[:5], seen[3:10], seen[10:] if number % 3 else ()))
            end = sum(map(len, marks))
            rows.append(row(
                temperature=draw.choice([0, 0.3, 0.8, 1, 2.5]), top_k=draw.choice([0, 1, 7, 40, 1000]),
                top_p=draw.choice([1, 0.95, 0.5, 0.01, 0.999]), min_p=draw.choice([0, 0, 0.02, 0.3, 1]),
                repetition=draw.choice([1, 1.3]), presence=draw.choice([0, 0.5]), frequency=draw.choice([0, 0.25]),
                first_mark=end - len(marks[-1]), end_mark=end,
                seed=draw.integers(2**63), position=draw.integers(2**40),
            ))  # fmt: skip
        arrays = np.concatenate(rows), np.concatenate(marks)
        wanted = sample_rows_reference(logits, arrays[0], torch.from_numpy(arrays[1])).tolist()
        assert sample_rows(logits.clone(), *arrays).tolist() == wanted


def test_rows_without_a_finite_logit_get_token_0_and_rows_may_lie_apart() -> None:
    wide = torch.full((3, 40), float("-inf"))
    wide[1, 7], wide[2] = 1.0, float("nan")
    for temperature in (0.0, 1.0):
        rows = np.concatenate([row(temperature=temperature, top_k=2, top_p=0.5)] * 3)
        assert sample_rows(wide[:, 2:35], rows, NO_MARKS).tolist() == [0, 5, 0]


def test_what_a_gpu_is_told_of_a_batch_gives_the_tokens_that_a_cpu_chooses() -> None:
    torch.manual_seed(6)
    logits = torch.randn(5, 97) * 2
    slices = [
        slice_of("a", 5, seed=-3), slice_of("b", 2**20, temperature=0.0), slice_of("c", 9, top_k=3, temperature=0.5),
        slice_of("d", 3, top_p=0.6, min_p=0.05), slice_of("e", 1, seed=2**63),
    ]  # fmt: skip
    for row in (1, 3):
        banned = tuple(logits[row].topk(3).indices.tolist())
        slices[row] = dataclasses.replace(slices[row], banned_token_ids=(*banned, 1000))
    told = StepSampling(slices)
    wanted = sample_rows_reference(logits, told.rows, torch.from_numpy(told.marks)).tolist()
    assert wanted == choose_tokens(logits, slices)


def test_a_seed_may_be_any_64_bit_number() -> None:
    logits = torch.zeros(1000)
    draws = {sample(logits, 1.0, 0, 1.0, 0.0, seed, 0) for seed in (0, 1, -1, 2**63, 2**64 - 2)}
    assert len(draws) == 5
    assert sample(logits, 1.0, 0, 1.0, 0.0, -1, 0) == sample(logits, 1.0, 0, 1.0, 0.0, 2**64 - 1, 0)
