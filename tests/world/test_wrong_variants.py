"""The world finds every deliberately wrong variant of the cores; the same seeds find nothing in the right ones."""

from __future__ import annotations

import pytest

from world import wrong_answers, wrong_blocks, wrong_hybrids, wrong_pools, wrong_requests
from world.runs import run_seed
from world.wrong_variants import MAX_SEEDS, Variant

VARIANTS = (
    *wrong_answers.VARIANTS,
    *wrong_blocks.VARIANTS,
    *wrong_hybrids.VARIANTS,
    *wrong_pools.VARIANTS,
    *wrong_requests.VARIANTS,
)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
def test_a_wrong_variant_is_found(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert variant.__doc__
    variant(monkeypatch)
    assert any(breaks(seed) for seed in range(MAX_SEEDS)), (
        f"{MAX_SEEDS} seeds do not find it: {variant.__doc__}"
    )


def breaks(seed: int) -> bool:
    """Whether a promise is broken in the run of this seed. A variant may also fail in its own way."""
    try:
        run_seed(seed)
    except Exception:  # noqa: BLE001  # whatever it is, somebody would have noticed
        return True
    return False
