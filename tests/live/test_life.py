"""A process that is frozen lives, one that was killed does not: told apart for certain, by the lock that it holds."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from twinpool.errors import ConfigError, TransportUnavailable
from twinpool.kv_transfer.connector import LocalEnd
from twinpool.kv_transfer.life import Life, Witness
from twinpool.kv_transfer.owned_file import DIRECTORY
from twinpool.kv_transfer.shm_pool import SharedPool

DEADLINE_S = 20.0
_HOLDER = """
import sys
from twinpool.kv_transfer.connector import LocalEnd
from twinpool.kv_transfer.life import Life
life = Life(LocalEnd("prefill-9", "a9", sys.argv[1]))
print(life.name, flush=True)
sys.stdin.read()
"""


@contextmanager
def holder() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that holds its life's lock, and the name of that."""
    path = os.pathsep.join(part for part in sys.path if part)
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, f"test{os.getpid()}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        process.stdin.close()
        process.stdout.close()


def test_a_frozen_process_lives_and_a_killed_one_does_not() -> None:
    with holder() as (process, name):
        witness = Witness(name)
        assert not witness.is_over
        process.send_signal(signal.SIGSTOP)
        assert os.waitpid(process.pid, os.WUNTRACED)[0] == process.pid
        assert not witness.is_over
        process.kill()
        process.wait(DEADLINE_S)
        assert witness.is_over
        witness.close()
        os.unlink(f"/dev/shm/{name}")


def test_a_life_that_is_closed_is_over_and_leaves_no_file() -> None:
    life = Life(LocalEnd("prefill-8", "a8", f"test{os.getpid()}"))
    witness = Witness(life.name)
    assert not witness.is_over
    life.close()
    assert witness.is_over
    witness.close()
    assert not os.path.exists(f"/dev/shm/{life.name}")


@pytest.mark.parametrize(
    ("call", "error", "advice"),
    [
        (
            "open",
            PermissionError(errno.EACCES, "Permission denied"),
            "allow this user to make files in /dev/shm",
        ),
        ("open", OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        ("posix_fallocate", OSError(errno.ENOSPC, "No space left on device"), "--shm-size"),
        ("link", OSError(errno.ENOSPC, "No space left on device"), "--shm-size"),
    ],
)
def test_a_file_that_cannot_be_made_says_what_to_do_and_leaves_nothing_open(
    call: str, error: OSError, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    gc.collect()  # what earlier tests left behind is not closed in the middle of this one
    num_open = len(os.listdir("/proc/self/fd"))
    end = LocalEnd("prefill-8", "a8", f"test{os.getpid()}")
    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        with pytest.raises(ConfigError, match=rf"/dev/shm/twinpool.*{error.strerror}; .*{advice}"):
            SharedPool(4096, end)
        if call != "posix_fallocate":
            with pytest.raises(ConfigError, match=rf"/dev/shm/twinpool.*{error.strerror}; .*{advice}"):
                Life(end)
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert not list(DIRECTORY.glob(f"twinpool.{end.deployment}.prefill-8.*"))


@pytest.mark.parametrize("name", ["", "../etc/passwd", "twinpool.a.b.c.life", "twinpool.a.b.c"])
def test_nobody_is_made_to_open_another_file(name: str) -> None:
    with pytest.raises(TransportUnavailable):
        Witness(name)
