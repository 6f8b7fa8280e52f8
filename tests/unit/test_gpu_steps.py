"""What a GPU step reads and which graph it is, on a CPU: where CUDA replays, the recorder here runs the work again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.made_matcher import ANY, MadeMatcher
from support.rerun import as_host, capture
from support.tiny_models import load_runner, piece, step, tokens

from twinpool.bench.engine.made_models import MadeShape, make_model
from twinpool.engine.batch import Scoring, SequenceSlice
from twinpool.engine.gpu.graphs import batch_sizes, size_for
from twinpool.engine.gpu.step_inputs import NOWHERE, Room, StepInputs
from twinpool.engine.host_inputs import HostInputs
from twinpool.engine.look_back import LookBack
from twinpool.engine.model_runner import ModelRunner
from twinpool.engine.sampler import StepSampling
from twinpool.request import Job, SamplingParams

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load_runner(make_model(tmp_path_factory.mktemp("model"), MadeShape()))


@given(most=st.integers(0, 700))
def test_every_batch_has_a_graph_that_is_not_twice_its_size(most: int) -> None:
    sizes = batch_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    for num_seqs in range(1, most + 1):
        size = size_for(num_seqs, sizes)
        assert size is not None
        assert num_seqs <= size < 2 * num_seqs or size == 1
    assert size_for(most + 1, sizes) is None


@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 30), st.booleans()), min_size=1, max_size=7
    ),
    seed=st.integers(0, 1 << 20),
)
def test_the_devices_inputs_are_those_of_the_cpu(lengths: list[tuple[int, int, bool]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    slices = []
    for i, (count, start, sampled) in enumerate(lengths):
        table = rng.permutation(100)[: -(-(start + count) // 8) + int(rng.integers(0, 3))].tolist()
        sampling = {"temperature": 0.0} if sampled else {}
        slices.append(piece(str(i), rng.integers(0, 131, count).tolist(), start, table, **sampling))
    token_ids, wanted = HostInputs(8).pack(slices)
    rows = wanted.query_starts[1:][[one.sampling is not None for one in slices]] - 1
    inputs = StepInputs.of(slices, rows, 8, CPU)
    found = as_host(inputs, len(slices))
    assert torch.equal(inputs.token_ids, token_ids)
    assert torch.equal(found.slots, wanted.slots)
    assert torch.equal(found.positions, wanted.positions)
    assert found.query_starts.tolist() == wanted.query_starts.tolist() == inputs.batch.query_starts.tolist()
    assert found.ends.tolist() == wanted.ends.tolist() == inputs.batch.ends.tolist()
    for seq in range(len(slices)):
        length = len(wanted.table(seq))
        assert found.table(seq)[:length].tolist() == wanted.table(seq).tolist()
    assert inputs.rows.tolist() == rows.tolist()
    on_device = inputs.batch.on_device
    assert on_device is not None
    arrays = (
        inputs.token_ids, inputs.rows, inputs.batch.slots, inputs.batch.positions,
        on_device.query_starts, on_device.ends, on_device.block_tables,
    )  # fmt: skip
    assert {array.data_ptr() % 16 for array in arrays if len(array)} == {0}


def test_kept_inputs_forget_whatever_was_in_them_before() -> None:
    """Sequences join, leave, grow and change places: the memory then says what inputs made anew would."""
    rng = np.random.default_rng(0)
    kept = StepInputs(Room(4, 4, 16, 4), 8, CPU, num_decodes=4, most_queries=0)
    tables: dict[int, tuple[int, ...]] = {}
    for _ in range(200):
        slices: list[SequenceSlice] = []
        for name in rng.permutation(6)[: int(rng.integers(1, 5))].tolist():
            before = tables.get(name, ())
            grown = (*before, int(rng.integers(0, 99))) if rng.random() < 0.7 and len(before) < 16 else before
            tables[name] = grown if grown and rng.random() < 0.9 else (int(rng.integers(0, 99)),)
            start = int(rng.integers(0, 8 * len(tables[name])))
            slices.append(piece(str(name), [int(rng.integers(0, 99))], start, tables[name], temperature=0.0))
        num, rows = len(slices), np.arange(len(slices))
        kept.fill(slices, rows)
        anew = as_host(StepInputs.of(slices, rows, 8, CPU), num)
        found = as_host(kept, num)
        assert torch.equal(found.slots, anew.slots)
        assert torch.equal(found.positions, anew.positions)
        assert found.ends.tolist() == anew.ends.tolist()
        for seq, one in enumerate(slices):
            assert tuple(found.table(seq)[: len(one.block_table)]) == tuple(one.block_table)
        assert kept.batch.on_device is not None
        assert kept.batch.on_device.ends[num:].tolist() == [0] * (4 - num)
        assert kept.batch.slots[num:].tolist() == [NOWHERE] * (4 - num)


def test_replayed_steps_give_the_tokens_of_eager_ones_while_sequences_join_and_leave(
    runner: ModelRunner,
) -> None:
    """However each is sampled, and with tokens that must not be chosen."""
    graphs = capture(runner, 5)
    prompts = {name: tokens(3 + 4 * name, seed=name) for name in range(5)}
    tables = {name: list(range(8 * name, 8 * name + 8)) for name in range(5)}
    sampling: dict[int, dict[str, float]] = {
        0: {"temperature": 0.0}, 1: {"temperature": 1.0, "seed": 2**63 + 5}, 2: {"temperature": 2.0, "top_k": 9},
        3: {"temperature": 0.7, "top_p": 0.8}, 4: {"temperature": 1.5, "min_p": 0.01},
    }  # fmt: skip
    for name, ids in prompts.items():
        runner.run(step(piece(str(name), ids, 0, tables[name], temperature=0.0)))
    banned: tuple[int, ...] = ()
    for live in ([0, 1, 2], [4, 2], [1], [0, 1, 2, 3, 4], [3, 0], [0]):
        slices = [
            replace(
                piece(str(name), [5 + name], len(prompts[name]), tables[name], **sampling[name]),
                banned_token_ids=banned,
            )
            for name in live
        ]
        wanted = runner.run(step(*slices)).token_ids
        found = graphs.step(slices, StepSampling(slices)).token_ids
        assert found == list(wanted.values())
        assert not set(banned) & set(found)
        logits = runner.logits(step(*slices)).clone()
        logits[:, list(banned)] = -torch.inf
        torch.testing.assert_close(graphs.logits(len(live)), logits, rtol=1e-4, atol=1e-4)
        banned = tuple(found) if live == [3, 0] else ()
        for name in live:
            prompts[name].append(5 + name)
    assert graphs.num_replayed == 6


def test_replayed_steps_change_logits_and_tell_of_them_as_eager_ones_do(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties, a bias, bans, lists, a grammar, log probabilities: each of some sequences, which come and go."""
    monkeypatch.setattr(runner.grammars, "matcher", lambda _job: MadeMatcher(runner.model_config.vocab_size))
    graphs = capture(runner, 5)
    wishes: dict[int, dict[str, Any]] = {
        0: {
            "temperature": 0.0, "repetition_penalty": 1.7, "frequency_penalty": 1.5,
            "allowed_token_ids": tuple(range(0, 300, 2)), "bad_words": ((8,), (2, 4), (10, 12)),
        },
        1: {"temperature": 1.0, "logit_bias": ((17, 100.0), (9000, 5.0)), "logprobs": 3},
        2: {"temperature": 2.0, "grammar": ANY},
        3: {"temperature": 0.5, "presence_penalty": 2.0, "logit_bias": ((4, 9.0),), "grammar": ANY, "logprobs": 0},
        4: {"temperature": 0.0},
    }  # fmt: skip
    ids = {name: tokens(9, seed=name) for name in wishes}
    tables = {name: list(range(8 * name, 8 * name + 8)) for name in wishes}
    params = {name: SamplingParams(99, name, **own) for name, own in wishes.items()}
    jobs = {name: Job(str(name), 0, tuple(ids[name]), params[name], ()) for name in wishes}
    eager, replayed = ({name: LookBack.of(job) for name, job in jobs.items()} for _ in range(2))
    for name in wishes:
        runner.run(step(piece(str(name), ids[name][:-1], 0, tables[name])))
    for live in ([0, 1, 2, 3, 4], [3, 1], [4], [2, 4], [0, 2, 3], [1, 4], [4, 3, 2, 1, 0]):
        wanted, found = (
            [
                SequenceSlice(
                    jobs[name].key, ids[name][-1:], len(ids[name]) - 1, tables[name], params[name],
                    (6, 7) if name % 2 else (), pasts[name],
                )
                for name in live
            ]
            for pasts in (eager, replayed)
        )  # fmt: skip
        output = runner.run(step(*wanted))
        chosen = graphs.step(found, StepSampling(found, runner.grammars.matcher))
        assert chosen.token_ids == list(output.token_ids.values())
        assert chosen.logprobs == output.logprobs
        assert {key.request_id for key in chosen.logprobs} == {str(name) for name in live if name in (1, 3)}
        assert not output.failed | chosen.failed
        for name, token_id in zip(live, chosen.token_ids, strict=True):
            ids[name].append(token_id)
    assert ids[1][9:].count(17) == 4
    assert not any(token_id % 2 or token_id == 8 for token_id in ids[0][9:])
    assert [token_id % 3 for token_id in ids[2][9:]] == [0, 1, 2, 0]


def test_capturing_and_padding_write_nothing_to_the_pool(runner: ModelRunner) -> None:
    before = runner.kv.clone()
    graphs = capture(runner, 8)
    assert torch.equal(runner.kv, before)
    slices = [piece(str(i), [7], 0, [9 + i], temperature=0.0) for i in range(5)]
    graphs.step(slices, StepSampling(slices))
    changed = (runner.kv != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert changed == [9, 10, 11, 12, 13]


def test_steps_that_no_graph_holds_run_eagerly_and_decode_steps_among_them_say_so(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = capture(runner, 2)
    monkeypatch.setattr(runner, "graphs", graphs)
    decode = [piece(str(i), [7], 0, [9 + i], temperature=0.0) for i in range(3)]
    chunk = piece("chunk", tokens(4), 0, [3], temperature=0.0)
    for slices, missed in (
        (decode, True), ([*decode[:1], chunk], False), ([piece("not at its end", [7], 0, [3])], False),
        ([replace(decode[0], scoring=Scoring((), 0))], False),
    ):  # fmt: skip
        assert not graphs.holds(slices)
        assert runner.run(step(*slices)).missed_graph is missed
    assert runner.run(step(*decode), lambda _layer: None).missed_graph is False
    assert graphs.num_replayed == 0
    assert runner.run(step(*decode[:2])).missed_graph is False
    assert graphs.num_replayed == 1


def test_without_graphs_where_none_are_wanted_nothing_is_missed_but_where_a_model_cannot_have_them(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = step(piece("0", [7], 0, [9], temperature=0.0))
    assert runner.run(decode).missed_graph is False
    monkeypatch.setattr(runner, "why_no_graphs", "another family's")
    assert runner.run(decode).missed_graph is True
