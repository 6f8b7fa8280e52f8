"""Threads that run one compiled function together, each as a *rank* of the team, and meet at barriers inside it.

A barrier is a counter in memory that all spin on, because between two layers' parts there is no time for the operating
system to put a thread to sleep and wake it. Whoever spins for long lets others run. Of one rank nothing is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from twinpool.kernels.compiler import cgutils, intrinsic, ir, types
from twinpool.kernels.jit import compiled

_ARRIVED, _ROUND, _BROKEN = 0, 16, 32
"""Where a gate counts those that wait, the barriers so far, and failures: each in a pair of cache lines of its own."""
_GATE_SIZE = 48
_SPINS_BEFORE_YIELD = 2000

# Numba calls these with its own contexts, which they need not all use.
# ruff: noqa: ARG001


class Team:
    """`size` threads, the caller's among them. Only one call of `run` at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._gate = np.zeros(_GATE_SIZE, np.int64)
        self._others = ThreadPoolExecutor(size - 1, thread_name_prefix="team") if size > 1 else None

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Calls `function(rank, size, gate, *args)` on every rank and returns when all are done.

        What a rank raises is raised here. The others then pass all barriers without waiting, so the call ends, but what
        it computed is void, and so is every later call's. A rank that neither ends nor raises holds the call up like
        any kernel that does not end: the worker's vigil sees to it.
        """
        if self._others is None:
            function(0, 1, self._gate, *args)
            return
        futures: list[Future[None]] = []
        try:
            submit = self._others.submit
            futures.extend(submit(self._take_part, rank, function, args) for rank in range(1, self.size))
            self._take_part(0, function, args)
        except BaseException:
            self._gate[_BROKEN] = 1  # also if a thread could not be started
            raise
        finally:
            wait(futures)
        for future in futures:
            future.result()

    def _take_part(self, rank: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            function(rank, self.size, self._gate, *args)
        except BaseException:
            self._gate[_BROKEN] = 1
            raise


def _add(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [args[1]]), args[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), generate


def _read(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "seq_cst", 8)

    return types.int64(array, types.int64), generate


def _let_others_run(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        insert: Any = cgutils.get_or_insert_function
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(insert(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


_atomic_add: Any = intrinsic(_add)
_atomic_read: Any = intrinsic(_read)
_yield: Any = intrinsic(_let_others_run)


@compiled
def meet(size: Any, gate: Any) -> None:
    """The barrier: returns when all `size` ranks have called it as often, or one of them has failed."""
    if size == 1:
        return
    before = _atomic_read(gate, _ROUND)
    if _atomic_add(gate, _ARRIVED, 1) == size - 1:
        _atomic_add(gate, _ARRIVED, -size)
        _atomic_add(gate, _ROUND, 1)
        return
    spins = 0
    while _atomic_read(gate, _ROUND) == before and _atomic_read(gate, _BROKEN) == 0:
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            _yield()
