"""How KV lies in memory: sizes, offsets and the fingerprint that two workers must share.

Block-major, heads before slots::

    kv[block, layer, k|v, kv_head, slot, head_dim]

A block is one contiguous range; so is one layer of a block, a run of consecutive layers of a block, and a run of
heads of one (block, layer, k|v). In int8 a scale per slot lies behind the vectors of each head, within those ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from twinpool.bounds import Count, Dimension

LAYOUT_VERSION = 1


class Dtype(StrEnum):
    """Element types of weights and KV, as torch names them; those of 8 bits are KV's alone."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    INT8 = "int8"

    @property
    def num_bytes(self) -> int:
        """Bytes per element."""
        return _NUM_BYTES[self]

    @property
    def scale_bytes(self) -> int:
        """Bytes that each key and value vector takes beside its elements."""
        return 4 if self is Dtype.INT8 else 0


_NUM_BYTES = {
    Dtype.FLOAT32: 4,
    Dtype.BFLOAT16: 2,
    Dtype.FLOAT16: 2,
    Dtype.FLOAT8_E4M3FN: 1,
    Dtype.INT8: 1,
}
COMPUTE_DTYPES = (Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16)
"""What models compute in."""
KV_CACHE_DTYPES = {"fp8": Dtype.FLOAT8_E4M3FN, "int8": Dtype.INT8}
"""What `--kv-cache-dtype` calls the types of KV that are not the model's."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one worker's KV blocks.

    `num_kv_heads` counts key/value heads (never query heads); `head_dim` and `block_size` count elements and
    token slots.
    """

    num_layers: Dimension
    num_kv_heads: Dimension
    head_dim: Dimension
    block_size: Dimension
    dtype: Dtype
    version: Count = LAYOUT_VERSION

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block (K and V)."""
        return 2 * self.num_kv_heads * self.head_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one (block, layer, k|v): `block_size` vectors, then their scales."""
        return self.block_size * (self.head_dim * self.dtype.num_bytes + self.dtype.scale_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """KV bytes per token = 2 × layers × kv_heads × (head_dim × bytes per element + bytes of its scale)."""
        return self.block_bytes // self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy, the last one perhaps partly."""
        return -(-num_tokens // self.block_size)

    def layer_range(self, block_id: int, first_layer: int, last_layer: int) -> tuple[int, int]:
        """Byte offset and length, inside the pool, of layers [first_layer, last_layer) of one block."""
        start = block_id * self.block_bytes + first_layer * self.layer_bytes
        return start, (last_layer - first_layer) * self.layer_bytes
