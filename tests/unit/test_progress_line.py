"""How a long computation says how far it is: on a terminal, and in a log."""

from __future__ import annotations

import sys

import pytest

from twinpool.commands.progress import ProgressLine


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.commands.progress.SHOWN_EVERY_S", 0.0)
    monkeypatch.setattr("twinpool.commands.progress.LOGGED_EVERY_S", 0.0)


def told(capsys: pytest.CaptureFixture[str]) -> str:
    line = ProgressLine()
    line.tell(lambda: "1 of 2")
    line.tell(lambda: "2 of 2")
    line.clear()
    return capsys.readouterr().err


def test_on_a_terminal_one_line_is_written_over_and_goes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert told(capsys) == "\r1 of 2\033[K\r2 of 2\033[K\r\033[K"


def test_in_a_log_each_is_a_line_and_stays(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys) == "1 of 2\n2 of 2\n"


def test_between_two_times_nothing_is_said_and_no_words_are_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinpool.commands.progress.LOGGED_EVERY_S", 1e9)
    ProgressLine().tell(lambda: pytest.fail("nobody asked for it"))
    assert capsys.readouterr().err == ""
