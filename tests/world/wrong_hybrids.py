"""Wrong about hybrids: what they promise their streams, and where prompts should start."""

from __future__ import annotations

import pytest

from twinpool.colocated_pool.core import ColocatedCore
from twinpool.colocated_pool.step_times import StepTimes
from twinpool.coordinator.hybrid import HybridChooser
from twinpool.coordinator.worker import Worker
from twinpool.decode_pool.core import DecodeCore
from world.wrong_variants import Catalogue

VARIANTS = Catalogue()


@VARIANTS.add
def the_itl_budget_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """A local prompt is computed in steps as large as the token budget, whatever streams run beside it."""
    patch.setattr(StepTimes, "prompt_tokens_within", lambda self, limit_s, num_sequences: 512)  # noqa: ARG005


@VARIANTS.add
def loads_are_the_last_heartbeats(patch: pytest.MonkeyPatch) -> None:
    """What was sent to a worker since its last heartbeat is not counted when the next request is placed."""

    class Stale:
        """The worker as its last heartbeat showed it."""

        def __init__(self, worker: Worker) -> None:
            self._worker = worker
            self.pending_tokens = 0 if worker.stats is None else worker.stats.waiting_tokens

        def __getattr__(self, name: str) -> object:
            return getattr(self._worker, name)

    honest = HybridChooser._prompt_s
    patch.setattr(
        HybridChooser,
        "_prompt_s",
        lambda self, request, worker: honest(self, request, Stale(worker)),  # type: ignore[arg-type]
    )


@VARIANTS.add
def a_local_prompt_is_not_cancelled(patch: pytest.MonkeyPatch) -> None:
    """A hybrid says that it has let go of a prompt, and computes on."""
    honest = ColocatedCore._release

    def release(self: ColocatedCore, key: object) -> None:
        if self._host is None or key not in self._prefill:
            honest(self, key)  # type: ignore[arg-type]

    patch.setattr(ColocatedCore, "_release", release)


@VARIANTS.add
def guests_have_no_slots(patch: pytest.MonkeyPatch) -> None:
    """Grants do not count the prompts that are computed here and will decode here."""
    patch.setattr(
        DecodeCore,
        "num_free_slots",
        property(lambda self: self._max_num_seqs - len(self._scheduler) - self._intake.num_granted),
    )
