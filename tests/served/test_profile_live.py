"""Profiles of a tiny model, with real processes: steps on an engine, and KV from one process to another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.served_model import SHAPE, save_served_model

from twinpool.config import TransportName
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import ModelError
from twinpool.planner.profile.cases import Part, StepCase, StepPlan
from twinpool.planner.profile.engine_messages import WorkerSettings
from twinpool.planner.profile.engine_runs import Engine, Sampler, engine
from twinpool.planner.profile.fit import fit_transfers
from twinpool.planner.profile.measure import ProfileSettings, Profiling
from twinpool.planner.profile.transfer_runs import TransferSettings, measure_transfers

DECODE, PROMPT = StepCase(Part.DECODE, (40,) * 3), StepCase(Part.PROMPT, (), ((64, 0),))
MIXED = StepCase(Part.MIXED, (40, 20), ((16, 32),))
PLAN = StepPlan(
    alone=(DECODE, PROMPT, MIXED),
    busy=(DECODE,),
    sleeping=(PROMPT,),
    row_knots=(1, 8, 64),
    neighbour_decode=DECODE,
    neighbour_prompt=PROMPT,
    least_rounds=2,
    most_s=0.0,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served_model(tmp_path_factory.mktemp("model"))


def settings(directory: Path, *, is_pool_shared: bool = False) -> WorkerSettings:
    return WorkerSettings(
        directory=str(directory), dtype="float32", weights="auto", device="cpu", threads=1, cores=(),
        pool_tokens=PLAN.pool_tokens, most_decodes=3, is_pool_shared=is_pool_shared,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[tuple[Engine, Engine]]:
    with (
        engine(settings(model), "the first") as first,
        engine(settings(model, is_pool_shared=True), "the second") as second,
    ):
        first.load()
        second.load()
        yield first, second


def test_every_shape_is_run_as_often_as_planned_alone_beside_a_neighbour_and_after_a_sleep(
    engines: tuple[Engine, Engine],
) -> None:
    first, second = engines
    sampler = Sampler(
        PLAN,
        lambda case: second if case.part is Part.DECODE else first,
        lambda mine: first if mine is second else second,
    )
    measured = sampler.go_on(PLAN.most_s, PLAN.least_rounds)
    found = {(sample.name, sample.num_busy, sample.has_slept): sample for sample in sampler.samples()}
    awake = [(DECODE.name, 0), (PROMPT.name, 0), (MIXED.name, 0), (DECODE.name, 1)]
    asleep = [(PROMPT.name, 0), (PROMPT.name, 1)]
    assert set(found) == {(*kind, False) for kind in awake} | {(*kind, True) for kind in asleep}
    assert sampler.num_rounds == PLAN.least_rounds
    for (_, num_busy, has_slept), sample in found.items():
        assert sample.num_runs == len(sample.each_s) >= PLAN.least_rounds
        assert min(sample.each_s) > 0
        assert (sample.before_s is not None) == bool(num_busy or has_slept)
    assert sum(each.num_runs for each in measured) == sum(each.num_runs for each in found.values())


def test_engines_that_begin_anew_go_on_where_the_others_were(model: Path) -> None:
    tokenizer = Tokenizer.from_dir(model).backend
    wanted = ProfileSettings(model, "tiny", str(model), tokenizer, dtype="float32", is_quick=True)
    with Profiling(wanted, lambda _: None) as profiling:
        first, engines = profiling.measure_slice(0.5), profiling._engines
        profiling.renew()
        second = profiling.measure_slice(0.5)
        assert profiling._engines != engines
        assert [each.cpu_s() for each in engines] == [0.0] * len(engines), "they have ended"
        assert all(each.cpu_s() > 0 for each in profiling._engines)
        assert profiling._sampler._num_turns == len(first) + len(second)
    assert first
    assert second


def test_an_engine_says_what_it_is(engines: tuple[Engine, Engine]) -> None:
    facts = engines[0].facts
    assert facts.dtype == "float32"
    assert facts.max_model_len == SHAPE["max_position_embeddings"]
    kv_dim = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    assert facts.kv_token_bytes == 2 * SHAPE["num_hidden_layers"] * kv_dim * 4
    assert facts.machine["packages"]["twinpool"]


def test_a_model_that_cannot_be_loaded_is_told_in_its_own_words(tmp_path: Path) -> None:
    with engine(settings(tmp_path), "the worker") as broken, pytest.raises(ModelError, match=r"config\.json"):
        broken.load()


def test_kv_moves_between_two_processes(model: Path) -> None:
    samples, skipped = measure_transfers(
        TransferSettings(
            directory=str(model), dtype="float32", block_size=16, tokens=(16, 64), rounds=2, core=None,
            other_core=None, transports=(TransportName.TCP,),
        )
    )  # fmt: skip
    assert not skipped
    assert [(sample.transport, sample.num_runs) for sample in samples] == [("tcp", 2)] * 2
    assert all(sample.seconds > 0 for sample in samples)
    assert [fit.transport for fit in fit_transfers(samples)] == ["tcp"]
