"""The model cache publishes whole entries or nothing."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from twinpool.engine.model_cache import cache_dir, cached, entry_path
from twinpool.errors import ModelError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_model(target: Path) -> None:
    (target / "model.safetensors").write_bytes(b"weights")


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").iterdir() if path.suffix != ".lock"]


def test_the_cache_follows_its_variable_then_xdg_then_home(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    assert cache_dir() == cache
    monkeypatch.delenv("TWINPOOL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/twinpool")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/user")
    assert cache_dir() == Path("/home/user/.cache/twinpool")


def test_an_entry_is_built_once() -> None:
    entry = cached("m", 0, write_model)
    assert (entry / "model.safetensors").read_bytes() == b"weights"

    def never(target: Path) -> None:
        raise AssertionError(f"{target} is built again")

    assert cached("m", 0, never) == entry == entry_path("m")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelError("wrong sha256"), ZeroDivisionError()])
def test_what_fails_or_is_interrupted_leaves_nothing(cache: Path, error: BaseException) -> None:
    def build(target: Path) -> None:
        write_model(target)
        raise error

    with pytest.raises(type(error)):
        cached("m", 0, build)
    assert leftovers(cache) == []
    assert cached("m", 0, write_model).is_dir()


def test_what_a_killed_process_left_is_replaced(cache: Path) -> None:
    part = cache / "models" / "m.part"
    part.mkdir(parents=True)
    (part / "half.safetensors").write_bytes(b"half")
    entry = cached("m", 0, write_model)
    assert [file.name for file in entry.iterdir()] == ["model.safetensors"]
    assert leftovers(cache) == ["m"]


def test_two_at_once_build_once() -> None:
    building, finish = threading.Event(), threading.Event()
    built: list[Path] = []
    found: list[Path] = []

    def build(target: Path) -> None:
        building.set()
        finish.wait(10)
        write_model(target)
        built.append(target)

    first = threading.Thread(target=lambda: found.append(cached("m", 0, build)))
    second = threading.Thread(target=lambda: found.append(cached("m", 0, build)))
    first.start()
    assert building.wait(10)
    second.start()
    finish.set()
    first.join()
    second.join()
    assert len(built) == 1
    assert found == [entry_path("m")] * 2


def test_too_little_space_is_said_before_anything_is_fetched(cache: Path) -> None:
    with pytest.raises(
        ModelError, match=r"MB free and this model needs 1,000,000,000,000 MB.*TWINPOOL_CACHE"
    ):
        cached("m", 10**18, write_model)
    assert leftovers(cache) == []


def test_a_disk_that_fills_up_is_named(cache: Path) -> None:
    def build(target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    with pytest.raises(ModelError, match=r"the disk of .* is full"):
        cached("m", 0, build)
    assert leftovers(cache) == []


def test_a_cache_that_cannot_be_written_is_named(cache: Path) -> None:
    cache.write_bytes(b"a file where the directory should be")
    with pytest.raises(ModelError, match=r"cannot be written.*TWINPOOL_CACHE"):
        cached("m", 0, write_model)
