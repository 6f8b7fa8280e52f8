"""Where commands look for the admin key: the server that wants it, and the operator who has it."""

from __future__ import annotations

import argparse
import os
import stat
from pathlib import Path

from twinpool.errors import ConfigError

VARIABLE = "TWINPOOL_ADMIN_KEY"
_MOST_BYTES = 1024


def add_admin_key_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, what_for: str, default: str | None = None
) -> None:
    """Adds the flags that `given_admin_key` reads. `what_for` begins their help."""
    parser.add_argument(
        "--admin-key-file",
        metavar="FILE",
        default=default,
        help=f"{what_for}: a file for its owner only (or {VARIABLE})",
    )
    parser.add_argument(
        "--admin-key",
        metavar="KEY",
        default=default,
        help="the key itself (better in a file: others see the arguments of a command)",
    )


def admin_key_to_serve_with(args: argparse.Namespace) -> str:
    """The given key, empty if there is none. It is taken out of the environment: child processes do not inherit it.

    Raises:
        ConfigError: as `given_admin_key`, or the key is too short or too long.
    """
    from twinpool.coordinator.gateway.key_ring import LONGEST_KEY, SHORTEST_KEY

    key = given_admin_key(args)
    os.environ.pop(VARIABLE, None)
    if key and not SHORTEST_KEY <= len(key) <= LONGEST_KEY:
        raise ConfigError(
            f"the admin key has {len(key)} characters; allowed: {SHORTEST_KEY} to {LONGEST_KEY}, at random, like what "
            "`openssl rand -hex 32` prints"
        )
    return key


def given_admin_key(args: argparse.Namespace) -> str:
    """The key of the flags, else of the environment; empty if there is none.

    Raises:
        ConfigError: both flags are given, or the file cannot be read, is empty, or is open to others than its owner.
    """
    if args.admin_key is not None and args.admin_key_file is not None:
        raise ConfigError("--admin-key and --admin-key-file are both given; leave one of the two out")
    if args.admin_key is not None:
        return str(args.admin_key)
    if args.admin_key_file is not None:
        return _read(Path(args.admin_key_file))
    return os.environ.get(VARIABLE, "").strip()


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"--admin-key-file is {str(path)!r}, which others than its owner may read or write "
                    f"({stat.filemode(mode)}); chmod 600 it"
                )
            key = file.read(_MOST_BYTES).strip()
    except OSError as exc:
        raise ConfigError(
            f"--admin-key-file is {str(path)!r}, which cannot be read ({exc.strerror})"
        ) from exc
    if not key:
        raise ConfigError(
            f"--admin-key-file is {str(path)!r}, which is empty; write a long random key into it"
        )
    return key
