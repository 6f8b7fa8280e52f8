"""`twinpool pools` without a server: its table, its words, and where it looks for the key."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from support.coordinator_core import CoreDriver, stats

from twinpool.cli import main
from twinpool.commands.admin_key import VARIABLE, admin_key_to_serve_with, given_admin_key
from twinpool.commands.pools import MOST_WAIT_S, awaited, cells_of, described, duration
from twinpool.config import Role
from twinpool.coordinator.events import ChangeRole, DrainWorker
from twinpool.coordinator.gateway import admin
from twinpool.coordinator.pool_status import pool_status
from twinpool.errors import ConfigError
from twinpool.messages import Heartbeat

KEY = "0123456789abcdef" * 2


def keys(path: Path | None = None, key: str | None = None) -> argparse.Namespace:
    return argparse.Namespace(admin_key=key, admin_key_file=None if path is None else str(path))


def test_the_key_comes_from_a_flag_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "admin.key"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    monkeypatch.setenv(VARIABLE, "of the environment")
    assert given_admin_key(keys(path)) == KEY
    assert given_admin_key(keys(key="another")) == "another"
    assert given_admin_key(keys()) == "of the environment"
    assert admin_key_to_serve_with(keys(path)) == KEY
    assert given_admin_key(keys()) == "", "workers would have inherited it"


def test_a_key_that_cannot_be_one_is_refused_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    with pytest.raises(ConfigError, match="cannot be read"):
        given_admin_key(keys(path))
    path.write_text("short\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        given_admin_key(keys(path))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="has 5 characters; allowed: 16 to 256") as caught:
        admin_key_to_serve_with(keys(path))
    assert "short" not in str(caught.value)
    with pytest.raises(ConfigError, match="both given"):
        given_admin_key(keys(path, KEY))
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        given_admin_key(keys(path))


def test_what_does_not_reach_a_server_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    assert main(["pools", "set"]) == 2
    assert "wants --prefill N, --decode M or both" in capsys.readouterr().err
    for wait in ("nan", "-1.0", "inf", "3601.0"):
        assert main(["pools", "drain", "d", f"--wait={wait}"]) == 2
        assert f"--wait is {wait}; allowed: 0 to 3600 seconds" in capsys.readouterr().err
    assert MOST_WAIT_S == admin.MOST_WAIT_S
    assert main(["pools", "drain", "../d"]) == 2
    assert "no worker has the name '../d'" in capsys.readouterr().err
    assert main(["pools", "--url", "http://127.0.0.1:9"]) == 2
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err


class MadeScaler:
    """One of its workers is still to come, one has failed."""

    def workers(self) -> dict[str, Role]:
        return {"P": Role.PREFILL, "decode-9": Role.DECODE}

    def waits_for(self) -> str:
        return "its process to load the model"

    def failed(self) -> dict[str, str]:
        return {"decode-8": "exit status 2"}


def test_every_worker_is_a_line_of_the_table() -> None:
    driver = CoreDriver()
    driver.pair()
    for worker_id in ("E", "F"):
        driver.join(worker_id, Role.DECODE)
        driver.link("P", worker_id)
    driver.submit()
    driver.now += 75
    driver.say("D", Heartbeat(stats()))
    driver.do(ChangeRole("t", "D", Role.PREFILL, 60.0))
    driver.do(DrainWorker("t", "E", 0.0))
    status = pool_status(driver.core.registry, MadeScaler(), driver.now)
    assert status["pools"] == {"prefill": 1, "decode": 1, "colocated": 0}
    rows = {worker["worker"]: cells_of(worker) for worker in status["workers"]}
    assert rows["D"] == (
        "D",
        "decode",
        "becomes prefill",
        "1m15s",
        "1",
        "1/4",
        "0%",
        "0%",
        "1 × loopback, 10.0 GB/s",
    )
    assert rows["E"][:4] == ("E", "decode", "drains", "1m15s")
    assert rows["P"][:6] == ("P", "prefill", "serves", "1m15s", "1", "")
    assert rows["P"][-1] == "3 × loopback, 10.0 GB/s"
    assert rows["decode-9"][:3] == ("decode-9", "decode", "starts")
    assert rows["decode-8"][:3] == ("decode-8", "", "failed")
    assert len({len(row) for row in rows.values()}) == 1
    assert awaited(status["workers"]) == [
        "decode-8: failed: exit status 2",
        "D goes once what runs there has ended (1 attempts); in 60 s what is left is handed on",
        "decode-9 waits for its process to load the model",
        "`twinpool pools` shows how far it is",
    ]
    assert awaited([worker for worker in status["workers"] if worker["state"] == "serves"]) == []


def test_changes_and_durations_in_words() -> None:
    assert described([]) == ["nothing to do: the pools are, or will be, as wanted"]
    changes = [
        {"change": "role", "worker": "d", "role": "prefill"},
        {"change": "drain", "worker": "e", "role": "decode"},
        {"change": "start", "role": "decode"},
    ]
    assert described(changes) == ["d becomes a prefill worker", "e is drained", "a decode worker starts"]
    assert [duration(s) for s in (9.4, 59.6, 75, 7380, 200000)] == ["9s", "1m00s", "1m15s", "2h03m", "2d07h"]
