"""Wrong about the pools: who leaves one, when, and what it takes along."""

from __future__ import annotations

import pytest

from twinpool.coordinator import custody
from twinpool.coordinator.pools import Pools
from twinpool.coordinator.worker import Worker
from twinpool.engine.block_pool import BlockPool
from twinpool.messages import WorkerStats
from twinpool.worker import role_change
from world.wrong_variants import Catalogue

VARIANTS = Catalogue()


@VARIANTS.add
def a_role_is_left_while_blocks_are_in_quarantine(patch: pytest.MonkeyPatch) -> None:
    """A decode worker takes another role while somebody may still write into its pool."""

    def holds_nothing(stats: WorkerStats) -> bool:
        return not (stats.owned_blocks or stats.waiting or stats.running)

    patch.setattr(role_change, "holds_nothing", holds_nothing)


@VARIANTS.add
def a_role_is_left_while_blocks_are_owned(patch: pytest.MonkeyPatch) -> None:
    """A worker takes another role when the coordinator says so, whatever it still has."""
    patch.setattr(role_change, "holds_nothing", lambda _: True)


@VARIANTS.add
def who_leaves_still_gets_work(patch: pytest.MonkeyPatch) -> None:
    """A worker on its way out is chosen like any other."""
    patch.setattr(Worker, "stays", property(lambda _: True))


@VARIANTS.add
def the_last_of_a_pool_may_go(patch: pytest.MonkeyPatch) -> None:
    """A pool may be left empty."""
    patch.setattr(Pools, "_others", lambda _, worker: [worker])


@VARIANTS.add
def an_inherited_cache_is_another_ones(patch: pytest.MonkeyPatch) -> None:
    """What the next role finds are other blocks than those that hold the prefix."""
    honest = BlockPool.inherit

    def inherit(self: BlockPool, past: BlockPool) -> None:
        honest(self, past)
        blocks = list(self._index.values())
        self._index = dict(zip(self._index, blocks[1:] + blocks[:1], strict=True))

    patch.setattr(BlockPool, "inherit", inherit)


@VARIANTS.add
def handing_on_is_charged(patch: pytest.MonkeyPatch) -> None:
    """A request that is handed on has one attempt fewer."""
    patch.setattr(custody, "HANDED_ON", "nothing is")
