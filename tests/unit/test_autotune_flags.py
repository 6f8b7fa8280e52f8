"""`--autotune` on the command line: what makes no sense is refused, with what to do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.made_profiles import made_profile

from twinpool.cli import main
from twinpool.engine.default_model import DEFAULT_MODEL
from twinpool.planner.profile.saved import save_profile

ADVISE = ("serve", "--autotune", "advise")
SLO = ("--slo", "ttft=2s")
SERVED = ("--served-model-name", "made-up")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (ADVISE, "measure that once with `twinpool profile --output profile.json`"),
        ((*ADVISE, "--profile", "/nowhere.json"), "needs objectives: say which, like --slo ttft=2s"),
        ((*ADVISE, "--profile", "/nowhere.json", *SLO), "profile '/nowhere.json' cannot be read"),
        ((*ADVISE, "--colocated", "2"), "is for two pools, and --colocated 2 is one"),
        (("serve", "--autotune", "act"), "has nothing to change with 2 workers"),
        (("serve", "--autotune", "act", "--decode", "3", "--hybrid"), "--hybrid workers keep theirs"),
        ((*ADVISE, "--profile", "p.json", *SLO, "--autotune-window", "0.1"), "--autotune-window is 0.1"),
        ((*ADVISE, "--profile", "p.json", *SLO, "--autotune-workers", "5"), "--autotune-workers is '5'"),
        (("serve", "--autotune-workers", "2:4"), "--autotune-workers is for --autotune advise or act"),
        (("serve", "--scale-timeout", "5"), "--scale-timeout is for --scale-command"),
        (("serve", "--scale-command", "/nowhere"), "'/nowhere' is no program that can be run"),
        (("serve", "--profile", "p.json"), "--profile is for --autotune advise or act"),
        (("serve", "--autotune-hysteresis", "0.2"), "--autotune-hysteresis is for --autotune advise or act"),
    ],
)
def test_a_start_that_makes_no_sense_is_refused(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(capsys, *arguments)


def test_a_profile_that_does_not_know_how_long_kv_takes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    save_profile(msgspec.structs.replace(made_profile(), transfers=()), file)
    assert "has no transfer times" in refusal(capsys, *ADVISE, *SLO, *SERVED, "--profile", str(file))


def test_a_profile_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    save_profile(made_profile(), file)
    told = refusal(capsys, *ADVISE, *SLO, "--profile", str(file))
    assert f"is of the model 'made-up', and '{DEFAULT_MODEL}' is to be served" in told


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    save_profile(made_profile(), file)
    arguments = (*ADVISE, *SLO, *SERVED, "--profile", str(file), "--autotune-log", str(tmp_path))
    assert "--autotune-log is" in refusal(capsys, *arguments)
