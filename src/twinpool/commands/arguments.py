"""The parser of all commands: a mistake is told in one line, not behind a page of usage."""

from __future__ import annotations

import argparse
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors say where help is. Parsers of its subcommands are of the same class."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with the status 2."""
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")
