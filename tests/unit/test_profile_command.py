"""`twinpool profile` refuses what it cannot measure before it measures anything, and says what it found."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from support.made_profiles import made_profile

from twinpool import cli
from twinpool.planner.profile.words import model_table, residual_table


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--threads", "4096"], "--threads"),
        (["--dtype", "int3"], "--dtype"),
        (["--weights", "int4"], "--weights"),
        (["--device", "tpu"], "--device"),
        (["--output", "/no/such/folder/profile.json"], "a file in a folder that exists"),
        (["/no/such/model"], "/no/such/model"),
    ],
)
def test_a_wrong_setting_is_told_at_once(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", *flags]) == 2
    assert words in capsys.readouterr().err


def test_tables_tell_times_beside_a_neighbour_transfers_overheads_and_residuals() -> None:
    profile = made_profile()
    console = Console(width=160, file=io.StringIO(), record=True)
    for table in (model_table(profile), residual_table(profile)):
        console.print(table)
    shown = console.export_text()
    for words in (
        "made-up in bfloat16",
        "by shm",
        "by tcp",
        "between two steps",
        "4 sequences of 64",
        "3.0%",
    ):
        assert words in shown
