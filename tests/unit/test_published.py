"""Published results beside predictions: how differences are told, and what needs no long simulation."""

from __future__ import annotations

import pytest
from support.public_data import public_data, public_file
from support.simulated import LinearTimes

from twinpool.bench.serving.slo import Slo
from twinpool.planner.published import alone
from twinpool.planner.published.figures import Direction, Figure, table
from twinpool.planner.published.stands import TurnByTurn, Worker, colocated, equal_load, split
from twinpool.planner.step_shape import StepShape, of_chunk, of_sequences, together
from twinpool.planner.times.devices import DEVICES
from twinpool.planner.times.model_shapes import SHAPES

TIMES = LinearTimes(base_s=0.01, sequence_s=1e-4, prompt_token_s=1e-4)


class PromptsAlone(LinearTimes):
    """50 ms for each 400 prompt tokens, 1 ms for a step of streams, nothing for nothing."""

    def step_s(self, shape: StepShape, num_busy: int = 0) -> float:  # noqa: ARG002
        if shape.num_chunks:
            return 0.05 * shape.prompt_tokens / 400
        return 0.001 if shape.num_sequences else 0.0


def test_a_figure_tells_how_far_its_prediction_is_from_it() -> None:
    figure = Figure("A paper", "a setting", "rate", 10.0, 12.0, "req/s", "it rained")
    assert figure.difference == pytest.approx(0.2)
    assert table([figure])[2] == "| A paper | a setting | rate | 10 req/s | 12 req/s | +20% | it rained |"


@pytest.mark.parametrize(("holds", "verdict"), [(True, "same direction"), (False, "**other direction**")])
def test_a_direction_tells_whether_it_is_the_same(holds: bool, verdict: str) -> None:
    row = table([Direction("A paper", "a setting", "more", "1 → 2", holds)])[2]
    assert row == f"| A paper | a setting | direction | more | 1 → 2 | {verdict} |  |"


def test_an_engine_that_takes_turns_pays_for_both_steps() -> None:
    prompts, streams = of_chunk(100), of_sequences([50] * 4)
    turns = TurnByTurn(TIMES)
    assert turns.step_s(together(prompts, streams)) == TIMES.step_s(prompts) + TIMES.step_s(streams)


def test_goodput_of_a_stand_is_what_its_prompts_leave_time_for() -> None:
    """A prompt of 400 tokens takes 50 ms: with answers of one token no worker serves more than 20 requests/s."""
    worker = Worker(DEVICES["h100"], SHAPES["llama-3.1-8b"], TurnByTurn(PromptsAlone()))
    load = equal_load(400, 2, 80)
    slo = Slo(ttft_s=0.5)
    one = load.goodput(split((1, worker), (1, worker), load.longest), slo, 0.9, 10.0)
    two = load.goodput(colocated(2, worker, load.longest), slo, 0.9, 10.0)
    assert 14 < one < 25
    assert one < two


def test_splitwise_by_its_own_table_is_within_a_fifth_of_its_medians() -> None:
    public_file("perf/splitwise_a100_h100.csv")
    public_file("traces/azure_2023_code.csv")
    public_file("traces/azure_2023_conversation.csv")
    for figure in alone.splitwise_p50(public_data()):
        assert isinstance(figure, Figure)
        assert abs(figure.difference) < 0.2, figure.row()


def test_short_prompts_are_computed_sooner_than_pulled() -> None:
    found = alone.recompute_or_pull()
    assert isinstance(found, Direction)
    assert found.holds
