"""numba and llvmlite, which compile the CPU kernels. No other module imports them.

A machine that only runs the engine on a GPU may have neither. There `HAS_COMPILER` is false, the decorators give back
what they are given, and nobody calls it: `runs_compiled` sends tensors in main memory through the plain references.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

HAS_COMPILER = find_spec("numba") is not None and find_spec("llvmlite") is not None

if HAS_COMPILER or TYPE_CHECKING:
    import numba
    from llvmlite import ir  # type: ignore[import-untyped]
    from numba.core import cgutils, types
    from numba.extending import intrinsic, overload, register_jitable
else:
    numba = ir = cgutils = types = None

    def intrinsic(function: Any) -> Any:
        """`function` itself."""
        return function

    register_jitable = intrinsic

    def overload(_function: Any, **_options: Any) -> Callable[[Any], Any]:
        """A decorator that gives back what it decorates."""
        return intrinsic


__all__ = ["HAS_COMPILER", "cgutils", "intrinsic", "ir", "numba", "overload", "register_jitable", "types"]
