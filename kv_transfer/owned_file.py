"""Files in shared memory that tell whether their owner lives.

The owner holds an exclusive lock on the file, which the kernel drops when the process dies, however it does, and at no
other time. Whoever has opened the file can ask.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from twinpool.errors import ConfigError

DIRECTORY = Path("/dev/shm")
PREFIX = "twinpool"
_LARGER = f"free some of {DIRECTORY} or enlarge it (docker run --shm-size=…)"
_ALLOW = f"allow this user to make files in {DIRECTORY}"
_ADVICE = {
    errno.ENOSPC: _LARGER,
    errno.ENOMEM: _LARGER,
    errno.EACCES: _ALLOW,
    errno.EPERM: _ALLOW,
    errno.EROFS: _ALLOW,
    errno.EMFILE: "let this process open more files (ulimit -n)",
    errno.ENFILE: "let this machine open more files (sysctl fs.file-max)",
    errno.EOPNOTSUPP: f"mount a tmpfs at {DIRECTORY}",
    errno.ENOENT: f"mount a tmpfs at {DIRECTORY}",
    errno.EEXIST: "another process has that name; start this one again",
}


def create(name: str, what: str, nbytes: int = 0) -> int:
    """Makes the file `name` in `DIRECTORY`, locked, with `nbytes` bytes of memory; returns its descriptor, which the
    caller owns. Nameless until then, so that no other process ever sees it half made or takes the living for dead.

    Raises:
        ConfigError: it cannot be had; the message has `what` it is, and what to do.
    """
    fd = -1
    try:
        fd = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
        # With a directory, even one it does not need, Python follows the link to the nameless file.
        os.link(f"/proc/self/fd/{fd}", DIRECTORY / name, src_dir_fd=fd)
    except OSError as exc:
        if fd >= 0:
            os.close(fd)
        advice = _ADVICE.get(exc.errno or 0, _ALLOW)
        raise ConfigError(f"{DIRECTORY / name}, {what}, cannot be made: {exc.strerror}; {advice}") from exc
    return fd


def owner_is_gone(fd: int, kind: int) -> bool:
    """Whether nobody holds the exclusive lock on the open file `fd`: found out by a lock of `kind`, for a moment."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True
