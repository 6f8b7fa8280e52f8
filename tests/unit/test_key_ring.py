"""API keys: who they let in, how they are kept, and what a wrong file is told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from twinpool.cli import main
from twinpool.coordinator.gateway.key_ring import KeyRing, append_key, new_key, read_keys
from twinpool.coordinator.tenants import Tenant
from twinpool.errors import ConfigError, Unauthorized

GOOD_HASH = f"blake2b:{'0' * 32}:{'0' * 64}"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_each_key_is_its_tenants_and_nobody_elses(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys = {new_key(): tenant for tenant in ("acme", "acme", "zeta")}
    for key, tenant in keys.items():
        append_key(path, tenant, key)
    ring = KeyRing(str(path))
    assert [ring.tenant(f"Bearer {key}").name for key in keys] == ["acme", "acme", "zeta"]
    assert ring.tenant(f"bearer   {next(iter(keys))} ").name == "acme"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic a",
        "tp-a",
        "Bearer tp-a",
        "Bearer " + "x" * 5000,
        "Bearer \udcff",
    ],
)
def test_whatever_bears_no_known_key_is_unauthorized(header: str | None) -> None:
    ring = KeyRing("", f"acme:{new_key()}")
    with pytest.raises(Unauthorized):
        ring.tenant(header)


def test_a_key_with_one_character_changed_is_unknown() -> None:
    key = new_key()
    ring = KeyRing("", f"acme:{key}")
    for near in (key[:-1], key + "x", key[:-1] + chr(ord(key[-1]) ^ 1), key.swapcase()):
        with pytest.raises(Unauthorized):
            ring.tenant(f"Bearer {near}")


def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [new_key() for _ in range(4)]
    ring = KeyRing("", ",".join(f"acme:{key}" for key in keys))
    compared: list[bytes] = []

    def compare(ours: bytes, theirs: bytes) -> bool:
        compared.append(theirs)
        return ours == theirs

    monkeypatch.setattr("hmac.compare_digest", compare)
    for key in keys:
        compared.clear()
        ring.tenant(f"Bearer {key}")
        assert len(set(compared)) == 4


def test_a_file_holds_no_key(tmp_path: Path) -> None:
    path, key = tmp_path / "keys.toml", new_key()
    append_key(path, "acme", key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert key not in path.read_text()
    assert key[3:] not in path.read_text()
    append_key(path, "acme", key)
    first, second = read_keys(path).hashes
    assert first.digest != second.digest, "each hash has a salt of its own"


def test_a_tenants_table_says_what_it_may(tmp_path: Path) -> None:
    key = new_key()
    path = write(
        tmp_path / "keys.toml",
        "[tenant.acme]\nrequests_per_minute = 60\ntokens_per_minute = 10000\nweight = 2\nshares_cache = true\n"
        "read_metrics = true",
    )
    append_key(path, "acme", key)
    assert KeyRing(str(path)).tenant(f"Bearer {key}") == Tenant("acme", 60, 10000, 2, True, True)


def test_file_and_environment_add_up(tmp_path: Path) -> None:
    path, ours, theirs = tmp_path / "keys.toml", new_key(), new_key()
    append_key(path, "acme", ours)
    ring = KeyRing(str(path), f"zeta:{theirs}, acme:{theirs[::-1]}")
    assert ring.tenant(f"Bearer {ours}").name == "acme"
    assert ring.tenant(f"Bearer {theirs}").name == "zeta"
    assert ring.tenant(f"Bearer {theirs[::-1]}").name == "acme"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[key]", "is no TOML"),
        ("tenants = 1", "'tenants'; allowed: key, tenant"),
        ("[[key]]\ntenant = 'a'", "has no hash"),
        ("[[key]]\ntenant = 'a'\nhash = 'sha1:00:00'", "has no hash"),
        ("[[key]]\ntenant = 'a'\nhash = 7", "has no hash"),
        (f"[[key]]\nhash = '{GOOD_HASH}'", "is None; allowed: 1 to 64 letters"),
        (f"[[key]]\ntenant = 'anyone'\nhash = '{GOOD_HASH}'", "'anyone'; allowed"),
        (f"[[key]]\ntenant = 'a:b'\nhash = '{GOOD_HASH}'", "'a:b'; allowed"),
        ("[tenant.a]\nwieght = 1", "'wieght'; allowed: requests_per_minute"),
        ("[tenant.a]\nweight = 'much'", "is 'much'; allowed: a number"),
        ("[tenant.a]\nrequests_per_minute = true", "is True; allowed: a whole number"),
        ("[tenant.a]\nrequests_per_minute = 0", "is 0; allowed: 1 or more"),
        ("[tenant.a]\nweight = nan", "is nan; allowed: 0.001 to 1000"),
        ("tenant = 3", "must have"),
        ("tenant.a = 3", "[tenant.a] is no table"),
        ("", "has no key"),
    ],
)
def test_a_file_that_is_wrong_stops_the_start(tmp_path: Path, text: str, told: str) -> None:
    path = write(tmp_path / "keys.toml", text)
    with pytest.raises(ConfigError) as failure:
        KeyRing(str(path))
    assert told in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_tenant_that_nobody_has_a_key_of_is_named(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    append_key(path, "acme", new_key())
    with path.open("a") as file:
        file.write("[tenant.acmee]\nweight = 2\n")
    with pytest.raises(
        ConfigError, match=r"has \[tenant.acmee\], but no key of 'acmee'; .*--tenant acmee --file"
    ):
        KeyRing(str(path))
    KeyRing(str(path), f"acmee:{new_key()}")
    append_key(path, "acmee", new_key())
    KeyRing(str(path))


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o666])
def test_a_file_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "keys.toml", "", mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyRing(str(path))


@pytest.mark.parametrize(
    "text", ["acme", "acme:short", ":" + "x" * 40, "anyone:" + "x" * 40, "a b:" + "x" * 40]
)
def test_keys_in_the_environment_are_checked_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="TWINPOOL_API_KEYS") as failure:
        KeyRing("", text)
    assert "x" * 40 not in str(failure.value)
    assert "short" not in str(failure.value)


def test_reading_again_takes_new_keys_and_keeps_the_old_ones_when_it_fails(tmp_path: Path) -> None:
    path, first, second = tmp_path / "keys.toml", new_key(), new_key()
    append_key(path, "acme", first)
    ring = KeyRing(str(path))
    append_key(path, "zeta", second)
    with pytest.raises(Unauthorized):
        ring.tenant(f"Bearer {second}")
    ring.reload()
    assert ring.tenant(f"Bearer {second}").name == "zeta"
    write(path, "nonsense")
    with pytest.raises(ConfigError):
        ring.reload()
    assert ring.tenant(f"Bearer {first}").name == "acme"


def test_no_log_line_has_a_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = new_key()
    KeyRing("", f"acme:{key}").tenant(f"Bearer {key}")
    assert "1 API key(s) of 1 tenant(s)" in caplog.text
    assert key not in caplog.text


def test_the_command_makes_a_key_once_and_lists_tenants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "keys.toml")
    assert main(["api-key", "new", "--tenant", "acme", "--file", path]) == 0
    key = capsys.readouterr().out.strip()
    assert KeyRing(path).tenant(f"Bearer {key}").name == "acme"
    for tenant in ("acme", "zeta"):
        assert main(["api-key", "new", "--tenant", tenant, "--file", path]) == 0
    capsys.readouterr()
    assert main(["api-key", "list", "--file", path]) == 0
    assert capsys.readouterr().out == "acme: 2 keys\nzeta: 1 key\n"
    assert main(["api-key", "new", "--tenant", "no:good", "--file", path]) == 2
    assert "--tenant is 'no:good'" in capsys.readouterr().err
