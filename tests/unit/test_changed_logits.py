"""Penalties, biases, bans, lists and grammars change a row's logits as they are defined, in their order, and no other
row's; log probabilities are of the logits before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.made_matcher import ANY, MadeMatcher
from torch.overrides import TorchFunctionMode

from twinpool.engine.batch import SequenceSlice
from twinpool.engine.look_back import LookBack
from twinpool.engine.sampler import StepSampling
from twinpool.kernels.batch_sampling import sample_rows
from twinpool.kernels.sampling import sample_reference
from twinpool.request import Job, RequestKey, SamplingParams

NOTHING = float("-inf")
PARAMS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.0, 0.7, 1.0, 2.5), "top_k": (0, 0, 5), "top_p": (1.0, 0.8), "min_p": (0.0, 0.05),
    "repetition_penalty": (1.0, 1.0, 1.4, 0.7), "presence_penalty": (0.0, 0.0, 1.5, -2.0),
    "frequency_penalty": (0.0, 0.0, 0.75, -0.5), "logprobs": (None, None, 0, 4), "grammar": (None, None, ANY),
}  # fmt: skip


def slice_of(
    name: str, prompt: Sequence[int], output: Sequence[int], banned: tuple[int, ...] = (), **sampling: Any
) -> SequenceSlice:
    """The last token of a sequence, which goes on with the next one."""
    params = SamplingParams(**{"max_tokens": 99, "seed": 7} | sampling)
    job = Job(name, 0, (*prompt, *output), params, (), len(output))
    last = len(job.token_ids) - 1
    return SequenceSlice(job.key, job.token_ids[-1:], last, [0], params, banned, LookBack.of(job))


def defined(logits: torch.Tensor, piece: SequenceSlice) -> torch.Tensor:
    """A row's logits as they are to be sampled from, token by token."""
    params, job = piece.sampling, piece.look_back.job if piece.look_back is not None else None
    assert params is not None
    prompt = job.token_ids[: job.num_prompt] if job else ()
    output = job.token_ids[job.num_prompt :] if job else ()
    found = logits.clone()
    for token_id in range(len(logits)):
        x = found[token_id] + sum(bias for biased, bias in params.logit_bias if biased == token_id)
        if params.grammar is not None and token_id % 3 != len(output) % 3:
            x = torch.tensor(NOTHING)
        if params.allowed_token_ids and token_id not in params.allowed_token_ids:
            x = torch.tensor(NOTHING)
        if token_id in prompt or token_id in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x = x - output.count(token_id) * params.frequency_penalty
        x = x - (token_id in output) * params.presence_penalty
        is_banned = token_id in piece.banned_token_ids or completes(params.bad_words, output, token_id)
        found[token_id] = NOTHING if is_banned else x
    return found


def completes(bad_words: Sequence[tuple[int, ...]], output: tuple[int, ...], token_id: int) -> bool:
    """Whether a bad word would be the end of the answer, within which it begins."""
    longer = (*output, token_id)
    return any(longer[-len(word) :] == word for word in bad_words)


def reference(logits: torch.Tensor, piece: SequenceSlice) -> int:
    params = piece.sampling
    assert params is not None
    if params.temperature == 0:
        return int(logits.argmax())
    filters = (params.temperature, params.top_k, params.top_p, params.min_p)
    return sample_reference(logits, *filters, params.seed, piece.end)


def drawn(rng: np.random.Generator, name: str, vocab_size: int) -> SequenceSlice:
    """A slice with a mixture of wishes. What its output is does not follow its grammar, and need not."""
    wishes = {field: values[rng.integers(len(values))] for field, values in PARAMS.items()}
    prompt, output, banned = (rng.integers(0, vocab_size, count).tolist() for count in (9, 6, 3))
    biased = rng.integers(0, vocab_size + 9, int(rng.integers(0, 4))).tolist()
    wishes["logit_bias"] = tuple(
        (token, float(rng.choice([-100, -2.5, 3, 100]))) for token in dict.fromkeys(biased)
    )
    wishes["seed"] = int(rng.integers(2**63))
    kept = output[: int(rng.integers(0, 7))]
    if rng.random() < 0.4:
        some = rng.permutation(vocab_size + 5)[: vocab_size * 2 // 3]
        wishes["allowed_token_ids"] = tuple(some.tolist())
    if rng.random() < 0.4:
        lengths = rng.integers(0, 4, 12).tolist()
        seen = [*prompt, *kept]  # what is longer than the answer begins in the prompt, and never occurs
        wishes["bad_words"] = tuple(
            (*seen[len(seen) - length :], int(rng.integers(0, vocab_size + 5))) for length in lengths
        )
    return slice_of(name, prompt, kept, tuple(banned) if rng.random() < 0.4 else (), **wishes)


@pytest.mark.parametrize("seed", range(6))
def test_a_batch_of_all_mixtures_gets_the_tokens_and_log_probabilities_of_the_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.choice([37, 64, 211]))
    slices = [drawn(rng, str(i), vocab_size) for i in range(16)]
    logits = torch.from_numpy(rng.standard_normal((16, vocab_size), np.float32) * 3)
    raw = logits.clone()
    # The made matcher takes any token, if with an error; what it allows follows from how many there were.
    sampling = StepSampling(slices, lambda _job: Patient(vocab_size))
    found = sampling.choose(logits)
    assert found.failed == {}
    table = raw.double().log_softmax(-1)
    for row, (piece, token_id) in enumerate(zip(slices, found.token_ids, strict=True)):
        wanted = defined(raw[row], piece)
        assert token_id == reference(wanted, piece)
        torch.testing.assert_close(logits[row], wanted)
        params = piece.sampling
        assert params is not None
        assert (piece.key in found.logprobs) is (params.logprobs is not None)
        if params.logprobs is not None:
            told = found.logprobs[piece.key]
            assert told.logprob == pytest.approx(float(table[row, token_id]), rel=1e-5)
            best = table[row].topk(params.logprobs)
            assert [token for token, _ in told.top] == best.indices.tolist()
            assert [number for _, number in told.top] == pytest.approx(best.values.tolist(), rel=1e-5)


class Patient(MadeMatcher):
    """One to which nothing is an error."""

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


@pytest.mark.parametrize("seed", range(3))
def test_a_row_gets_in_a_batch_what_it_gets_alone_and_elsewhere(seed: int) -> None:
    """Whether its past was made at once or grew by a token at a time, as on the worker that it came from."""
    rng = np.random.default_rng(seed)
    slices = [drawn(rng, str(i), 90) for i in range(8)]
    logits = torch.from_numpy(rng.standard_normal((8, 90), np.float32) * 2)

    def matcher_of(_job: Job) -> MadeMatcher:
        return Patient(90)

    grown = []
    for piece in slices:
        if piece.look_back is None:
            grown.append(piece)
            continue
        job = piece.look_back.job
        look_back = LookBack(replace(job, token_ids=job.token_ids[: job.num_prompt], num_emitted=0))
        for start in range(job.num_prompt - 1, len(job.token_ids)):
            one = replace(piece, token_ids=job.token_ids[start : start + 1], start=start, look_back=look_back)
            StepSampling([one], matcher_of).choose(torch.zeros(1, 90))
        grown.append(replace(piece, look_back=look_back))
    together = StepSampling(slices, matcher_of).choose(logits.clone())
    alone = [StepSampling([one], matcher_of).choose(logits[i : i + 1].clone()) for i, one in enumerate(grown)]
    assert together.token_ids == [one.token_ids[0] for one in alone]
    assert together.logprobs == {key: told for one in alone for key, told in one.logprobs.items()}


def test_penalties_go_on_counting_what_is_sampled() -> None:
    """Greedy over constant logits: with a frequency penalty of 1, tokens take turns as their logits fall."""
    piece, logits = slice_of("a", [9], [], frequency_penalty=1.0, temperature=0.0), [2.5, 2.0, 1.2, 0.0]
    found = []
    for _ in range(9):
        (token_id,) = StepSampling([piece]).choose(torch.tensor([logits])).token_ids
        found.append(token_id)
        piece = replace(piece, token_ids=(token_id,), start=piece.end)
    assert found == [0, 1, 0, 2, 1, 0, 2, 1, 3]


def test_who_cannot_go_on_is_told_apart_and_the_others_get_their_tokens() -> None:
    matchers = iter([MadeMatcher(12), MadeMatcher(12, most=2), MadeMatcher(12)])
    slices = [
        slice_of("goes on", [5], [0, 1], grammar=ANY, temperature=0.0),
        slice_of("at a dead end", [5], [0, 1], grammar=ANY),
        slice_of("went astray", [5], [0, 4, 6], grammar=ANY),
        slice_of("without", [5], [0], temperature=0.0, logprobs=1),
    ]
    logits = torch.linspace(1, 0, 12).repeat(4, 1)
    found = StepSampling(slices, lambda _job: next(matchers)).choose(logits)
    assert found.failed == {
        RequestKey("at a dead end", 0): "its grammar allows no token here",
        RequestKey("went astray", 0): "token 6 was not allowed",
    }
    assert (found.token_ids[0], found.token_ids[3]) == (2, 0)
    assert list(found.logprobs) == [RequestKey("without", 0)]


def test_where_lists_leave_no_token_the_answer_cannot_go_on() -> None:
    """Alone, with each other, with a grammar, and with the ban on what would end the answer too early."""
    slices = [
        slice_of("allowed and bad", [5], [1], allowed_token_ids=(2, 3, 99), bad_words=((2,), (1, 3))),
        slice_of(
            "another word", [5], [1], temperature=0.0, allowed_token_ids=(2, 3), bad_words=((2,), (2, 3))
        ),
        slice_of("allowed and min_tokens", [5], [1], (4,), allowed_token_ids=(4,)),
        slice_of("allowed and grammar", [5], [1], allowed_token_ids=(3, 5), grammar=ANY),
        slice_of("bad and grammar", [5], [1], bad_words=((1,), (4,), (7,), (10,)), grammar=ANY),
        slice_of("all are bad", [5], [1], bad_words=tuple((token,) for token in range(12))),
        slice_of("only beyond", [5], [1], allowed_token_ids=(12,)),
        slice_of("one is left", [5], [1], bad_words=tuple((token,) for token in range(11))),
        slice_of("plain", [5], [1], temperature=0.0),
    ]
    found = StepSampling(slices, lambda _job: Patient(12)).choose(torch.linspace(1, 0, 12).repeat(9, 1))
    assert {key.request_id for key in found.failed} == {
        "allowed and bad", "allowed and min_tokens", "allowed and grammar", "bad and grammar", "all are bad",
        "only beyond",
    }  # fmt: skip
    assert all("no token is left" in reason for reason in found.failed.values())
    assert (found.token_ids[1], *found.token_ids[7:]) == (3, 11, 0)


def test_a_grammar_that_nobody_here_matches_fails_its_sequence_alone() -> None:
    slices = [slice_of("a", [5], [], grammar=ANY), slice_of("b", [5], [], temperature=0.0)]
    found = StepSampling(slices).choose(torch.linspace(1, 0, 12).repeat(2, 1))
    assert list(found.failed) == [RequestKey("a", 0)]
    assert found.token_ids[1] == 0


class Counted(TorchFunctionMode):
    """Writes down what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_a_step_that_asks_for_none_of_it_makes_no_other_call_of_torch_than_to_sample() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    plain = [SequenceSlice(RequestKey(str(i), 0), [1], i, [0], SamplingParams(9, i)) for i in range(3)]
    sampling = StepSampling(plain)
    with Counted() as wanted:
        sample_rows(logits, sampling.rows, sampling.marks).tolist()
    with Counted() as found:
        sampling.choose(logits)
    assert found.names == wanted.names
    asking = [*plain[:2], slice_of("a", [1], [], logprobs=1)]
    with Counted() as more:
        StepSampling(asking).choose(logits)
    assert len(more.names) > len(wanted.names)
