"""The win-or-lose map as tables: one panel for each SLO and reuse share, prompts across, answers down."""

from __future__ import annotations

import math
from collections.abc import Sequence

from twinpool.bench.reports.markup import Markup, tag, text_of
from twinpool.bench.reports.model import Found, Interval, MapCell, WinLoseMap, Winner
from twinpool.bench.reports.words import NONE, bracketed, percent, rate_words

_FULL_DEPTH_LOG2 = 1.0
"""Twice or half has the deepest colour."""
_LEAST_DEPTH, _MOST_DEPTH = 14, 62
"""Percent of the colour."""
_CLASSES = {
    Winner.OTHER: "other",
    Winner.BASELINE: "baseline",
    Winner.NOBODY_SHOWN: "neither",
    Winner.NOBODY_HOLDS: "nobody",
    Winner.NOT_KNOWN: "unknown",
}


def panels(cells: Sequence[MapCell]) -> dict[str, list[MapCell]]:
    """The cells of each panel by its title, in the order in which they come. Reuse is named where it varies."""
    varies = len({cell.reuse for cell in cells}) > 1
    found: dict[str, list[MapCell]] = {}
    for cell in cells:
        title = f"{cell.slo}; reuse {percent(cell.reuse)}" if varies else cell.slo
        found.setdefault(title, []).append(cell)
    return found


def words_of(cell: MapCell) -> tuple[str, str]:
    """What a cell says, large and small: the gain, and the two rates in requests/s."""
    rates = " : ".join(rate_words(*each) for each in cell.rates)
    match cell.winner:
        case Winner.NOBODY_HOLDS:
            return "–", "neither holds"
        case Winner.NOT_KNOWN:
            return "?", "not known" if rates == "? : ?" else f"not known, {rates}"
        case Winner.NOBODY_SHOWN:
            is_odd = Found.CONTRADICTORY in (cell.baseline_found, cell.other_found)
            return "=", f"runs contradict, {rates}" if is_odd else rates
        case winner:
            return _gain(cell, winner), rates


def _gain(cell: MapCell, winner: Winner) -> str:
    """How much more, or less, the other arm holds: a bound where one rate is not known."""
    if winner is Winner.OTHER and cell.baseline_found is not Found.HOLDS:
        return f"≥ {bound:.2f} ×" if (bound := _bound(cell.other_rate, *cell.rates[1])) else "∞"
    if winner is Winner.BASELINE and cell.other_found is not Found.HOLDS:
        return f"≤ {1 / bound:.2f} ×" if (bound := _bound(cell.baseline_rate, *cell.rates[0])) else "0 ×"
    return NONE if cell.gain is None else f"{cell.gain.estimate:.2f} ×"


def _bound(holds: Interval, fails: Interval, found: Found) -> float | None:
    """How much more the one holds at least; None if the other one is known to hold at no rate."""
    if found is Found.AT_NO_RATE or holds.low is None or not fails.high:
        return None
    return holds.low / fails.high


def depth(cell: MapCell) -> float:
    """How deep a cell's colour is, 0 to 1, by how far the gain is from 1."""
    if cell.gain is None or cell.gain.estimate <= 0:
        return 1.0
    return min(1.0, abs(math.log2(cell.gain.estimate)) / _FULL_DEPTH_LOG2)


def map_panels(found: WinLoseMap) -> Markup:
    """All panels, with what the colours mean."""
    key = tag(
        "p",
        f"Highest rate at which every SLO holds: {found.other} over {found.baseline}, and both in requests/s.",
        tag("span", class_="key other"),
        f"{found.other} holds more",
        tag("span", class_="key baseline"),
        f"{found.baseline} holds more",
        tag("span", class_="key nobody"),
        "neither holds at any rate that was tried",
        tag("span", class_="key unknown"),
        "not known: the time was up, or the runs do not say",
        class_="soft",
    )
    figures = [_panel(title, cells, found) for title, cells in panels(found.cells).items()]
    return text_of(key, tag("div", *figures, class_="maps"))


def _panel(title: str, cells: Sequence[MapCell], found: WinLoseMap) -> Markup:
    inputs = sorted({cell.input_tokens for cell in cells})
    outputs = sorted({cell.output_tokens for cell in cells})
    by_lengths = {(cell.input_tokens, cell.output_tokens): cell for cell in cells}
    head = tag("tr", tag("th", "out ↓ in →"), *(tag("th", f"{tokens:,}", scope="col") for tokens in inputs))
    rows = [
        tag(
            "tr", tag("th", f"{tokens:,}", scope="row"), *(_cell(by_lengths.get((i, tokens))) for i in inputs)
        )
        for tokens in outputs
    ]
    meaning = found.slos.get(cells[0].slo, "")
    return tag(
        "figure",
        tag("h3", title),
        tag("p", meaning, class_="soft") if meaning else "",
        tag("table", tag("thead", head), tag("tbody", *rows), class_="map"),
    )


def _cell(cell: MapCell | None) -> Markup:
    if cell is None:
        return tag("td")
    large, small = words_of(cell)
    percent_deep = _LEAST_DEPTH + depth(cell) * (_MOST_DEPTH - _LEAST_DEPTH)
    interval = "" if cell.gain is None else bracketed(cell.gain, "{:.2f}".format)
    return tag(
        "td",
        tag("b", large),
        tag("small", small),
        class_=_CLASSES[cell.winner],
        style=f"--depth: {percent_deep:.0f}%",
        title=f"{cell.winner.value} {interval}".rstrip(),
    )
