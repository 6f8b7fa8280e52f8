"""Reading data sets' files; whatever is wrong with one is a ConfigError that names the file and the line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from twinpool.errors import ConfigError

T = TypeVar("T")
_SHOWN_CHARS = 80


def read(path: str) -> bytes:
    """The file's bytes. Raises ConfigError if it cannot be read or is empty."""
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as exc:
        raise ConfigError(f"--dataset-path is {path!r}, which cannot be read: {exc.strerror}") from exc
    if not data.strip():
        raise ConfigError(f"--dataset-path is {path!r}, which is empty")
    return data


def read_text(path: str) -> str:
    """The file as UTF-8, without a byte order mark. Raises ConfigError if it cannot be read, is empty or is no text."""
    try:
        return read(path).decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise ConfigError(f"--dataset-path is {path!r}, which is no text: {exc}") from exc


def json_lines(path: str, line_type: type[T], what: str) -> Iterator[tuple[int, T]]:
    """The values of a JSON lines file with their line numbers; empty lines count and are passed over.

    `what` says in words what a line should be. Raises ConfigError at the first line that is something else.
    """
    decoder = msgspec.json.Decoder(line_type)
    for number, line in enumerate(read(path).removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield number, decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            shown = line[:_SHOWN_CHARS].decode("utf-8", "replace")
            raise ConfigError(f"line {number} of {path} is not {what}: {exc} (it begins {shown!r})") from exc


def whole_json(path: str, file_type: type[T], what: str) -> T:
    """A file that is one JSON value. Raises ConfigError if it is something else than `what` says."""
    try:
        return msgspec.json.decode(read(path).removeprefix(b"\xef\xbb\xbf"), type=file_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is not {what}: {exc}") from exc
