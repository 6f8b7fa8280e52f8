"""The parser of all commands: a mistake is told in one line, not behind a page of usage."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors say where help is. Parsers of its subcommands are of the same class.

    A flag is never guessed from its beginning: `--api-key` is not `--api-keys`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def refuse(self, unknown: Sequence[str], hints: Mapping[str, str]) -> NoReturn:
        """Ends the process with the status 2 because of arguments that it does not know. Only the flags among them are
        told, as what stands behind one may be a secret; a flag of `hints` with its hint. The hint of "" is told where
        there is no flag among them."""
        names = [argument.partition("=")[0] for argument in unknown]
        flags = [name for name in names if name and (name.startswith("--") or name in hints)]
        if not flags:
            self.error(
                "; ".join([f"unrecognized arguments: {' '.join(unknown)}", *filter(None, [hints.get("")])])
            )
        found = {flag: hint for flag in flags if (hint := hints.get(_plain(flag)) or self._alike(flag))}
        told = [
            f"unrecognized arguments: {' '.join(flags)}",
            *(f"{flag}: {hint}" for flag, hint in found.items()),
        ]
        self.error("; ".join(told))

    def _alike(self, flag: str) -> str:
        alike = difflib.get_close_matches(_plain(flag), self._option_string_actions, n=1, cutoff=0.8)
        return f"is {alike[0]} meant?" if alike else ""

    def error(self, message: str) -> NoReturn:
        """Ends the process with the status 2."""
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        if file is sys.stdout:  # argparse says nothing if help cannot be written
            print(message, end="", flush=True)
        else:
            super()._print_message(message, file)


def _plain(flag: str) -> str:
    """A flag as it is spelt here: words joined by hyphens."""
    return flag.replace("_", "-")
