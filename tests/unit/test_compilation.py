"""That kernels are being compiled is noticed once, and only if they are."""

from __future__ import annotations

from twinpool.engine.compilation import noticing_compilation
from twinpool.kernels.compiler import numba


def test_compiling_is_noticed_once_and_running_what_is_compiled_is_not() -> None:
    noticed: list[str] = []
    one = numba.njit(lambda x: x + 1)
    other = numba.njit(lambda x: x + 2)
    with noticing_compilation(lambda: noticed.append("first")):
        assert one(1) + other(1) == 5
    with noticing_compilation(lambda: noticed.append("again")):
        assert one(1) + other(1) == 5
    other(1.0)
    assert noticed == ["first"]
