"""`--hybrid` on the command line: where it makes no sense, the start is refused with what to change."""

from __future__ import annotations

import pytest

from twinpool.cli import main

WORKER = ("worker", "--connect", "tcp://127.0.0.1:7000", "--model-dir", "/nowhere")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--hybrid", "--strict"), "which --strict forbids; leave one of the two out"),
        (("serve", "--hybrid", "--colocated", "1"), "--hybrid is for two pools"),
        ((*WORKER, "--role", "decode", "--hybrid", "--strict"), "which --strict forbids"),
        (("serve", "--hybrid", "--itl-budget", "0"), "--itl-budget is 0.0; allowed: 1 to 60000 milliseconds"),
    ],
)
def test_a_start_that_contradicts_itself_is_refused(
    arguments: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TWINPOOL_JOIN_TOKEN", "twinpool-join-" + "A" * 43)
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
