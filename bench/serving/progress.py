"""How a load is going, for who waits for it: numbers, and a line on the terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twinpool.bench.serving.distributions import percentile
from twinpool.bench.serving.record import Ending
from twinpool.bench.serving.sender_messages import Tick

if TYPE_CHECKING:
    from rich.progress import TaskID

_STEADY_S = 10.0
"""Where there is no terminal, a line comes this often, if there is news,"""
_SAME_S = 60.0
"""and this often if there is none."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A load so far. Latencies are from sending, in seconds; NaN while there are none."""

    elapsed_s: float
    num_planned: int
    num_sent: int
    num_running: int
    num_waiting: int
    """Their time has come, and they wait for `--max-concurrency`."""
    endings: dict[Ending, int]
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    num_pieces: int = 0
    """Of output, so far."""

    @property
    def num_done(self) -> int:
        """Those that ended, however."""
        return sum(self.endings.values())

    @property
    def rate_per_s(self) -> float:
        """Completed requests per second so far."""
        return self.endings.get(Ending.COMPLETED, 0) / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def line(self) -> str:
        """In one line of words."""
        troubles = [
            f"{count} {ending.value.replace('_', ' ')}"
            for ending, count in self.endings.items()
            if count and ending is not Ending.COMPLETED
        ]
        waiting = [f"{self.num_waiting} waiting"] if self.num_waiting else []
        return ", ".join(
            [
                f"{self.num_done}/{self.num_planned} done",
                f"{self.num_running} running",
                *waiting,
                *troubles,
                f"{self.num_pieces:,} pieces of output",
                f"{self.rate_per_s:.2f} requests/s",
                f"TTFT p50 {_ms(self.ttft_p50_s)} p99 {_ms(self.ttft_p99_s)}",
                f"TPOT p50 {_ms(self.tpot_p50_s)} p99 {_ms(self.tpot_p99_s)}",
            ]
        )


@dataclass(slots=True)
class Progressing:
    """Adds up what the senders say."""

    num_planned: int
    _latest: dict[int, Tick] = field(default_factory=dict)
    _ttfts_s: list[float] = field(default_factory=list)
    _tpots_s: list[float] = field(default_factory=list)

    def add(self, sender: int, tick: Tick) -> None:
        """The next report of a sender."""
        self._latest[sender] = tick
        self._ttfts_s += tick.ttfts_s
        self._tpots_s += tick.tpots_s

    def now(self, elapsed_s: float) -> Progress:
        """All senders together."""
        ticks = self._latest.values()
        return Progress(
            elapsed_s=elapsed_s,
            num_planned=self.num_planned,
            num_sent=sum(tick.num_sent for tick in ticks),
            num_running=sum(tick.num_running for tick in ticks),
            num_waiting=sum(tick.num_waiting for tick in ticks),
            endings={ending: sum(tick.endings.get(ending, 0) for tick in ticks) for ending in Ending},
            ttft_p50_s=percentile(self._ttfts_s, 50),
            ttft_p99_s=percentile(self._ttfts_s, 99),
            tpot_p50_s=percentile(self._tpots_s, 50),
            tpot_p99_s=percentile(self._tpots_s, 99),
            num_pieces=sum(tick.num_pieces for tick in ticks),
        )


class ProgressLine:
    """Shows progress on standard error: a bar on a terminal, else a line now and then. A context manager."""

    def __init__(self, num_planned: int, label: str = "") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._console = Console(stderr=True, highlight=False)
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._label = label
        self._last_s = 0.0
        self._last_line = ""
        if self._console.is_terminal:
            columns = (BarColumn(bar_width=16), TimeElapsedColumn(), TextColumn("{task.description}"))
            self._bars = Bars(*columns, console=self._console, refresh_per_second=4, transient=True)
            self._task = self._bars.add_task("starting", total=num_planned)

    def __enter__(self) -> ProgressLine:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, progress: Progress) -> None:
        """The newest state."""
        line = f"{self._label}{progress.line()}"
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=progress.num_done, description=line)
        elif progress.elapsed_s - self._last_s >= (_SAME_S if line == self._last_line else _STEADY_S):
            self._last_s, self._last_line = progress.elapsed_s, line
            self._console.print(f"{progress.elapsed_s:.0f} s: {line}", markup=False, soft_wrap=True)


def _ms(seconds: float) -> str:
    return "-" if seconds != seconds else f"{seconds * 1e3:.0f} ms"
