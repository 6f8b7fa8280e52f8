"""A published result beside its prediction, and the table of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One number: of which source and setting, `unit`, and why it is off where it is."""

    source: str
    setting: str
    name: str
    published: float
    predicted: float
    unit: str
    why: str = ""

    @property
    def difference(self) -> float:
        """Predicted / published - 1."""
        return self.predicted / self.published - 1

    def row(self) -> str:
        """Of the table."""
        numbers = f"{_short(self.published)} {self.unit} | {_short(self.predicted)} {self.unit}"
        return f"| {self.source} | {self.setting} | {self.name} | {numbers} | {self.difference:+.0%} | {self.why} |"


@dataclass(frozen=True, slots=True)
class Direction:
    """A result of which the direction counts: what was published in words, predicted in numbers, and whether these say
    the same."""

    source: str
    setting: str
    claim: str
    predicted: str
    holds: bool
    why: str = ""

    def row(self) -> str:
        """Of the table."""
        verdict = "same direction" if self.holds else "**other direction**"
        words = (self.source, self.setting, "direction", self.claim, self.predicted, verdict, self.why)
        return f"| {' | '.join(words)} |"


Result = Figure | Direction


def table(results: Iterable[Result]) -> list[str]:
    """Rows of Markdown."""
    head = "| source | setting | figure | published | predicted | difference | why, where it is off |"
    return [head, "|---|---|---|---|---|---|---|", *(result.row() for result in results)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"
