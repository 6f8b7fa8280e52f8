"""Ratios to the floor that a class of machines has reached, and whether a run is worse.

Times differ from machine to machine and from hour to hour; ratios within one run hardly do. A baseline is made of
several runs: for each operation the middle of their ratios, and a tolerance wide enough for how they differed.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from twinpool.bench.engine.report import EngineReport
from twinpool.errors import ConfigError

LEAST_TOLERANCE = 0.1
"""No run is blamed for less than this part of the baseline."""
_SAFETY = 2.0
"""Tolerances are so many times the differences that were seen: few runs do not show the widest."""


@dataclass(frozen=True, slots=True)
class Reached:
    """One operation's ratio, and how much worse, as a part of it, a later run may be."""

    ratio: float
    tolerance: float

    @property
    def most(self) -> float:
        """The largest ratio that is not worse."""
        return self.ratio * (1 + self.tolerance)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One operation of a run beside its baseline; `now` is None if the run has no such operation any more."""

    key: str
    before: Reached
    now: float | None
    is_noisy: bool = False

    @property
    def is_worse(self) -> bool:
        """Whether it is beyond its tolerance in a quiet measurement, or gone."""
        return self.now is None or (self._is_beyond and not self.is_noisy)

    @property
    def is_undecided(self) -> bool:
        """Whether it is beyond its tolerance, but in a measurement too noisy to blame it."""
        return self._is_beyond and self.is_noisy

    @property
    def _is_beyond(self) -> bool:
        return self.now is not None and self.now > self.before.most

    def __str__(self) -> str:
        if self.now is None:
            return f"{self.key}: is not measured any more; baseline {self.before.ratio:.2f}"
        limit = f"baseline {self.before.ratio:.2f}, at most {self.before.most:.2f}"
        return f"{self.key}: {self.now:.2f} times its floor; {limit}"


Baseline = Mapping[str, Reached]


def read(path: Path) -> dict[str, Baseline]:
    """All classes of machines in the file; none if there is no file.

    Raises:
        ConfigError: it cannot be read, or is no baseline.
    """
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: {key: _entry(**entry) for key, entry in entries.items()} for name, entries in values.items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{path} is no baseline that can be read: {exc}; renew it") from exc


def _entry(ratio: float, tolerance: float) -> Reached:
    """Raises ValueError or TypeError for what no run is worse than."""
    if not (0 < ratio < math.inf and 0 <= tolerance < math.inf):
        raise ValueError(f"a ratio is {ratio} with tolerance {tolerance}, which no run gives")
    return Reached(ratio, tolerance)


def write(path: Path, baselines: Mapping[str, Baseline]) -> None:
    """Writes all classes. Raises ConfigError if the file cannot be written."""
    values = {
        name: {key: asdict(entry) for key, entry in sorted(entries.items())}
        for name, entries in sorted(baselines.items())
    }
    try:
        path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc


def made_of(runs: Sequence[EngineReport]) -> dict[str, Reached]:
    """The baseline that several runs give: operations with a floor that all of them have."""
    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        for row in run.measurements:
            if row.ratio is not None:
                found.setdefault(row.key, []).append((row.ratio, row.spread))
    return {
        key: _reached([ratio for ratio, _ in seen], max(spread for _, spread in seen))
        for key, seen in found.items()
        if len(seen) == len(runs)
    }


def compare(run: EngineReport, baseline: Baseline) -> list[Comparison]:
    """Every operation of the baseline that the run was to measure, in the baseline's order, beside the run."""
    only = run.settings.get("only")
    now = {row.key: row for row in run.measurements}
    return [
        Comparison(key, before, now[key].ratio, now[key].is_noisy)
        if key in now
        else Comparison(key, before, None)
        for key, before in baseline.items()
        if not only or key.split(maxsplit=1)[0].rstrip(":") in only
    ]


def _reached(ratios: Sequence[float], spread: float) -> Reached:
    middle = statistics.median(ratios)
    between_runs = (max(ratios) - min(ratios)) / middle
    tolerance = max(LEAST_TOLERANCE, _SAFETY * between_runs, spread)
    return Reached(round(middle, 3), round(tolerance, 3))
