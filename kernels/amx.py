"""Matrix tiles of x86 processors (AMX): whether this process may use them, and their instructions for emitters.

A *tile* is a register of up to 16 rows of 64 bytes, of which a thread has eight. One instruction adds to a tile of
float32 [rows, 16 columns] the product of a tile of bfloat16 [rows, 32] and one of 16 rows of 16 words, each a pair of
neighbours in a column: the order in which `linear` packs weights. It adds pair after pair in order, each row by itself,
so a row's sums do not depend on the other rows, nor on how many there are. Denormal inputs and results count as zero.

Linux lets a process use tiles once it has asked: their state is 8 KiB, more than old programs leave room for. If it
refuses (an old kernel, a filter of system calls), if the processor has no tiles or TWINPOOL_AMX is 0, kernels are
compiled without them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from twinpool.kernels.compiler import HAS_COMPILER, cgutils, ir, numba

VARIABLE = "TWINPOOL_AMX"
ROWS = 16
"""Of a tile, at most."""
ROW_BYTES = 64
_FEATURES = {"+amx-tile", "+amx-bf16"}
_ARCH_PRCTL = 158
"""The system call's number on x86-64, the only machines whose target features have tiles."""
_REQUEST_STATE = 0x1023
_TILE_STATE = 18
_CONFIG_BYTES = 64
_PALETTE, _ROW_BYTES_AT, _NUM_ROWS_AT = 1, 16, 48


def uses_tiles(features: str, setting: str | None, ask: Callable[[], bool]) -> bool:
    """Whether kernels are to be compiled with tiles: for target `features`, as LLVM writes them, with the variable's
    `setting`. `ask` asks the system; it is called only if all else says yes."""
    return setting != "0" and set(features.split(",")) >= _FEATURES and ask()


def _ask_system() -> bool:
    """Asks for all threads of the process, those to come included, and its forks."""
    if sys.platform != "linux":
        return False
    return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_STATE)) == 0


def _target_features() -> str:
    """What kernels are compiled for: this processor, unless NUMBA_CPU_FEATURES says otherwise."""
    context: Any = numba.core.registry.cpu_target.target_context
    return str(context.codegen().magic_tuple()[2])


USES_AMX = HAS_COMPILER and uses_tiles(_target_features(), os.environ.get(VARIABLE), _ask_system)
"""Whether this process may run tile instructions, decided once. Where it is false nobody may emit them: code generation
would fail. `jit` keeps code that was compiled with them apart."""


class Tiles:
    """Writes tile instructions where `builder` stands. Tiles are Python numbers, 0 to 7; addresses are byte pointers.

    LLVM moves no access to memory across them. Their contents last until `configure` or `release`, in one thread.
    """

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def configure(self, shapes: Sequence[tuple[Any, int]]) -> None:
        """Gives tile i shapes[i] = (rows, bytes of a row) and makes all zero; rows are numbers, or int64 values."""
        byte, builder = ir.IntType(8), self._builder
        config = [0] * _CONFIG_BYTES
        config[0] = _PALETTE
        for tile, (rows, row_bytes) in enumerate(shapes):
            config[_ROW_BYTES_AT + 2 * tile] = row_bytes
            config[_NUM_ROWS_AT + tile] = rows if isinstance(rows, int) else 0
        kind = ir.ArrayType(byte, _CONFIG_BYTES)
        on_stack: Any = cgutils.alloca_once
        room = on_stack(builder, kind)
        builder.store(ir.Constant(kind, config), room)
        start = builder.bitcast(room, byte.as_pointer())
        for tile, (rows, _) in enumerate(shapes):
            if not isinstance(rows, int):
                at = builder.gep(start, [ir.IntType(32)(_NUM_ROWS_AT + tile)])
                builder.store(builder.trunc(rows, byte), at)
        self._call("ldtilecfg", start)

    def release(self) -> None:
        """Leaves the tiles without contents: until then each switch of threads saves and restores them."""
        self._call("tilerelease")

    def zero(self, tile: int) -> None:
        """Zeros."""
        self._call("tilezero", self._number(tile))

    def load(self, tile: int, address: Any, stride: Any) -> None:
        """Reads rows that lie `stride` bytes (int64) apart, as many and as long as the tile was configured for."""
        self._call("tileloadd64", self._number(tile), address, stride)

    def store(self, tile: int, address: Any, stride: Any) -> None:
        """Writes rows, `stride` bytes apart."""
        self._call("tilestored64", self._number(tile), address, stride)

    def add_products(self, total: int, left: int, right: int) -> None:
        """total [rows, 16] float32 += left [rows, 32] · right, of bfloat16; `right` has pairs of rows as words."""
        self._call("tdpbf16ps", *(self._number(tile) for tile in (total, left, right)))

    def _number(self, tile: int) -> Any:
        return ir.IntType(8)(tile)

    def _call(self, name: str, *args: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
        insert: Any = cgutils.get_or_insert_function
        self._builder.call(insert(self._builder.module, kind, f"llvm.x86.{name}"), args)
