"""Compiling the CPU kernels: the decorator, where compiled code is kept, and the few scalar functions they share.

bfloat16 arrays reach the kernels as their bits (`uint16`); all arithmetic is float32.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from twinpool.kernels.amx import USES_AMX
from twinpool.kernels.compiler import (
    HAS_COMPILER,
    intrinsic,
    ir,
    numba,
    overload,
    register_jitable,
    types,
)

Function = TypeVar("Function", bound=Callable[..., Any])


def sources_digest(package: Path) -> str:
    """Of all sources in `package` that compiled code is made of, hexadecimal.

    Numba knows a compiled function by its own file only. But kernels call each other, and a decoder's compiled layers
    hold constants of the modules beside them: with an old one they would read weights from the wrong place.
    """
    paths = [
        path for folder in ("kernels", "engine/models") for path in sorted((package / folder).glob("*.py"))
    ]
    return blake2b(b"".join(path.read_bytes() for path in paths), digest_size=8).hexdigest()


def _can_keep_compiled_code() -> bool:
    """Whether there is a directory for compiled code: NUMBA_CACHE_DIR, or one in the user's cache directory.

    Code with matrix tiles has a directory of its own in there: a process that may not use them must never load it.
    Numba writes each entry to a temporary file and renames it, so processes that compile at once are all right.
    """
    try:
        settings: Any = numba.config
        if not settings.CACHE_DIR:
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            sources = sources_digest(Path(__file__).parent.parent)
            settings.CACHE_DIR = str(Path(base) / "twinpool" / "numba" / sources)
        if USES_AMX:
            settings.CACHE_DIR = str(Path(settings.CACHE_DIR) / "amx")
        Path(settings.CACHE_DIR).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=settings.CACHE_DIR):
            return True
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return False


KEEPS_COMPILED_CODE = HAS_COMPILER and _can_keep_compiled_code()
"""False on a read-only home: the kernels are then compiled again by every process that runs them."""


def compiled(function: Function) -> Function:
    """Compiles `function` at its first call. It runs without the interpreter lock and may reorder float sums."""
    if not HAS_COMPILER:
        return function
    jit = numba.njit(nogil=True, fastmath=True, error_model="numpy", cache=KEEPS_COMPILED_CODE)
    return cast(Function, jit(function))


def runs_compiled(tensor: torch.Tensor) -> bool:
    """Whether the CPU kernels can work on `tensor`: float32 or bfloat16 in main memory, and there is a compiler."""
    return HAS_COMPILER and tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.bfloat16)


def flat(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The memory from the tensor's first to its last element as a flat array; bfloat16 as bits. Nothing is copied.

    Kernels take such arrays and strides in elements, so that each is compiled once per element type.
    """
    if not tensor.is_contiguous():
        span = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        tensor = tensor.as_strided((span if tensor.numel() else 0,), (1,))
    bits = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    return bits.numpy().reshape(-1)


# Numba calls these with its own contexts, which they need not all use.
# ruff: noqa: ARG001


def _float_of_bits(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(bits), generate


def _bits_of_float(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


float_of_bits: Any = intrinsic(_float_of_bits)
"""Reads the 32 bits of an int32 or uint32 as a float32."""
bits_of_float: Any = intrinsic(_bits_of_float)
"""Reads a float32 as the 32 bits of a uint32."""


def load(array: Any, index: Any) -> Any:
    """`array[index]` as float32; inside kernels only. `array` holds float32, or bfloat16 bits."""
    raise NotImplementedError("only compiled code calls this")


@overload(load, inline="always")
def _load(array: Any, index: Any) -> Any:
    if array.dtype == types.uint16:

        def load_bits(array: Any, index: Any) -> Any:
            return float_of_bits(np.uint32(np.uint32(array[index]) << np.uint32(16)))

        return load_bits

    def load_float(array: Any, index: Any) -> Any:
        return array[index]

    return load_float


def store(array: Any, index: Any, value: Any) -> None:
    """`array[index] = value`, rounded to nearest even if `array` holds bfloat16 bits; inside kernels only."""
    raise NotImplementedError("only compiled code calls this")


@overload(store, inline="always")
def _store(array: Any, index: Any, value: Any) -> Any:
    if array.dtype == types.uint16:

        def store_bits(array: Any, index: Any, value: Any) -> Any:
            bits = bits_of_float(np.float32(value))
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            array[index] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

        return store_bits

    def store_float(array: Any, index: Any, value: Any) -> Any:
        array[index] = value

    return store_float


@register_jitable
def exp(x: Any) -> Any:
    """e to the float32 `x` within 2 units in the last place, in a form that vectorises. Below -87 it is 0.

    x = k·ln 2 + r with |r| ≤ ln 2 / 2; e^r by its Taylor polynomial of degree 7, 2^k by writing the exponent's bits.
    """
    k = np.float32(np.rint(x * np.float32(1.44269504)))
    r = x - k * np.float32(0.693359375) + k * np.float32(2.12194440e-4)
    p = np.float32(1.98412698e-4)
    p = p * r + np.float32(1.38888889e-3)
    p = p * r + np.float32(8.33333333e-3)
    p = p * r + np.float32(4.16666667e-2)
    p = p * r + np.float32(1.66666667e-1)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    k = min(max(k, np.float32(-127.0)), np.float32(127.0))
    power = float_of_bits(np.int32((np.int32(k) + np.int32(127)) << np.int32(23)))
    return p * power if x > np.float32(-87.0) else np.float32(0.0)


@register_jitable
def log(x: Any) -> Any:
    """Natural logarithm of the positive, normal float32 `x` within 2 units in the last place; it vectorises.

    x = m·2^k with m in [√½, √2); with s = (m - 1)/(m + 1), ln m = 2s·(1 + s²/3 + s⁴/5 + s⁶/7 + s⁸/9).
    """
    bits = np.int32(bits_of_float(x))
    # 0x3F3504F3 are the bits of √½: the difference carries into the exponent exactly when m would reach √2.
    k = np.int32(np.int32(bits - np.int32(0x3F3504F3)) >> np.int32(23))
    m = float_of_bits(np.int32(bits - np.int32(k << np.int32(23))))
    s = (m - np.float32(1.0)) / (m + np.float32(1.0))
    square = s * s
    series = np.float32(1.0 / 7.0) + square * np.float32(1.0 / 9.0)
    series = np.float32(1.0 / 3.0) + square * (np.float32(0.2) + square * series)
    return np.float32(k) * np.float32(0.6931472) + (s + s) + (s + s) * square * series
