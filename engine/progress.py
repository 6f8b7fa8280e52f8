"""How fetching and converting a model is shown to whoever waits: a bar on a terminal, else a plain line."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress(Protocol):
    """Told what is being done. `start` ends what was started before."""

    def start(self, what: str, total_bytes: int | None = None) -> None:
        """`what` begins, as a phrase ("fetching …"). Without `total_bytes` its end cannot be foreseen."""
        ...

    def advance(self, done_bytes: int) -> None:
        """`done_bytes` of what was started are done, in all."""
        ...


class ConsoleProgress:
    """Progress on standard error, as a context manager. Nothing is printed if nothing starts."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def start(self, what: str, total_bytes: int | None = None) -> None:
        """Shows `what`: a bar (moving to and fro without `total_bytes`) on a terminal, a line elsewhere."""
        if not self._console.is_terminal:
            self._console.print(f"twinpool: {what}", markup=False, highlight=False, soft_wrap=True)
            return
        self._stop()
        columns = [TextColumn("{task.description}"), BarColumn()]
        if total_bytes is not None:
            columns += [DownloadColumn(), TimeRemainingColumn()]
        self._bar = RichProgress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task(what, total=total_bytes)
        self._bar.start()

    def advance(self, done_bytes: int) -> None:
        """Moves the bar, if there is one."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done_bytes)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def __enter__(self) -> ConsoleProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stop()
