"""`twinpool profile` refuses what it cannot measure before it measures anything, and says what it found."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.made_profiles import made_profile

from twinpool import cli
from twinpool.errors import ConfigError
from twinpool.planner.profile.saved import Profile
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


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `twinpool profile` writes, whose model needs not be there."""
    monkeypatch.setattr("twinpool.commands.dataset_flags.load_tokenizer", lambda _: None)
    monkeypatch.setattr(
        "twinpool.engine.model_files.resolve", lambda _: SimpleNamespace(path=tmp_path, name="made-up")
    )
    return tmp_path / "profile.json"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_ends_it_as_ctrl_c_does_so_that_no_server_is_left(
    number: signal.Signals, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    def measured(*_: object) -> Profile:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            ended.append("the server")
            raise
        return made_profile()

    monkeypatch.setattr("twinpool.planner.profile.measure.measure", measured)
    handlers = {
        number: lambda *_: None,
        signal.SIGINT: signal.default_int_handler,
    }  # event loops may leave another
    before = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    try:
        assert cli.main(["profile", "--output", str(written)]) == 130
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert ended == ["the server"]
    assert not written.exists()


def test_what_was_measured_is_shown_even_where_it_cannot_be_written(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("twinpool.planner.profile.measure.measure", lambda *_: made_profile())

    def full(*_: object) -> None:
        raise ConfigError("--output cannot be written: No space left on device")

    monkeypatch.setattr("twinpool.planner.profile.saved.save_profile", full)
    assert cli.main(["profile", "--output", str(written)]) == 2
    shown = capsys.readouterr()
    assert "made-up in bfloat16" in shown.out
    assert "No space left on device" in shown.err
