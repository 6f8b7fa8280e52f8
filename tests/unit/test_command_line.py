"""What a wrong command line is told: one line, and where help is."""

from __future__ import annotations

import os
import subprocess
import sys

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
        (["bench", "--bogus"], "twinpool bench serve", "unrecognized arguments: --bogus"),
        (["bench", "engine", "--bogus"], "twinpool bench engine", "unrecognized arguments: --bogus"),
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


def test_output_that_nobody_reads_ends_a_command_without_a_word() -> None:
    command = [
        sys.executable,
        "-m",
        "twinpool",
        "kv-size",
        "--layers",
        "2",
        "--kv-heads",
        "1",
        "--head-dim",
        "8",
    ]
    command += ["--context", "16"]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        ended = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (141, "")
