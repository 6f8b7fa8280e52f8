"""The engine on a CUDA device gives the CPU's tokens, from graphs too, without waiting and without growing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.cuda import DEVICE, IS_REHEARSAL
from support.gpu_engine import SMALL, generate, mirror_of, prompts, runner_on, tables
from support.made_matcher import ANY, MadeMatcher
from support.rerun import capture

from twinpool.bench.engine.made_models import SMOLLM2_135M, MadeShape, make_model
from twinpool.engine.batch import Scoring, SequenceSlice, StepBatch, StepOutput
from twinpool.engine.gpu.step_inputs import StepInputs
from twinpool.engine.look_back import LookBack
from twinpool.engine.model_runner import ModelRunner
from twinpool.engine.sampler import StepSampling
from twinpool.request import Job, RequestKey, SamplingParams

CPU = torch.device("cpu")
LENGTHS = (1, 17, 50) if IS_REHEARSAL else (1, 15, 16, 17, 33, 100, 5, 64)
COUNT = 4 if IS_REHEARSAL else 24
SIZES = (1, 3) if IS_REHEARSAL else (1, 3, 8, 17, 40, 2)
GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
REAL = MadeShape() if IS_REHEARSAL else SMOLLM2_135M


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("small"), SMALL, scale=0.1)


@pytest.fixture(scope="module")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("real"), REAL, torch.bfloat16, str(DEVICE), scale=0.05)


@pytest.fixture(autouse=True)
def no_memory_left_behind() -> Iterator[None]:
    yield
    if not IS_REHEARSAL:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def decode_slices(
    runner: ModelRunner, num_seqs: int, context: int, sampling: SamplingParams = GREEDY
) -> list[SequenceSlice]:
    """A decode step of so many sequences; what lies before is the pool's garbage."""
    where = tables(num_seqs, runner.num_blocks)
    return [
        SequenceSlice(RequestKey(str(i), 0), [i + 3], context - 1 - i % 7, where[i], sampling)
        for i in range(num_seqs)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_in_float32_are_the_cpus(model: Path, temperature: float) -> None:
    ids = prompts(LENGTHS, SMALL.vocab_size)
    wanted = generate(runner_on(CPU, model), ids, COUNT, temperature)
    runner = runner_on(DEVICE, model)
    assert generate(runner, ids, COUNT, temperature) == wanted
    graphs = runner.graphs = capture(runner, len(ids))
    assert generate(runner, ids, COUNT, temperature) == wanted
    assert IS_REHEARSAL or graphs.num_replayed > 15


def test_changed_logits_and_what_is_told_of_them_are_the_cpus(model: Path) -> None:
    """Launched kernel by kernel, and behind a graph: penalties, bias, a grammar, log probabilities, scored prompts."""
    ids = prompts((70, 9, 33), SMALL.vocab_size)
    wishes = (
        SamplingParams(99, 1, temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5, logprobs=2),
        SamplingParams(99, 2, temperature=1.0, logit_bias=((7, 4.0), (5000, 9.0)), logprobs=0),
        SamplingParams(99, 3, temperature=1.0, grammar=ANY, presence_penalty=1.0),
    )
    cpu, eager, replayed = (runner_on(device, model) for device in (CPU, DEVICE, DEVICE))
    replayed.graphs = capture(replayed, len(ids))
    found = []
    for runner in (cpu, eager, replayed):
        runner.grammars.matcher = lambda _job: MadeMatcher(SMALL.vocab_size)  # type: ignore[method-assign]
        jobs = [Job(str(i), 0, tuple(prompt), wishes[i], ()) for i, prompt in enumerate(ids)]
        pasts = [LookBack.of(job) for job in jobs]
        scoring = [Scoring(job.token_ids[1:], 1) for job in jobs]
        where, now, starts = tables(len(ids), runner.num_blocks), ids, [0] * len(ids)
        outputs: list[StepOutput] = []
        for number in range(COUNT):
            outputs.append(runner.run(StepBatch(tuple(
                SequenceSlice(job.key, now[i], starts[i], where[i], wishes[i], (3,), pasts[i],
                              None if number else scoring[i])
                for i, job in enumerate(jobs)
            ))))  # fmt: skip
            starts = [start + len(token_ids) for start, token_ids in zip(starts, now, strict=True)]
            now = [[outputs[-1].token_ids[job.key]] for job in jobs]
        assert not any(output.failed for output in outputs)
        found.append(outputs)
    assert replayed.graphs.num_replayed == COUNT - 1
    for outputs in found[1:]:
        for output, wanted in zip(outputs, found[0], strict=True):
            assert output.token_ids == wanted.token_ids
            for key, told in wanted.logprobs.items():
                assert output.logprobs[key].logprob == pytest.approx(told.logprob, abs=1e-3)
                assert [token for token, _ in output.logprobs[key].top] == [token for token, _ in told.top]
            for key, told_of in wanted.scores.items():
                numbers = [entry.logprob for entry in output.scores[key]]
                assert numbers == pytest.approx([entry.logprob for entry in told_of], abs=1e-3)


@pytest.mark.skipif(IS_REHEARSAL, reason="tests/oracle compares the CPU's tokens with those of transformers")
def test_tokens_in_float32_are_those_of_transformers(model: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="the reference is transformers, which is not here"
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    (prompt,) = prompts((40,), SMALL.vocab_size)
    (found,) = generate(runner_on(DEVICE, model), [prompt], 16)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + found[:-1]])).logits[0, -len(found) :]
    assert logits.argmax(-1).tolist() == found


def test_a_replayed_step_gives_the_logits_of_an_eager_one_at_every_size(real_model: Path) -> None:
    """In bfloat16, at a real model's shape: products of another number of rows may round differently, no more."""
    runner = runner_on(DEVICE, real_model, "bfloat16", num_blocks=160 if IS_REHEARSAL else 2000)
    runner.kv.div_(30)
    graphs = capture(runner, max(SIZES))
    for num_seqs in SIZES:
        slices = decode_slices(runner, num_seqs, 150)
        eager = runner.logits(StepBatch(tuple(slices))).clone()
        found = graphs.step(slices, StepSampling(slices)).token_ids
        assert found == graphs.logits(num_seqs).argmax(-1).tolist()
        error = (graphs.logits(num_seqs) - eager).norm() / eager.norm()
        assert float(error) < 0.02


def test_captured_steps_leave_every_other_block_as_it_was(model: Path) -> None:
    runner = runner_on(DEVICE, model)
    before = runner.kv.clone()
    graphs = capture(runner, 8)
    assert torch.equal(runner.kv, before)
    slices = decode_slices(runner, 5, 30)
    graphs.step(slices, StepSampling(slices))
    written = sorted(piece.block_table[piece.start // 16] for piece in slices)
    assert (runner.kv != before).flatten(1).any(1).nonzero()[:, 0].tolist() == written


@pytest.mark.skipif(IS_REHEARSAL, reason="pools of 8 bits are on a GPU only")
@pytest.mark.parametrize(("kv_cache_dtype", "most_error"), [("int8", 0.02), ("fp8", 0.08)])
def test_kv_in_8_bits_changes_logits_by_little(model: Path, kv_cache_dtype: str, most_error: float) -> None:
    (prompt,) = prompts((200,), SMALL.vocab_size)
    chunks = [
        StepBatch((SequenceSlice(RequestKey("a", 0), prompt[start:end], start, tuple(range(13)), None),))
        for start, end in ((0, 150), (150, 200))
    ]
    exact, narrow = runner_on(DEVICE, model), runner_on(DEVICE, model, kv_cache_dtype=kv_cache_dtype)
    for chunk in chunks:
        wanted, found = exact.logits(chunk), narrow.logits(chunk)
    assert 0 < float((found - wanted).norm() / wanted.norm()) < most_error


@pytest.mark.skipif(IS_REHEARSAL, reason="only a GPU has memory of its own")
def test_steps_take_no_memory_once_they_are_captured(real_model: Path) -> None:
    runner = runner_on(DEVICE, real_model, "bfloat16", num_blocks=2000)
    before = torch.cuda.memory_reserved(DEVICE)
    runner.graphs = capture(runner, 64)
    captured = torch.cuda.memory_reserved(DEVICE) - before
    assert captured < 1 << 30
    batch = StepBatch(tuple(decode_slices(runner, 64, 100)))
    runner.run(batch)
    warm = torch.cuda.memory_allocated(DEVICE), torch.cuda.memory_reserved(DEVICE)
    for _ in range(50):
        runner.run(batch)
    assert (torch.cuda.memory_allocated(DEVICE), torch.cuda.memory_reserved(DEVICE)) == warm


@pytest.mark.skipif(IS_REHEARSAL, reason="only a GPU runs beside its host")
def test_launching_a_prefill_waits_for_nothing(model: Path) -> None:
    runner = runner_on(DEVICE, model)
    (prompt,) = prompts((100,), SMALL.vocab_size)
    slices = [SequenceSlice(RequestKey("a", 0), prompt, 0, tuple(range(8)), GREEDY)]
    rows = torch.tensor([99]).numpy()

    def launch() -> None:
        inputs = StepInputs.of(slices, rows, runner.layout.block_size, DEVICE)
        hidden = runner._model.forward(
            inputs.token_ids, inputs.batch, runner.kv, inputs.rows, lambda _layer: None
        )
        runner._model.logits(hidden)

    with torch.inference_mode():
        launch()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_blocks_that_went_through_both_mirrors_continue_the_answer(model: Path) -> None:
    prefill, decode = runner_on(DEVICE, model), runner_on(DEVICE, model)
    (prompt,) = prompts((90,), SMALL.vocab_size)
    (wanted,) = generate(prefill, [prompt], 12)
    (sender, sent), (receiver, received) = mirror_of(prefill), mirror_of(decode)
    source = tables(1, prefill.num_blocks)[0][: prefill.layout.num_blocks(len(prompt))]
    target = [(block * 7 + 3) % decode.num_blocks for block in source]
    sender.fetch(source, 0, prefill.layout.num_layers)
    size = prefill.layout.block_bytes
    for mine, theirs in zip(source, target, strict=True):
        received[theirs * size : (theirs + 1) * size] = sent[mine * size : (mine + 1) * size]
    receiver.store(target)
    spare = [block for block in range(decode.num_blocks) if block not in target][:2]
    found = wanted[:1]
    while len(found) < len(wanted):
        at = len(prompt) + len(found) - 1
        key = RequestKey("a", 0)
        piece = SequenceSlice(key, found[-1:], at, (*target, *spare), GREEDY)
        found.append(decode.run(StepBatch((piece,))).token_ids[key])
    assert found == wanted
