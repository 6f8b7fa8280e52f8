"""Looks into a worker's core, behind its public face: what it has taken on, and whether that is what it promises."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from twinpool.colocated_pool.core import ColocatedCore
from twinpool.colocated_pool.hybrid import HybridCore
from twinpool.config import SchedulerConfig
from twinpool.decode_pool.core import DecodeCore
from twinpool.messages import Granted
from twinpool.prefill_pool.core import PrefillCore
from twinpool.prefill_pool.handoff import HandoffState
from twinpool.request import Job, RequestKey
from twinpool.worker.core import StepPlan
from world.story import Broken

Part = PrefillCore | DecodeCore | ColocatedCore
Core = Part | HybridCore


class Auditor:
    """Of the worker process `name`. Every check raises Broken, with the promise that was not kept."""

    def __init__(self, name: str, core: Core, config: SchedulerConfig, block_size: int) -> None:
        self._name = name
        self._core = core
        self._config = config
        self._block_size = block_size
        self._parts: tuple[Part, ...] = (core.role, core.guest) if isinstance(core, HybridCore) else (core,)
        """The core, or the two that a hybrid has: its role's first."""

    def running(self) -> list[RequestKey]:
        """The sequences that generate here, oldest first."""
        keys: list[RequestKey] = []
        for part in self._parts:
            match part:
                case DecodeCore():
                    keys += [sequence.key for sequence in part._scheduler]
                case ColocatedCore():
                    keys += [sequence.key for sequence in part._decode]
        return keys

    def works_on(self, request_id: str) -> bool:
        """Whether something is computed, awaited or kept for that request here.

        What prefill has sealed, or has given up and waits to be rid of, does not count.
        """
        keys = self.running()
        for part in self._parts:
            match part:
                case PrefillCore():
                    jobs = part._outbox
                    keys += [j.key for j in jobs if not j.ending and j.state is not HandoffState.SEALED]
                case DecodeCore():
                    keys += [arrival.key for arrival in (*part._intake.waiting, *part._intake.granted)]
                case ColocatedCore():
                    keys += [prompt.job.key for prompt in part._prefill]
        return any(key.request_id == request_id for key in keys)

    def is_lent(self, fence: int, block_id: int) -> bool:
        """Whether the ledger still keeps `block_id` for the writer of `fence`, in quarantine or not (I2)."""
        held = self._decode_core._ledger.reservation(fence)
        return held is not None and block_id in held.block_ids

    def check_slots(self) -> None:
        """Sequences, grants and prompts computed here have no more places in the batch than there are."""
        taken, most = self._slots_taken(), self._config.max_num_seqs
        if taken > most:
            raise Broken("slots are counted", f"{self._name} gave away {taken} slots of {most}")

    def check_oldest(self, before: list[RequestKey]) -> None:
        """Of those that ran `before` a step was planned, the oldest runs still."""
        if before and before[0] not in self.running():
            raise Broken("the oldest goes on", f"{self._name} preempts {before[0]}, the oldest of {before}")

    def check_pins(self, pinned: Mapping[int, int]) -> None:
        """What a transport has yet to read is still somebody's. `pinned` are the reads to come, by block."""
        for block, num_reads in pinned.items():
            if num_reads and not self._core.pool._readers[block]:
                raise Broken(
                    "a push pins its blocks", f"{self._name} has let go of block {block}, yet to be read"
                )

    def check_grant(self, grant: Granted) -> None:
        """What is granted has the blocks that it is to have (I5)."""
        arrival = self._decode_core._intake._granted.get(grant.key)
        if arrival is not None and arrival.table is not None:
            self._check_blocks(grant.key, len(arrival.table), self._blocks_wanted(arrival.job))

    def check_headroom(self, plan: StepPlan) -> None:
        """So have prompts that stay where they are computed (I5)."""
        if not isinstance(self._parts[-1], ColocatedCore):
            return
        jobs = {prompt.job.key: prompt.job for prompt in self._parts[-1]._prefill}
        for chunk in plan.batch.slices:
            if chunk.key in jobs:
                self._check_blocks(chunk.key, len(chunk.block_table), self._blocks_wanted(jobs[chunk.key]))

    def _check_blocks(self, key: RequestKey, num_blocks: int, wanted: int) -> None:
        if num_blocks < wanted:
            raise Broken(
                "I5", f"{self._name} takes {key} with {num_blocks} blocks, {wanted} are its prompt and growth"
            )

    def _blocks_wanted(self, job: Job) -> int:
        """The blocks that the job must have before decode may admit it (I5)."""
        num_growth = min(self._config.headroom_tokens, max(0, job.sampling.max_tokens - job.num_emitted - 1))
        return ceil((len(job.token_ids) + num_growth) / self._block_size)

    def _slots_taken(self) -> int:
        taken = 0
        for part in self._parts:
            match part:
                case DecodeCore():
                    taken += part.num_sequences + part._intake.num_granted
                case ColocatedCore():
                    taken += part.num_slots
        return taken

    @property
    def _decode_core(self) -> DecodeCore:
        assert isinstance(self._parts[0], DecodeCore)
        return self._parts[0]
