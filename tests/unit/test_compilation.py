"""That kernels are being compiled is noticed once, and only if they are; processes that start together do it once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from twinpool.engine import compilation
from twinpool.engine.compilation import compiling_once, noticing_compilation
from twinpool.kernels.compiler import numba

LIMIT_S = 10.0


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is compiled yet."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compilation, "LOADING_S", 0.0)


def nobody_waits() -> None:
    raise AssertionError("nobody else compiles this")


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


@pytest.mark.usefixtures("cold")
def test_who_comes_while_another_compiles_waits_for_it() -> None:
    done: list[str] = []
    is_waiting = threading.Event()

    def second() -> None:
        with compiling_once("kernels", is_waiting.set):
            done.append("second")

    other = threading.Thread(target=second)
    with compiling_once("kernels", nobody_waits):
        other.start()
        assert is_waiting.wait(LIMIT_S)
        done.append("first")
    other.join(LIMIT_S)
    assert done == ["first", "second"]


@pytest.mark.usefixtures("cold")
def test_nobody_waits_for_what_is_compiled_or_for_something_else() -> None:
    with compiling_once("kernels", nobody_waits), compiling_once("others", nobody_waits):
        pass
    with compiling_once("kernels", nobody_waits), compiling_once("kernels", nobody_waits):
        pass


@pytest.mark.usefixtures("cold")
def test_what_failed_to_compile_is_compiled_by_the_next() -> None:
    with pytest.raises(RuntimeError), compiling_once("kernels", nobody_waits):
        raise RuntimeError("the compiler failed")
    is_waiting = threading.Event()

    def third() -> None:
        with compiling_once("kernels", is_waiting.set):
            pass

    other = threading.Thread(target=third)
    with compiling_once("kernels", nobody_waits):
        other.start()
        assert is_waiting.wait(LIMIT_S)
    other.join(LIMIT_S)


@pytest.mark.usefixtures("cold")
def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "COMPILING_S", 0.0)
    told: list[str] = []
    with compiling_once("kernels", nobody_waits), compiling_once("kernels", lambda: told.append("waits")):
        pass
    assert told == ["waits"]
