"""API keys: who may send requests, and as which tenant.

A key is 32 random bytes, so guessing it is hopeless however fast the hash is: a salted BLAKE2b hides it in the file
as well as a slow password hash would, and costs a request a microsecond. Slow hashes are for secrets that people
think up.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinpool.config import is_name, require
from twinpool.coordinator.tenants import ANYONE, Tenant
from twinpool.errors import ConfigError, Unauthorized

KEY_BYTES = 32
KEY_PREFIX = "tp-"
SHORTEST_KEY = 16
LONGEST_KEY = 256
"""Characters of a key that somebody else made, for `TWINPOOL_API_KEYS`; a longer one in a request is not hashed."""
_SALT_BYTES = 16
_DIGEST_BYTES = 32
_SCHEME = "blake2b"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeyHash:
    """What is kept of a key, and its tenant."""

    tenant: str
    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, tenant: str, key: str) -> KeyHash:
        """The hash of `key` under a fresh salt."""
        salt = secrets.token_bytes(_SALT_BYTES)
        return cls(tenant, salt, _digest(salt, key))

    @classmethod
    def parse(cls, tenant: str, text: str) -> KeyHash:
        """Reads what `str` writes. Raises ValueError."""
        scheme, salt, digest = text.split(":")
        found = cls(tenant, bytes.fromhex(salt), bytes.fromhex(digest))
        if scheme != _SCHEME or len(found.salt) != _SALT_BYTES or len(found.digest) != _DIGEST_BYTES:
            raise ValueError(text)
        return found

    def __str__(self) -> str:
        return f"{_SCHEME}:{self.salt.hex()}:{self.digest.hex()}"

    def matches(self, key: str) -> bool:
        """Whether `key` is it, in a time that does not depend on how much of it is right."""
        return hmac.compare_digest(_digest(self.salt, key), self.digest)


@dataclass(frozen=True, slots=True)
class Keys:
    """A key file's content."""

    hashes: tuple[KeyHash, ...]
    tenants: Mapping[str, Tenant]


class KeyRing:
    """Knows the tenant of every key. Keys come from a file, which may be read again, and from the environment.

    Raises:
        ConfigError: the file or a key is wrong, or there is none.
    """

    def __init__(self, path: str = "", environment: str = "") -> None:
        self._path = Path(path) if path else None
        self._fixed = tuple(_from_environment(environment))
        self._keys = Keys((), {})
        self.reload()

    def reload(self) -> None:
        """Reads the file again. It holds for requests that come from now on; running ones go on.

        Raises:
            ConfigError: the file is wrong; the keys stay as they were.
        """
        keys = Keys((), {}) if self._path is None else read_keys(self._path)
        where = f"--api-keys {self._path}" if self._path else "TWINPOOL_API_KEYS"
        if not (keys.hashes or self._fixed):
            raise ConfigError(f"{where} has no key; make one with `twinpool api-key new --tenant NAME`")
        if keyless := keys.tenants.keys() - {known.tenant for known in (*self._fixed, *keys.hashes)}:
            name = min(keyless)
            raise ConfigError(
                f"{where} has [tenant.{name}], but no key of {name!r}; correct the name, leave the table out, "
                f"or make a key with `twinpool api-key new --tenant {name} --file {self._path}`"
            )
        self._keys = keys
        log.info("%d API key(s) of %d tenant(s)", len(self._all), len({h.tenant for h in self._all}))

    def tenant(self, authorization: str | None) -> Tenant:
        """The tenant whose key is in this `Authorization` header.

        Every key is compared, so the time that it takes tells nothing about which ones exist.

        Raises:
            Unauthorized: the header has no key, or one that is nobody's.
        """
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized(
                "this server needs an API key; send it as Authorization: Bearer KEY, or as x-api-key: KEY"
            )
        found: str | None = None
        if len(key) <= LONGEST_KEY:
            for known in self._all:
                if known.matches(key):
                    found = known.tenant
        if found is None:
            raise Unauthorized("the API key is not one of this server's; check it, or ask for a new one")
        return self._keys.tenants.get(found) or Tenant(found)

    @property
    def _all(self) -> tuple[KeyHash, ...]:
        return self._fixed + self._keys.hashes


def new_key() -> str:
    """A fresh key."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def read_keys(path: Path) -> Keys:
    """Reads a key file.

    Raises:
        ConfigError: the file cannot be read, its mode lets others at it, or something in it is wrong.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = tomllib.load(file)
    except OSError as exc:
        raise ConfigError(f"--api-keys is {str(path)!r}, which cannot be read ({exc.strerror})") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--api-keys {path} is no TOML: {exc}") from exc
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        raise ConfigError(f"--api-keys {path} has the mode {mode:04o}, open to others; chmod 600 it")
    _require_only(path, "the file", content, ("key", "tenant"))
    listed, described = content.get("key", []), content.get("tenant", {})
    if not (isinstance(listed, list) and isinstance(described, dict)):
        raise ConfigError(f"--api-keys {path} must have [[key]] and [tenant.NAME] tables only")
    return Keys(
        tuple(_read_key(path, entry) for entry in listed),
        {name: _read_tenant(path, name, entry) for name, entry in described.items()},
    )


def append_key(path: Path, tenant: str, key: str) -> None:
    """Adds the hash of `key` to the file. A new file gets the mode 0600.

    Raises:
        ConfigError: the tenant's name or the file is wrong, or the file cannot be written.
    """
    require_tenant_name("--tenant", tenant)
    entry = f'[[key]]\ntenant = "{tenant}"\nhash = "{KeyHash.of(tenant, key)}"\n'
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a") as file:
            read_keys(path)  # nothing is added to a file that is wrong
            file.write(("\n" if file.tell() else "") + entry)
    except OSError as exc:
        raise ConfigError(f"--file is {str(path)!r}, which cannot be written ({exc.strerror})") from exc


def require_tenant_name(setting: str, name: object) -> None:
    """Raises ConfigError unless `name` can be a tenant's; `setting` is where it was given."""
    require(setting, name, isinstance(name, str) and is_name(name) and name != ANYONE.name,
            f"1 to 64 letters, digits, - and _, but not {ANYONE.name!r}")  # fmt: skip


def _digest(salt: bytes, key: str) -> bytes:
    return hashlib.blake2b(
        key.encode(errors="surrogateescape"), salt=salt, digest_size=_DIGEST_BYTES
    ).digest()


def _from_environment(text: str) -> Iterable[KeyHash]:
    for pair in filter(None, (part.strip() for part in text.split(","))):
        tenant, _, key = pair.partition(":")
        require_tenant_name("TWINPOOL_API_KEYS (tenant:key,…) has a tenant that", tenant)
        if not SHORTEST_KEY <= len(key) <= LONGEST_KEY:
            raise ConfigError(
                f"TWINPOOL_API_KEYS has a key of {len(key)} characters for {tenant!r}; allowed: {SHORTEST_KEY} to "
                f"{LONGEST_KEY}, at random (`twinpool api-key new` makes one)"
            )
        yield KeyHash.of(tenant, key)


def _read_key(path: Path, entry: Any) -> KeyHash:
    _require_only(path, "[[key]]", entry, ("tenant", "hash"))
    tenant, text = entry.get("tenant"), entry.get("hash")
    require_tenant_name(f"--api-keys {path}: tenant of a [[key]]", tenant)
    try:
        return KeyHash.parse(tenant, text)
    except (ValueError, AttributeError) as exc:
        raise ConfigError(
            f"--api-keys {path}: a key of tenant {tenant!r} has no hash as `twinpool api-key new` writes it"
        ) from exc


def _read_tenant(path: Path, name: str, entry: Any) -> Tenant:
    require_tenant_name(f"--api-keys {path}: [tenant.NAME]", name)
    _require_only(path, f"[tenant.{name}]", entry, tuple(_TENANT_FIELDS))
    for field, value in entry.items():
        kind, words = _TENANT_FIELDS[field]
        is_right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        require(f"--api-keys {path}: {field} of tenant {name!r}", value, is_right, words)
    return Tenant(name, **entry)


_TENANT_FIELDS: Mapping[str, tuple[Any, str]] = {
    "requests_per_minute": (int, "a whole number"),
    "tokens_per_minute": (int, "a whole number"),
    "weight": (int | float, "a number"),
    "shares_cache": (bool, "true or false"),
    "read_metrics": (bool, "true or false"),
}
"""What a `[tenant.NAME]` table may say: fields of `Tenant`, which checks their ranges."""


def _require_only(path: Path, where: str, entry: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(entry, dict) or (unknown := entry.keys() - set(allowed)):
        found = f"has {min(unknown)!r}" if isinstance(entry, dict) else "is no table"
        raise ConfigError(f"--api-keys {path}: {where} {found}; allowed: {', '.join(allowed)}")
