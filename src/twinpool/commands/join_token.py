"""`twinpool join-token`: makes the secret that lets workers of other hosts join; and where commands look for it."""

from __future__ import annotations

import argparse
import os
import stat
from pathlib import Path

from twinpool.config import is_loopback, require_zmq_address
from twinpool.errors import ConfigError
from twinpool.join_token import VARIABLE, JoinToken

_MOST_BYTES = 1024


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "join-token",
        help="make a token that lets workers of other hosts join",
        description="Makes a random join token. Give the same to `twinpool serve` and to each `twinpool worker`, as "
        f"--join-token-file or in {VARIABLE}. Whoever has it can join, read and write everything.",
    )
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="new file, for its owner only (default: print)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints a fresh token, or writes it to a new file. Raises ConfigError if the file exists or cannot be written."""
    text = JoinToken.fresh().text
    if args.file is None:
        print(text)
        return 0
    try:
        fd = os.open(args.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            print(text, file=file)
    except OSError as exc:
        raise ConfigError(
            f"FILE is {args.file!r}, which cannot be made ({exc.strerror}); name a new file in a folder of yours"
        ) from exc
    print(
        f"{args.file}: a new join token, for its owner only; give it as --join-token-file to `twinpool serve` and, "
        "copied, to each `twinpool worker`"
    )
    return 0


def add_join_token_flag(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds the flag that `given_token` reads."""
    parser.add_argument(
        "--join-token-file",
        metavar="FILE",
        help=f"file with the secret that lets workers join (`twinpool join-token` makes one; or {VARIABLE})",
    )


def given_token(args: argparse.Namespace) -> JoinToken | None:
    """The token of the flag, else of the environment, else None.

    Raises:
        ConfigError: the token is malformed, or its file cannot be read or is open to others than its owner.
    """
    if (name := args.join_token_file) is not None:
        return JoinToken(_read(Path(name)))
    text = os.environ.get(VARIABLE)
    return None if text is None else JoinToken(text.strip())


def token_to_serve_with(args: argparse.Namespace) -> JoinToken:
    """The given token; a fresh one if there is none and only this host can reach `--control`.

    Raises:
        ConfigError: as `given_token`, or other hosts can reach it and there is no token that they could have, or it is
            no address.
    """
    require_zmq_address("--control", args.control)
    if (token := given_token(args)) is not None:
        return token
    if not is_loopback(args.control):
        raise ConfigError(
            f"--control is {args.control!r}, which other hosts can reach, and there is no join token; make one with "
            "`twinpool join-token FILE`, and give --join-token-file FILE here and to each worker"
        )
    return JoinToken.fresh()


def token_to_join_with(args: argparse.Namespace) -> JoinToken:
    """The given token. Raises ConfigError as `given_token`, or if there is none."""
    if (token := given_token(args)) is None:
        raise ConfigError(
            f"there is no join token; give --join-token-file FILE or {VARIABLE}, the same as to `twinpool serve`"
        )
    return token


def _read(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"--join-token-file is {str(path)!r}, which others than its owner may read or write "
                    f"({stat.filemode(mode)}); chmod 600 it"
                )
            return file.read(_MOST_BYTES).strip()
    except OSError as exc:
        raise ConfigError(
            f"--join-token-file is {str(path)!r}, which cannot be read ({exc.strerror}); "
            "make it with `twinpool join-token FILE`, and copy it to each host"
        ) from exc
