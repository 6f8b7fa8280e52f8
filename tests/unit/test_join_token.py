"""The join token: what makes one, where commands find it, and who may read it."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import pytest

from twinpool.cli import main
from twinpool.commands.join_token import given_token, token_to_join_with, token_to_serve_with
from twinpool.config import CoordinatorConfig, is_loopback
from twinpool.errors import ConfigError
from twinpool.join_token import VARIABLE, JoinToken
from twinpool.junk_log import SAY_EVERY_S, JunkLog

ANY_HOST = "tcp://0.0.0.0:7000"


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def flags(file: Path | None = None, control: str = "tcp://127.0.0.1:*") -> argparse.Namespace:
    return argparse.Namespace(join_token_file=None if file is None else str(file), control=control)


def test_each_server_has_a_token_of_its_own_unless_told_otherwise() -> None:
    one, other = CoordinatorConfig().join_token, CoordinatorConfig().join_token
    assert one != other
    assert len(one.text) == 43
    assert one.text not in repr(CoordinatorConfig(join_token=one))


def test_keys_of_one_token_differ_by_purpose_and_are_the_same_in_every_process() -> None:
    token = JoinToken("0123456789abcdef" * 4)
    assert token.key("one").hex() == "e531a81f9786e24c280fe2f6fe7f45a80732faeacef1ce9abed061238c5080d0"
    assert len({token.key("one"), token.key("other"), JoinToken("f" + token.text[1:]).key("one")}) == 3


@pytest.mark.parametrize(
    "text", ["", "short", "a" * 42, "a" * 257, "a" * 42 + " ", "a" * 42 + "é", "a" * 43 + "\n"]
)
def test_what_is_no_token_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ConfigError, match=f"has {len(text)} characters; allowed: 43 to 256") as caught:
        JoinToken(text)
    assert not text.strip() or text not in str(caught.value)


def test_the_file_goes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert given_token(flags()) is None
    monkeypatch.setenv(VARIABLE, "e" * 43 + "\n")
    assert given_token(flags()) == JoinToken("e" * 43)
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("f" * 43 + "\n")
    assert given_token(flags(file)) == JoinToken("f" * 43)


def test_a_new_file_is_for_its_owner_only_and_no_file_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    assert main(["join-token", str(file)]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert capsys.readouterr().out.startswith(f"{file}: a new join token, for its owner only; give it as")
    token = given_token(flags(file))
    assert main(["join-token", str(file)]) == 2
    assert "name a new file" in capsys.readouterr().err
    assert main(["join-token"]) == 0
    assert JoinToken(capsys.readouterr().out.strip()) != token


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text("f" * 43)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=r"others than its owner may read or write .*chmod 600"):
        given_token(flags(file))


def test_a_file_that_cannot_be_read_or_holds_no_token_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--join-token-file is .*nowhere.*No such file"):
        given_token(flags(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"--join-token-file is .*directory"):
        given_token(flags(tmp_path))
    for content in (b"", b"\xff" * 100, b"x" * 100_000):
        (tmp_path / "junk").write_bytes(content)
        (tmp_path / "junk").chmod(0o600)
        with pytest.raises(ConfigError, match="the join token has"):
            given_token(flags(tmp_path / "junk"))


def test_other_hosts_can_only_reach_a_server_that_was_given_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert token_to_serve_with(flags()) != token_to_serve_with(flags())
    for control in (ANY_HOST, "tcp://*:7000", "tcp://10.0.0.1:7000", "tcp://eth0:7000", "tcp://[::]:7000"):
        with pytest.raises(ConfigError, match=r"other hosts can reach.*twinpool join-token FILE"):
            token_to_serve_with(flags(control=control))
    monkeypatch.setenv(VARIABLE, "e" * 43)
    assert token_to_serve_with(flags(control=ANY_HOST)) == JoinToken("e" * 43)


def test_a_worker_by_hand_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="there is no join token; give --join-token-file"):
        token_to_join_with(flags())


def test_loopback_is_told_from_the_rest() -> None:
    inside = (
        "tcp://127.0.0.1:*",
        "tcp://localhost:7000",
        "tcp://[::1]:7000",
        "tcp://lo:1",
        "ipc:///tmp/x",
        "::1",
    )
    outside = ("tcp://*:7000", ANY_HOST, "tcp://127.0.0.1.example.org:1", "10.0.0.1", "::", "", "1127.0.0.1")
    assert all(map(is_loopback, inside))
    assert not any(map(is_loopback, outside))


def test_junk_is_said_now_and_then_and_in_short(caplog: pytest.LogCaptureFixture) -> None:
    class Clock:
        at = 0.0

        def now(self) -> float:
            return self.at

    clock = Clock()
    junk_log = JunkLog(logging.getLogger("junk"), clock)
    for _ in range(1000):
        junk_log.say("x" * 100_000)
    assert [len(record.getMessage()) for record in caplog.records] == [500]
    clock.at = SAY_EVERY_S
    junk_log.say("again")
    assert caplog.messages[1] == "again (and 999 more since the last such line)"
