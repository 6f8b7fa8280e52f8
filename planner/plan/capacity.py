"""How much KV a worker holds beside its weights, and how many sequences that is. Arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.config import require
from twinpool.errors import ConfigError
from twinpool.layout import KVLayout
from twinpool.planner.times.devices import GIB

USABLE_SHARE = 0.9
"""Of a device's memory; the rest is for activations, graphs and the process, as other servers leave it too."""
_MOST_DEVICES = 1024


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One accelerator's memory: `usable_share` of it less `reserve_bytes` may hold weights and KV."""

    num_bytes: int
    usable_share: float = USABLE_SHARE
    reserve_bytes: int = 0

    def __post_init__(self) -> None:
        require("the device's memory", self.num_bytes, self.num_bytes > 0, "above 0 bytes")
        require("--memory-share", self.usable_share, 0 < self.usable_share <= 1, "above 0, at most 1")
        require("--reserve", self.reserve_bytes, self.reserve_bytes >= 0, "0 bytes or more")

    @property
    def usable_bytes(self) -> int:
        """What weights and KV may take together."""
        return max(0, int(self.num_bytes * self.usable_share) - self.reserve_bytes)


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """What one worker of `tp` devices holds. Bytes are of one device, each of which has a part of every
    block; `num_blocks` and sequences are the worker's."""

    layout: KVLayout
    tp: int
    usable_bytes: int
    weight_bytes: int
    kv_bytes: int
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        """Token slots of the pool."""
        return self.num_blocks * self.layout.block_size

    def num_sequences(self, num_tokens: int) -> int:
        """Sequences of so many tokens that fit at once; each takes whole blocks."""
        return self.num_blocks // self.layout.num_blocks(num_tokens)

    def __str__(self) -> str:
        return (
            f"{self.usable_bytes / GIB:.1f} GiB usable − {self.weight_bytes / GIB:.1f} GiB of weights = "
            f"{self.kv_bytes / GIB:.1f} GiB of KV on each device: {self.num_blocks:,} blocks"
        )


def device_block_bytes(layout: KVLayout, tp: int) -> int:
    """Bytes of a block on each of the devices that share its heads; of more devices than KV heads, each has one."""
    heads = -(-layout.num_kv_heads // tp)
    return layout.block_bytes // layout.num_kv_heads * heads


def kv_capacity(
    layout: KVLayout, weight_bytes: int, tp: int, memory: DeviceMemory, longest: int
) -> KvCapacity:
    """The pool of a worker whose devices each hold an equal part of `weight_bytes`.

    Raises:
        ConfigError: the weights, or one sequence of `longest` tokens beside them, do not fit; it says on how many
            devices they would.
    """
    found = _capacity(layout, weight_bytes, tp, memory)
    if found.num_sequences(longest) < 1:
        sequence_bytes = layout.num_blocks(longest) * layout.block_bytes
        fewest = fewest_devices(layout, weight_bytes, memory, longest)
        remedy = (
            "no number of such devices holds them; choose another device or a smaller model"
            if fewest is None
            else f"they fit on {fewest}: TP{fewest} in a layout, --tp {fewest} of `twinpool plan`"
        )
        if found.kv_bytes > 0:
            remedy += "; or say a lower --max-model-len"
        raise ConfigError(
            f"{weight_bytes / GIB:.1f} GiB of weights and {sequence_bytes / GIB:.2f} GiB of KV for one sequence of "
            f"{longest:,} tokens do not fit on {_devices(tp)} with {memory.usable_bytes / GIB:.1f} GiB "
            f"usable each; {remedy}"
        )
    return found


def fewest_devices(layout: KVLayout, weight_bytes: int, memory: DeviceMemory, longest: int) -> int | None:
    """The smallest power of two of devices that hold the weights and one sequence of `longest` tokens, if any does."""
    degree = 1
    while degree <= _MOST_DEVICES:
        if _capacity(layout, weight_bytes, degree, memory).num_sequences(longest) >= 1:
            return degree
        degree *= 2
    return None


def _capacity(layout: KVLayout, weight_bytes: int, tp: int, memory: DeviceMemory) -> KvCapacity:
    require("TP", tp, tp >= 1, "1 or more devices")
    own = -(-weight_bytes // tp)
    left = max(0, memory.usable_bytes - own)
    return KvCapacity(
        layout=layout,
        tp=tp,
        usable_bytes=memory.usable_bytes,
        weight_bytes=own,
        kv_bytes=left,
        num_blocks=left // device_block_bytes(layout, tp),
    )


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"
