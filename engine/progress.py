"""How fetching and converting a model is shown to whoever waits: a bar on a terminal, else a plain line."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress(Protocol):
    """Told what is being done."""

    def start(self, what: str) -> None:
        """`what` begins, as a phrase ("fetching …"), and what was started before has ended."""
        ...

    def advance(self, done_bytes: int, total_bytes: int) -> None:
        """So much of what was started is done."""
        ...


class ConsoleProgress:
    """Progress on standard error, as a context manager. Nothing is printed if nothing starts."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._what = ""
        self._bar: RichProgress | None = None
        self._counts_bytes = False

    def start(self, what: str) -> None:
        """Shows `what`: beside a bar that moves to and fro on a terminal, as a line elsewhere."""
        self._what = what
        if self._console.is_terminal:
            self._show(counts_bytes=False)
        else:
            self._console.print(f"twinpool: {what}", markup=False, highlight=False, soft_wrap=True)

    def advance(self, done_bytes: int, total_bytes: int) -> None:
        """Fills the bar, if there is one."""
        if self._bar is None:
            return
        if not self._counts_bytes:
            self._show(counts_bytes=True)
        self._bar.update(TaskID(0), completed=done_bytes, total=total_bytes)

    def _show(self, counts_bytes: bool) -> None:
        self._stop()
        counts = (DownloadColumn(), TimeRemainingColumn()) if counts_bytes else ()
        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *counts,
            console=self._console,
            transient=True,
        )
        self._counts_bytes = counts_bytes
        self._bar.add_task(self._what, total=None)
        self._bar.start()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> ConsoleProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stop()
