"""Which origins' web pages may use the server from a script (CORS, as the Fetch standard has it)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from twinpool.coordinator.gateway.documented_answers import HEADERS

EVERY_ORIGIN = "*"
PREFLIGHT_S = 600
"""How long a browser may remember what it was told before a request."""
EXPOSED = tuple(HEADERS)
"""What a script may read of an answer's headers."""


class CrossOrigin:
    """The headers that tell a browser whether a page of another origin may have an answer.

    Keys come in a header that the script itself sets, so nothing is allowed that a browser adds by itself (cookies).
    Without `origins` no answer says anything, and browsers keep it from pages of other origins.
    """

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """Of an answer to a request that came from a page of `origin` (None: from no page)."""
        if not self._origins:
            return {}
        allowed = EVERY_ORIGIN if EVERY_ORIGIN in self._origins else origin
        found = {} if allowed == EVERY_ORIGIN else {"vary": "Origin"}
        if allowed == EVERY_ORIGIN or allowed in self._origins:
            found["access-control-allow-origin"] = allowed
            found["access-control-expose-headers"] = ", ".join(EXPOSED)
        return found

    def preflight(self, headers: Mapping[str, str], methods: Sequence[str]) -> dict[str, str]:
        """Of the answer to the question whether a request may come that is one of `methods`, in addition."""
        if "access-control-request-method" not in headers:
            return {}
        if "access-control-allow-origin" not in self.headers(headers.get("origin")):
            return {}
        return {
            "access-control-allow-methods": ", ".join(methods),
            "access-control-allow-headers": headers.get("access-control-request-headers", ""),
            "access-control-max-age": str(PREFLIGHT_S),
        }
