"""The join token: the one secret that the processes of a deployment share, and the keys that are made from it."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from hashlib import blake2b

from twinpool.errors import ConfigError

KEY_BYTES = 32
VARIABLE = "TWINPOOL_JOIN_TOKEN"
"""The environment variable that hands it to a process: only that user can read it there."""
_TOKEN = re.compile(r"[A-Za-z0-9_+/=-]{43,256}")


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A secret of at least 256 bits: 43 to 256 characters of base64 or hexadecimal. Whoever has it is one of us.

    It is in no log and no error: neither its `repr` nor what it raises shows it.
    """

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        if not _TOKEN.fullmatch(self.text):
            raise ConfigError(
                f"the join token has {len(self.text)} characters; allowed: 43 to 256 letters, digits and _ + / = -, "
                "at random; `twinpool join-token` makes one"
            )

    @classmethod
    def fresh(cls) -> JoinToken:
        """A new random one."""
        return cls(secrets.token_urlsafe(KEY_BYTES))

    def key(self, purpose: str) -> bytes:
        """A key of 256 bits for this purpose (at most 16 bytes of ASCII). Keys for two purposes tell nothing about
        each other, nor about the token.
        """
        secret = blake2b(self.text.encode(), digest_size=64).digest()
        return blake2b(key=secret, person=purpose.encode(), digest_size=KEY_BYTES).digest()
