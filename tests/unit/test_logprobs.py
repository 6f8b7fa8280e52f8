"""Log probabilities: their order and bounds, and that a token has the same one whether chosen or in a prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_models import load_runner, piece, step, tokens

from twinpool.bench.engine.made_models import MadeShape, make_model
from twinpool.bounds import LEAST_LOGPROB
from twinpool.engine.batch import Scoring, SequenceSlice
from twinpool.engine.head_rows import ROWS_AT_ONCE
from twinpool.engine.logprobs import log_probabilities, told
from twinpool.engine.model_runner import ModelRunner
from twinpool.request import RequestKey, TokenLogprobs

KEY = RequestKey("a", 0)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load_runner(make_model(tmp_path_factory.mktemp("model"), MadeShape()))


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 1e4])
def test_the_likeliest_are_in_falling_order_and_of_equal_ones_the_lowest_id_is_first(spread: float) -> None:
    """With ties in plenty: logits of few values, and differences so small that they round away."""
    rng = np.random.default_rng(7)
    logits = torch.from_numpy((rng.integers(-3, 4, (9, 1003)) * spread).astype(np.float32))
    logits[4] += torch.from_numpy(rng.random(1003, np.float32) * 1e-7)
    table = log_probabilities(logits)
    chosen, nums = rng.integers(0, 1003, 9).tolist(), [0, 1, 2, 5, 20, 3, 20, 1, 0]
    for row, (entry, token_id, num) in enumerate(zip(told(table, chosen, nums), chosen, nums, strict=True)):
        numbers = table[row].tolist()
        assert entry.logprob == numbers[token_id]
        order = sorted(range(1003), key=lambda token: (-numbers[token], token))
        assert entry.top == tuple((token, numbers[token]) for token in order[:num])
    wanted = logits.double().log_softmax(-1).clamp(min=LEAST_LOGPROB)
    torch.testing.assert_close(table.double(), wanted, rtol=1e-5, atol=1e-5)


def test_fewer_tokens_than_are_asked_for_are_all_told() -> None:
    table = log_probabilities(torch.tensor([[0.0, 1.0]]))
    (entry,) = told(table, [0], [20])
    assert [token for token, _ in entry.top] == [1, 0]
    assert dict(entry.top)[0] == entry.logprob


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_whatever_a_model_gives_is_told_in_numbers_within_bounds(broken: float) -> None:
    logits = torch.tensor([[broken, 1.0, 0.0], [broken] * 3, [1e38, -1e38, 0.0]])
    for entry in told(log_probabilities(logits), [0, 0, 1], [3, 3, 3]):
        for number in (entry.logprob, *(number for _, number in entry.top)):
            assert LEAST_LOGPROB <= number <= 0


def score(runner: ModelRunner, token_ids: list[int], ends: list[int], num_top: int, **sampling: Any) -> Any:
    """The scores of a prompt that is computed in chunks with these ends, and the last step's output."""
    found: list[TokenLogprobs] = []
    start = 0
    for end in ends:
        last = end == len(token_ids)
        one = piece("a", token_ids[start:end], start, range(40), **(sampling if last else {}))
        output = runner.run(
            step(replace(one, scoring=Scoring(tuple(token_ids[start + 1 : end + 1]), num_top)))
        )
        assert len(output.scores[KEY]) == min(end, len(token_ids) - 1) - start
        assert list(output.token_ids) == ([KEY] if last and sampling else [])
        found += output.scores[KEY]
        start = end
    return found, output


@pytest.mark.parametrize("ends", [[201], [64, 201], [1, 65, 66, 200, 201], [130, 201]])
def test_a_prompt_scored_in_chunks_has_the_log_softmax_of_its_logits(
    runner: ModelRunner, ends: list[int]
) -> None:
    """Whose rows come in pieces, too."""
    assert len(range(0, 201, ROWS_AT_ONCE)) > 3
    ids = tokens(201, seed=3)
    logits = runner.logits(step(piece("a", ids, 0, range(40, 80))))
    table = logits.log_softmax(-1)
    found, output = score(runner, ids, ends, 3, temperature=0.0)
    assert [entry.logprob for entry in found] == table[range(200), ids[1:]].tolist()
    best = table.topk(3)
    assert [[number for _, number in entry.top] for entry in found] == best.values[:-1].tolist()
    assert output.token_ids[KEY] == int(table[-1].argmax())


def test_what_decode_told_of_its_tokens_is_what_they_score_in_a_prompt(runner: ModelRunner) -> None:
    """To the bit, on a CPU: across the borders of blocks, whatever changed the logits that they were chosen from."""
    ids = tokens(13, seed=5)
    wishes = {"temperature": 1.5, "logprobs": 4, "logit_bias": ((3, 4.0), (99, -9.0))}
    told_of: list[TokenLogprobs] = []
    now, start, given = ids, 0, list(ids)
    while len(given) < 13 + 20:
        output = runner.run(step(piece("a", now, start, range(40), **wishes)))
        start, now = len(given), [output.token_ids[KEY]]
        told_of.append(output.logprobs[KEY])
        given += now
    scores, _ = score(runner, given, [len(given)], 4)
    assert scores[12:] == told_of
    assert any(
        dict(entry.top).get(token) == entry.logprob for entry, token in zip(told_of, given[13:], strict=True)
    )


def test_scored_and_sampled_slices_share_a_step(runner: ModelRunner) -> None:
    """Decodes before them, a chunk that is not scored behind; each gets what it gets alone."""
    ids = [tokens(length, seed=length) for length in (9, 90, 80, 30)]
    runner.run(step(piece("0", ids[0][:8], 0, range(10, 30)), piece("3", ids[3][:10], 0, range(70, 90))))
    slices: list[SequenceSlice] = [
        piece("0", ids[0][8:], 8, range(10, 30), temperature=0.0, logprobs=2),
        replace(piece("1", ids[1], 0, range(30, 50), temperature=1.0, logprobs=0),
                scoring=Scoring(tuple(ids[1][1:]), 2)),
        replace(piece("2", ids[2][:70], 0, range(50, 70)), scoring=Scoring(tuple(ids[2][1:71]), 0)),
        piece("3", ids[3][10:], 10, range(70, 90), temperature=0.0),
    ]  # fmt: skip
    together = runner.run(step(*slices))
    alone = [runner.run(step(one)) for one in slices]
    for part in ("token_ids", "logprobs", "scores"):
        assert getattr(together, part) == {
            key: value for one in alone for key, value in getattr(one, part).items()
        }
    assert {key.request_id: len(scores) for key, scores in together.scores.items()} == {"1": 89, "2": 70}
    assert {key.request_id for key in together.logprobs} == {"0", "1"}


def test_a_prompt_of_one_token_has_nothing_to_score(runner: ModelRunner) -> None:
    output = runner.run(step(replace(piece("a", [5], 0, [3], temperature=0.0), scoring=Scoring((), 5))))
    assert output.scores == {KEY: ()}
    output = runner.run(step(replace(piece("a", [5], 0, [3]), scoring=Scoring((), 5))))
    assert (output.scores, output.token_ids) == ({KEY: ()}, {})
