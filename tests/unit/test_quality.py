"""What the program that measures a format's quality computes, on a tiny model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.support.tiny_models import load_runner, piece, step, tokens

from twinpool.bench.engine.made_models import MadeShape, make_model
from twinpool.bench.engine.quality import ANSWER_TOKENS, Output, compare, measure
from twinpool.request import RequestKey

PROMPTS = [tokens(9, seed=1), tokens(17, seed=2)]


def test_perplexity_and_answers_are_those_of_the_model(tmp_path: Path) -> None:
    directory, text = make_model(tmp_path, MadeShape()), tokens(40)
    found = measure(directory, "float32", "auto", text, PROMPTS)
    runner, table = load_runner(directory), list(range(12))
    logits = runner.logits(step(piece("text", text, 0, table)))
    losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(text[1:]))
    assert found.perplexity == pytest.approx(math.exp(float(losses)), rel=1e-4)
    assert found.likeliest == tuple(logits.argmax(1).tolist())
    for prompt, answer in zip(PROMPTS, found.answers, strict=True):
        ids = [*prompt, *answer[:-1]]
        last = runner.run(step(piece("answer", ids, 0, table, temperature=0.0)))
        assert len(answer) == ANSWER_TOKENS
        assert last.token_ids[RequestKey("answer", 0)] == answer[-1]


def test_rounded_weights_are_measured_beside_exact_ones(tmp_path: Path) -> None:
    directory, text = make_model(tmp_path, MadeShape()), tokens(40)
    exact, rounded = (measure(directory, "float32", name, text, PROMPTS) for name in ("auto", "int8"))
    quality = compare(rounded, exact)
    assert quality.perplexity == rounded.perplexity != exact.perplexity
    assert quality.perplexity == pytest.approx(exact.perplexity, rel=0.1)
    assert quality.likeliest_equal > 0.8


def test_answers_are_compared_token_by_token() -> None:
    wanted = Output(2.0, (1, 2, 3, 4), ((1, 2, 3, 4), (5, 6, 7, 8), (1, 1, 1, 1)))
    found = Output(3.0, (1, 2, 3, 5), ((1, 2, 9, 4), (5, 6, 7, 8), (0, 0, 0, 0)))
    quality = compare(found, wanted)
    assert quality.likeliest_equal == 0.75
    assert quality.answer_tokens_equal == pytest.approx((3 / 4 + 1 + 0) / 3)
    assert quality.answers_equal == pytest.approx(1 / 3)
    assert quality.first_difference == 2
    assert compare(wanted, wanted).first_difference is None
