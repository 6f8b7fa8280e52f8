"""What a run found: measurements beside their floors, as values, as a table, and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from twinpool.bench.engine.floors import Ceilings, Work
from twinpool.bench.engine.timing import NOISY_SPREAD, spread

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = 1
"""Of the JSON; another number means other fields."""
_LEAST_SAMPLES = 2
"""Fewer have no spread."""
RATIO_WORDS = (
    "ratio: the median of the rounds' ratios, each to its own round's floor; so not just median over floor"
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One operation, measured several times, each time right after its limits.

    `seconds[i]` stands beside `floor_s[i]`, which is empty if nothing bounds it. `floor` says what the floor is, like
    "memory", "arithmetic", "memcpy". `amount` of `unit` are done in one run, for the rate.
    """

    group: str
    name: str
    seconds: tuple[float, ...]
    floor_s: tuple[float, ...] = ()
    floor: str = "none"
    work: Work | None = None
    amount: float = 0.0
    unit: str = ""

    @property
    def key(self) -> str:
        """Names it in a baseline."""
        return f"{self.group}: {self.name}"

    @property
    def median_s(self) -> float:
        """The middle duration."""
        return statistics.median(self.seconds)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Each duration over its own floor."""
        return tuple(took / least for took, least in zip(self.seconds, self.floor_s, strict=False))

    @property
    def ratio(self) -> float | None:
        """The middle ratio; None without a floor."""
        return statistics.median(self.ratios) if self.floor_s else None

    @property
    def spread(self) -> float:
        """The width of the middle half of the ratios (without a floor: of the durations) over their median."""
        return spread(self.ratios or self.seconds)

    @property
    def is_noisy(self) -> bool:
        """Whether it should be measured again before anything is concluded."""
        return self.spread > NOISY_SPREAD

    @property
    def rate(self) -> float | None:
        """`unit` per second; None if nothing is counted."""
        return self.amount / self.median_s if self.unit else None


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One run. `machine` and `settings` are JSON values.

    `ceilings` are medians by name, like "1 thread, bfloat16"; the first are those that the floors come from. `skipped`
    and `failed` say why something was not measured, `warnings` why figures may be wrong. Not complete: interrupted.
    """

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    ceilings: Mapping[str, Ceilings]
    measurements: tuple[Measurement, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    is_complete: bool = True

    def to_json(self) -> str:
        """Everything, every sample included."""
        rows = [
            {**asdict(row), "ratio": row.ratio, "spread": row.spread, "is_noisy": row.is_noisy}
            for row in self.measurements
        ]
        values = {"format": FORMAT, **asdict(self), "measurements": rows}
        return json.dumps(values, indent=1)

    def table(self) -> Table:
        """For people; the noisy ones are marked."""
        from rich.table import Table

        table = Table(title=f"{self.machine['cpu']}, {self.settings['what']}", title_justify="left")
        for name in ("operation", "median", "rate", "floor", "of", "ratio", "spread"):
            table.add_column(name, justify="left" if name in ("operation", "of") else "right", no_wrap=True)
        for row, before in zip(self.measurements, (None, *self.measurements), strict=False):
            if before is not None and before.group != row.group:
                table.add_section()
            table.add_row(*cells(row))
        return table

    def words(self) -> list[str]:
        """What the table does not say: how to read it, the ceilings, what was noisy, left out, or failed."""
        shown = list(self.ceilings.items())[: 1 if self.measurements else None]
        lines = [RATIO_WORDS] if self.measurements else []
        lines += [
            f"ceiling, {name}: {limits.bytes_per_s / 1e9:,.1f} GB/s, {limits.flops_per_s / 1e9:,.0f} GFLOP/s"
            for name, limits in shown
        ]
        lines += self.warnings
        if noisy := [row.key for row in self.measurements if row.is_noisy]:
            lines.append(f"noisy (spread over {NOISY_SPREAD:.0%}), measure again: {'; '.join(noisy)}")
        lines += [f"not measured, {what}: {reason}" for what, reason in self.skipped.items()]
        lines += [f"FAILED, {what}: {reason}" for what, reason in self.failed.items()]
        if not self.is_complete:
            lines.append("interrupted: these are the results so far")
        return lines


def cells(row: Measurement) -> Sequence[str]:
    """A row of the table."""
    floor_s = statistics.median(row.floor_s) if row.floor_s else None
    return (
        row.key,
        duration(row.median_s),
        "" if row.rate is None else f"{_figure(row.rate)} {row.unit}/s",
        "" if floor_s is None else duration(floor_s),
        row.floor if row.floor_s else "",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "–" if len(row.seconds) < _LEAST_SAMPLES else f"{row.spread:.0%}{' noisy' if row.is_noisy else ''}",
    )


def progress(row: Measurement) -> str:
    """One line for who waits, understood without the table's head."""
    beside = "" if row.ratio is None else f", {row.ratio:.2f} times its floor"
    return f"{row.key}: {duration(row.median_s)}{beside}{' (noisy)' if row.is_noisy else ''}"


def duration(seconds: float) -> str:
    """With three digits and the unit that fits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{_figure(seconds * factor)} {unit}"
    return f"{_figure(seconds * 1e9)} ns"


def _figure(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"
