"""A plan's page in a real browser: the map is drawn, and nothing complains."""

from __future__ import annotations

from pathlib import Path

from support.browser import look
from support.planned import Pretended, bottleneck, question, space

from twinpool.bench.reports.page import write_report
from twinpool.planner.plan.planning import Planning
from twinpool.planner.plan.report import layout_grid, plan_report
from twinpool.planner.plan.telling import plan_of


def test_the_map_of_layouts_is_drawn_without_an_error(tmp_path: Path) -> None:
    planning = Planning(
        question(8.0, effort=10_000), space(), Pretended(bottleneck(5.0, 3.0, 1.0)), "a model"
    )
    planning.run()
    plan = plan_of(planning)
    report = plan_report(plan, "2026-01-01T00:00:00+00:00", "twinpool plan")
    seen = look(write_report(tmp_path / "plan.html", report)[0], height=4000)
    assert seen.console == []
    assert seen.num_colors > 40
    cells = layout_grid(plan).cells
    drawn = sum(seen.dom.count(f'<td class="{kind}"') for kind in ("other", "unknown"))
    assert drawn == len(cells)
    assert seen.dom.count("<b>★ ") == 1
