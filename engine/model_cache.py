"""The user's cache of converted models: built once, published whole.

An entry is a directory that appears by one rename, after everything in it is written. Whatever is being built
lies beside it under the same name with ``.part``; a lock file lets one process build while others wait, and
whatever a dead process left there is removed by the next one that builds.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from twinpool.errors import ModelError

CACHE_VARIABLE = "TWINPOOL_CACHE"


def cache_dir() -> Path:
    """``$TWINPOOL_CACHE``, else ``$XDG_CACHE_HOME/twinpool``, else ``~/.cache/twinpool``."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "twinpool"


def entry_path(key: str) -> Path:
    """Where the entry `key` is, or would be. It is complete if it exists."""
    return cache_dir() / "models" / key


def cached(key: str, needs_bytes: int, build: Callable[[Path], None]) -> Path:
    """The directory of the entry `key`; `build(directory)` fills it if there is none yet.

    `build` gets an empty directory and may leave nothing but the entry's files in it. If it raises, or the
    process is interrupted, nothing of it remains. `needs_bytes` is the disk space that building takes at its
    height.

    Raises:
        ModelError: the disk has less than `needs_bytes` free or fills up, or the cache cannot be written.
    """
    entry = entry_path(key)
    if entry.is_dir():
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock"):
            if not entry.is_dir():
                _build(entry, needs_bytes, build)
    except OSError as exc:
        raise _explained(exc, entry.parent) from exc
    return entry


def _build(entry: Path, needs_bytes: int, build: Callable[[Path], None]) -> None:
    part = entry.with_name(f"{entry.name}.part")
    if part.exists():
        shutil.rmtree(part)
    free_bytes = shutil.disk_usage(entry.parent).free
    if free_bytes < needs_bytes:
        raise ModelError(
            f"{entry.parent} has {free_bytes / 1e6:,.0f} MB free and this model needs "
            f"{needs_bytes / 1e6:,.0f} MB; free some, or set {CACHE_VARIABLE} to a directory on another disk"
        )
    part.mkdir()
    try:
        build(part)
        part.rename(entry)
    finally:
        if part.exists():
            shutil.rmtree(part)


def _explained(exc: OSError, directory: Path) -> ModelError:
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelError(
            f"the disk of {directory} is full; free some space, or set {CACHE_VARIABLE} to a directory on "
            "another disk"
        )
    return ModelError(
        f"the model cache {directory} cannot be written ({exc}); set {CACHE_VARIABLE} to a directory that can"
    )
