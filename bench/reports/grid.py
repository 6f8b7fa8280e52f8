"""A heat map over two whole numbers, as a table."""

from __future__ import annotations

from twinpool.bench.reports.markup import Markup, tag, text_of
from twinpool.bench.reports.model import Grid, GridCell

_LEAST_DEPTH, _MOST_DEPTH = 8, 70
"""Percent of the colour."""


def grid_table(grid: Grid) -> Markup | None:
    """One row for each y, one column for each x; nothing without cells."""
    if not grid.cells:
        return None
    by_place = {(cell.x, cell.y): cell for cell in grid.cells}
    columns = sorted({cell.x for cell in grid.cells})
    corner = tag("th", f"{grid.y_name} ↓ {grid.x_name} →")
    head = tag("tr", corner, *(tag("th", str(x), scope="col") for x in columns))
    rows = [
        tag("tr", tag("th", str(y), scope="row"), *(_cell(by_place.get((x, y))) for x in columns))
        for y in sorted({cell.y for cell in grid.cells})
    ]
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="map")
    return text_of(tag("p", grid.note, class_="soft") if grid.note else "", tag("div", table, class_="wide"))


def _cell(cell: GridCell | None) -> Markup:
    if cell is None:
        return tag("td", class_="none")
    text = tag("b", f"★ {cell.large}" if cell.is_best else cell.large)
    small = tag("small", cell.small) if cell.small else ""
    if cell.depth is None:
        return tag("td", text, small, class_="unknown")
    deep = _LEAST_DEPTH + min(1.0, max(0.0, cell.depth)) * (_MOST_DEPTH - _LEAST_DEPTH)
    return tag("td", text, small, class_="other", style=f"--depth: {deep:.0f}%")
