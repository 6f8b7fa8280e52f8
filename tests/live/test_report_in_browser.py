"""The page in a real browser: it draws, its timeline can be moved, and nothing complains."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from support.browser import look
from support.made_up_runs import HOSTILE, made_up_report

from twinpool.bench.reports.model import Report
from twinpool.bench.reports.page import page, write_report

DRAWN = re.compile(r'<figure class="lanes" data-drawn="(\d+)">')
PREFILL_LIGHT, PREFILL_DARK = (0xD4, 0x57, 0x2A), (0xE0, 0x69, 0x3B)
"""The colour of that stage in `page.css`."""


def opened(folder: Path, report: Report) -> Path:
    return write_report(folder / "report.html", report)[0]


def acted_on(folder: Path, text: str, script: str) -> Path:
    """The page with a script behind its own, which its policy would not let run."""
    changed, count = re.subn(r"script-src [^\"]*sha256-[^\"]*", "script-src 'unsafe-inline'", text, count=1)
    assert count == 1
    path = folder / "acted.html"
    path.write_text(changed.replace("</body>", f"<script>{script}</script></body>"))
    return path


def num_pixels(pixels: np.ndarray, color: tuple[int, int, int]) -> int:
    return int(np.all(pixels == np.array(color, np.uint8), axis=2).sum())


@pytest.mark.parametrize(("width", "is_dark"), [(1200, False), (1200, True), (390, False)])
def test_the_page_is_drawn_without_an_error(tmp_path: Path, width: int, is_dark: bool) -> None:
    seen = look(opened(tmp_path, made_up_report()), width=width, height=7000, is_dark=is_dark)
    assert seen.console == []
    assert seen.num_colors > 100
    paper = int(seen.pixels[4, 4].max())
    assert paper < 60 if is_dark else paper == 255
    assert num_pixels(seen.pixels, PREFILL_DARK if is_dark else PREFILL_LIGHT) > 50, (
        "the timeline has prefills"
    )
    drawn = [int(count) for count in DRAWN.findall(seen.dom)]
    assert len(drawn) == 2, "one timeline for each arm"
    assert min(drawn) > 200, "with the stages of 40 requests"
    assert 'data-requests="160"' in seen.dom
    assert seen.dom.count("<option>repetition") == 4
    assert "by worker" in seen.dom


def test_an_error_on_the_page_would_be_found(tmp_path: Path) -> None:
    broken = acted_on(tmp_path, page(made_up_report(6, 1)), "document.missing.thing = 1")
    assert any("Uncaught TypeError" in line for line in look(broken).console)


def test_a_script_that_is_not_the_pages_own_would_not_run(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(
        page(made_up_report(6, 1)).replace("</body>", "<script>document.title='caught'</script></body>")
    )
    seen = look(path)
    assert "<title>caught" not in seen.dom
    assert any("Content Security Policy" in line for line in seen.console)


def test_hostile_texts_are_shown_and_do_nothing(tmp_path: Path) -> None:
    report = made_up_report(num_requests=6, num_runs=1)
    script = """
      const canvas = document.querySelector("canvas"), box = canvas.getBoundingClientRect();
      for (let y = 23; y < box.height; y += 2) for (let x = 120; x < box.width; x += 9)
        canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: box.x + x, clientY: box.y + y }));
      document.body.dataset.tip = document.querySelector(".tip").textContent;
    """
    text = page(report).replace(
        '"id":"req-5"', '"id":"' + HOSTILE.replace("<", "\\u003c").replace('"', '\\"') + '"'
    )
    assert text != page(report)
    seen = look(acted_on(tmp_path, text, script))
    assert seen.console == []
    assert "<title>Long prompts beside chats</title>" in seen.dom
    assert "&lt;img src=x onerror=alert(1)&gt;" in seen.dom, "in the tooltip, as text"
    assert "<img" not in seen.dom


def test_zooming_shows_fewer_requests_and_rows_can_be_workers(tmp_path: Path) -> None:
    script = """
      const note = (name) => { document.body.dataset[name] = document.querySelector("figure.lanes").dataset.drawn; };
      const canvas = document.querySelector("canvas"), box = canvas.getBoundingClientRect();
      const wheel = (deltaY) => canvas.dispatchEvent(new WheelEvent("wheel", {
        deltaY, ctrlKey: true, clientX: box.x + 600, clientY: box.y + 90, cancelable: true }));
      const press = (text) => [...document.querySelectorAll("button")].find((b) => b.textContent === text).click();
      const steps = [
        () => { note("whole"); wheel(-900); }, () => { note("zoomed"); press("whole run"); },
        () => { note("again"); press("by worker"); },
        () => { document.body.dataset.lanes = document.querySelector("figure.lanes figcaption span").textContent; },
      ];
      // Without a screen there are no frames.
      window.requestAnimationFrame = (draw) => setTimeout(draw, 1);
      steps.forEach((step, n) => setTimeout(step, 100 * (n + 1)));
    """
    seen = look(acted_on(tmp_path, page(made_up_report(60, 1)), script))
    assert seen.console == []
    found = dict(re.findall(r'data-(whole|zoomed|again|lanes)="([^"]*)"', seen.dom))
    assert 0 < int(found["zoomed"]) < int(found["whole"]) / 3
    assert found["again"] == found["whole"]
    assert re.fullmatch(r"\d+ lanes", found["lanes"])
