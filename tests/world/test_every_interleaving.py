"""Two requests, three blocks, two workers: every order in which messages, blocks, steps and faults can come.

The sizes are such that both requests want blocks of both pools at once: what the one gives up, the other gets next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from twinpool.decode_pool.core import DecodeCore
from twinpool.prefill_pool.core import PrefillCore
from world import exploration_variants as wrong
from world.exploration import Found, explore
from world.exploration_cluster import Cluster
from world.exploration_state import Cast, Faults, Size

SIZE = Size(prompts=(3, 3), num_blocks=3)
LONG = Size(prompts=(3,), num_blocks=3, num_new_tokens=4)
"""Three steps at decode, so that the second and the third follow the one before without a gap."""
JOINING = Size(prompts=(3, 2), num_blocks=5, num_new_tokens=4)


@pytest.mark.parametrize(
    ("size", "faults", "fewest_states"),
    [
        pytest.param(SIZE, Faults(cancels=1), 20_000, id="a cancel"),
        pytest.param(SIZE, Faults(kills=1), 7_000, id="a worker killed and started again"),
        pytest.param(
            SIZE, Faults(losses=1, expiries=1), 30_000, id="a lost message and a lease that runs out"
        ),
        pytest.param(SIZE, Faults(freezes=1), 8_000, id="a worker that is lost and not dead"),
        pytest.param(SIZE, Faults(cancels=1, losses=1), 35_000, id="a cancel and a lost message"),
        pytest.param(LONG, Faults(cancels=1), 3_000, id="a cancel while steps follow each other"),
        pytest.param(JOINING, Faults(), 4_000, id="one that joins steps that follow each other"),
    ],
)
def test_no_order_of_events_breaks_ownership_or_leaves_a_block_behind(
    size: Size, faults: Faults, fewest_states: int
) -> None:
    seen = explore(Cluster.new(Cast(size), faults))
    print(f"{faults}: {seen}")
    assert seen.is_exhausted
    assert seen.num_states >= fewest_states
    assert seen.num_quiet > 0


@pytest.mark.parametrize(
    ("prefill", "decode", "faults", "symptom"),
    [
        (
            PrefillCore,
            wrong.with_ledger(wrong.ReusesBeforeTheAcknowledgement),
            Faults(cancels=1),
            "late write",
        ),
        (wrong.with_outbox(wrong.AcknowledgesAtOnce), DecodeCore, Faults(cancels=1), "late write"),
        (PrefillCore, wrong.with_ledger(wrong.ReusesFences), Faults(), "fence"),
        (wrong.KeepsWhatIsCancelled, DecodeCore, Faults(cancels=1), "only time will free"),
        (PrefillCore, wrong.with_intake(wrong.RevokesInSilence), Faults(cancels=1), "only time will free"),
        (
            wrong.with_outbox(wrong.ReleasesUnderTheReader),
            DecodeCore,
            Faults(cancels=1),
            "is read under fence",
        ),
        (PrefillCore, wrong.with_intake(wrong.BelievesTheSeal), Faults(), "late write|decode reads"),
        (
            PrefillCore,
            wrong.with_ledger(wrong.NeverAsksAgain),
            Faults(cancels=1, losses=1),
            "leases without faults",
        ),
        (PrefillCore, wrong.TakesTheLostForDead, Faults(freezes=1), "late write"),
        (wrong.with_outbox(wrong.SealsOnce), DecodeCore, Faults(losses=1), "leases without faults"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_it_finds_what_is_wrong(
    prefill: Callable[..., Any], decode: Callable[..., Any], faults: Faults, symptom: str
) -> None:
    with pytest.raises(Found, match=symptom) as found:
        explore(Cluster.new(Cast(SIZE, prefill, decode), faults))
    print(found.value)
    assert found.value.story


def test_it_finds_a_sequence_that_is_released_under_the_step_that_follows() -> None:
    with pytest.raises(Found, match="of which its job has"):
        explore(Cluster.new(Cast(LONG, decode=wrong.ReleasesUnderTheFollowingStep), Faults(cancels=1)))


def test_a_search_that_is_cut_says_so() -> None:
    assert not explore(Cluster.new(Cast(SIZE), Faults(cancels=1)), most_states=50).is_exhausted
