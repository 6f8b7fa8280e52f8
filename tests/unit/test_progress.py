"""Waiting for a model is shown as a bar on a terminal and as lines elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from twinpool.engine.progress import ConsoleProgress


def shown(is_terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=200, color_system=None)
    with ConsoleProgress(console) as progress:
        progress.start("fetching [a model]")
        progress.advance(30_000_000, 60_000_000)
        progress.start("converting a model")
    return file.getvalue()


def test_a_terminal_sees_a_bar_with_bytes() -> None:
    text = shown(is_terminal=True)
    assert "fetching [a model]" in text
    assert "30.0/60.0 MB" in text
    assert "converting a model" in text


def test_a_log_file_sees_one_line_per_step() -> None:
    assert shown(is_terminal=False) == "twinpool: fetching [a model]\ntwinpool: converting a model\n"
