"""Whose prompts find whose blocks in the prefix cache."""

from __future__ import annotations

import hashlib
import secrets

from twinpool.coordinator.tenants import ANYONE, Tenant

_SALT_BYTES = 16


class CacheSalts:
    """Keeps tenants' caches apart.

    A prefix's hash begins with a salt. That hash is fast and not collision-resistant, so whoever knew another tenant's
    salt could probe for its prompts, or plant blocks under their hashes. Hence salts are keyed hashes (BLAKE2b), under
    a secret that this server draws at its start and tells nobody. A client's own `cache_salt` divides its tenant's
    cache further.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def salt(self, tenant: Tenant, client_salt: str) -> str:
        """The salt of a request. Without keys and without a salt of the client's it is empty."""
        if tenant is ANYONE and not client_salt:
            return ""
        group = b"shared" if tenant.shares_cache else b"tenant " + tenant.name.encode()
        text = client_salt.encode(errors="surrogatepass")
        return hashlib.blake2b(
            len(group).to_bytes(4) + group + text, digest_size=_SALT_BYTES, key=self._secret
        ).hexdigest()
