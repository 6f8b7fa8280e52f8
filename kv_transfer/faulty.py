"""`faulty`: seeded faults around any other sender, for tests and for `--faults`.

A specification reads ``delay=0.01,late=0.01,corrupt=0.1,drop=0.01,stall=0.01,death=0.001,seed=3``: `delay` is in
seconds before every `finish`, `late` in seconds for which each push is held back, one after the other (`late.py`); the
others are probabilities, drawn once per push, that the push

- `corrupt`: arrives with one byte flipped (in a copy: the source pool is never touched),
- `drop`: is left out silently,
- `stall`: makes the fence's `finish` wait until it is stopped; after `STALL_S` the link is lost, as a real one
  is on which nothing moves,
- `death`: ends the link: this push and everything after it raises PeerLost.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from math import isfinite
from random import Random

from twinpool.errors import ConfigError, PeerLost
from twinpool.kv_transfer import pushes
from twinpool.kv_transfer.connector import BlockRange, KVRegion, KVSender, PushReport
from twinpool.kv_transfer.late import LateSender
from twinpool.kv_transfer.probe import FIRST_PROBE_FENCE

NUM_SCRATCH_BLOCKS = 16
_NO_PROBABILITIES = ("seed", "delay", "late")

Connect = Callable[[KVRegion], Awaitable[KVSender]]


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Which faults, how often. See the module's docstring."""

    delay: float = 0.0
    late: float = 0.0
    corrupt: float = 0.0
    drop: float = 0.0
    stall: float = 0.0
    death: float = 0.0
    seed: int = 0

    @classmethod
    def parse(cls, spec: str) -> FaultPlan:
        """Reads a specification.

        Raises:
            ConfigError: an unknown fault, no number, or a probability outside 0 to 1; the message names it.
        """
        known = [field.name for field in fields(cls)]
        values: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in spec.split(","))):
            name, _, text = part.partition("=")
            if name not in known:
                raise ConfigError(f"--faults {spec!r} names {name!r}; allowed: {', '.join(known)}")
            try:
                value = int(text) if name == "seed" else float(text)
            except ValueError as exc:
                raise ConfigError(f"--faults {spec!r}: {part!r} needs a number, like {name}=0") from exc
            if not isfinite(value) or value < 0 or (value > 1 and name not in _NO_PROBABILITIES):
                raise ConfigError(
                    f"--faults {spec!r}: {part!r} is out of range; allowed: 0 to 1 (delay, late: 0 or more s)"
                )
            values[name] = value
        return cls(**values)  # type: ignore[arg-type]  # seed is an int, see above


class FaultySender:
    """Another sender, broken on purpose. Open it with `open`.

    Corrupted pushes go through a second link over a few scratch blocks; when those are in use, a push
    that should be corrupted is dropped instead. `num_faults` counts what was done, by name.
    """

    def __init__(
        self, plan: FaultPlan, inner: KVSender, liar: KVSender, region: KVRegion, scratch: KVRegion
    ) -> None:
        self.name = inner.name
        self.layer_group = inner.layer_group
        self.num_faults: defaultdict[str, int] = defaultdict(int)
        self._plan = plan
        self._random = Random(plan.seed)
        self._inner = inner
        self._liar = liar
        self._region = region
        self._scratch = scratch
        self._free = list(range(scratch.num_blocks))
        self._lent: defaultdict[int, list[int]] = defaultdict(list)
        self._stalled: dict[int, asyncio.Event] = {}
        self._lost: str | None = None

    @classmethod
    async def open(cls, plan: FaultPlan, region: KVRegion, connect: Connect) -> FaultySender:
        """Opens both links with `connect`."""
        layout = region.layout
        memory = memoryview(bytearray(layout.block_bytes * NUM_SCRATCH_BLOCKS))
        scratch = KVRegion(memory, layout, NUM_SCRATCH_BLOCKS)
        inner = await connect(region)
        try:
            liar = await connect(scratch)
        except BaseException:  # cancelled, too: nobody else would close it
            await inner.close()
            raise
        if plan.late:
            inner = LateSender(inner, plan.late)
        return cls(plan, inner, liar, region, scratch)

    @property
    def lost(self) -> str | None:
        """Set by an injected death, or when the true link is lost."""
        return self._lost or self._inner.lost

    def push(self, fence: int, blocks: BlockRange) -> None:
        """Pushes, or does what the dice say; a probe's bytes as they are. Raises PeerLost."""
        self._require_life()
        if fence >= FIRST_PROBE_FENCE:  # else there would be no link to break
            self._inner.push(fence, blocks)
            return
        if self._strikes("death", self._plan.death):
            self._lost = "the link died (injected fault)"
            self._require_life()
        if self._strikes("stall", self._plan.stall):
            self._stalled.setdefault(fence, asyncio.Event())
        if self._strikes("drop", self._plan.drop):
            return
        if blocks.source_blocks and self._strikes("corrupt", self._plan.corrupt):
            self._push_corrupted(fence, blocks)
        else:
            self._inner.push(fence, blocks)

    async def finish(self, fence: int) -> PushReport:
        """Finishes both links, perhaps late. Raises PeerLost."""
        if self._lost is not None:
            await self.stop(fence)
        self._require_life()
        if fence >= FIRST_PROBE_FENCE:
            return await self._inner.finish(fence)
        await asyncio.sleep(self._plan.delay)
        if (stalled := self._stalled.get(fence)) is not None:
            try:
                async with asyncio.timeout(pushes.STALL_S):
                    await stalled.wait()
            except TimeoutError:
                self._lost = f"the link stalled for {pushes.STALL_S:g} s (injected fault)"
                await self.stop(fence)
                self._require_life()
            raise PeerLost("the stalled link was stopped or closed (injected fault)")
        true = await self._inner.finish(fence)
        false = await self._liar.finish(fence)
        self._reclaim(fence)
        return PushReport(true.num_bytes + false.num_bytes, true.seconds + false.seconds)

    async def stop(self, fence: int) -> None:
        """Stops both links."""
        await self._inner.stop(fence)
        await self._liar.stop(fence)
        self._reclaim(fence)
        if (stalled := self._stalled.pop(fence, None)) is not None:
            stalled.set()

    async def close(self) -> None:
        """Closes both links; stalled ones raise PeerLost."""
        self._lost = self._lost or "the link was closed"
        for stalled in self._stalled.values():
            stalled.set()
        await self._inner.close()
        await self._liar.close()

    def _strikes(self, fault: str, probability: float) -> bool:
        strikes = self._random.random() < probability
        self.num_faults[fault] += strikes
        return strikes

    def _require_life(self) -> None:
        if self._lost is not None:
            raise PeerLost(self._lost)

    def _push_corrupted(self, fence: int, blocks: BlockRange) -> None:
        """Pushes the first block through a scratch block with a flipped byte, and the others as they are."""
        if self._free:
            block = self._free.pop()
            self._lent[fence].append(block)
            layout, layers = self._region.layout, (blocks.first_layer, blocks.last_layer)
            start, length = layout.layer_range(blocks.source_blocks[0], *layers)
            offset, _ = layout.layer_range(block, *layers)
            self._scratch.memory[offset : offset + length] = self._region.memory[start : start + length]
            self._scratch.memory[offset + self._random.randrange(length)] ^= 0xFF
            self._liar.push(
                fence, BlockRange((block,), blocks.target_blocks[:1], blocks.first_layer, blocks.last_layer)
            )
        rest = BlockRange(
            blocks.source_blocks[1:], blocks.target_blocks[1:], blocks.first_layer, blocks.last_layer
        )
        if rest.source_blocks:
            self._inner.push(fence, rest)

    def _reclaim(self, fence: int) -> None:
        self._free.extend(self._lent.pop(fence, ()))
