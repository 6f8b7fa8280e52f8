"""Who may use the operator's routes."""

from __future__ import annotations

from twinpool.coordinator.gateway.key_ring import LONGEST_KEY, KeyHash
from twinpool.errors import Forbidden, Unauthorized

ADMIN_PREFIX = "/admin/"
"""Where they are."""


def is_admin(path: str) -> bool:
    """Whether the path is the operator's, whether there is a route or not."""
    return path.startswith(ADMIN_PREFIX) or path == ADMIN_PREFIX.rstrip("/")


class AdminDoor:
    """Lets in whoever has the admin key. Without one nobody is let in, from this host neither: what browsers and
    proxies send comes from there, too."""

    def __init__(self, key: str) -> None:
        self._known = KeyHash.of("admin", key) if key else None

    def check(self, authorization: str | None) -> None:
        """Looks at an `Authorization` header, in a time that does not depend on how much of the key is right.

        Raises:
            Forbidden: there is no admin key.
            Unauthorized: the header has no key, or another one.
        """
        if self._known is None:
            raise Forbidden(
                "the routes below /admin need an admin key, and this server has none; start it with --admin-key-file "
                "FILE, or TWINPOOL_ADMIN_KEY in its environment"
            )
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("this route needs the admin key; send it as Authorization: Bearer KEY")
        if len(key) > LONGEST_KEY or not self._known.matches(key):
            raise Unauthorized(
                "the key is not this server's admin key; an API key of a tenant does not do here"
            )
