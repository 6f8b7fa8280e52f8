"""What a wrong command line is told: one line, and where help is."""

from __future__ import annotations

import pytest

from twinpool.cli import main


@pytest.mark.parametrize(
    ("arguments", "program", "told"),
    [
        (["serve", "--prefill", "x"], "twinpool serve", "argument --prefill: invalid int value: 'x'"),
        (["serve", "--colocate=1", "--bogus"], "twinpool serve", "unrecognized arguments: --bogus"),
        (["worker"], "twinpool worker", "the following arguments are required: --role"),
        (["api-key", "new", "--bogus"], "twinpool api-key", ""),
        (["nonsense"], "twinpool", "invalid choice: 'nonsense'"),
        ([], "twinpool", "the following arguments are required: COMMAND"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], program: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{program}: " if told else program)
    assert error.endswith(f"; see `{program} --help`\n" if told else " --help`\n")
    assert told in error
    assert error.count("\n") == 1
