"""Who sends requests: tenants, and what each may ask of the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from twinpool.config import require


@dataclass(frozen=True, slots=True)
class Tenant:
    """One party that requests are counted for.

    `requests_per_minute` and `tokens_per_minute` (prompt and output together) bound what it may ask for; None: no
    bound. While tenants compete, each is served tokens in proportion to its `weight`. Its prompts are found in the
    prefix cache by nobody else, unless it `shares_cache` with all others that do. `/metrics`, which show all tenants'
    load, are for those that may `read_metrics`.
    """

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    weight: float = 1.0
    shares_cache: bool = False
    read_metrics: bool = False

    def __post_init__(self) -> None:
        for field in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(self, field)
            require(f"{field} of tenant {self.name!r}", value, value is None or value >= 1, "1 or more")
        require(f"weight of tenant {self.name!r}", self.weight, 0.001 <= self.weight <= 1000, "0.001 to 1000")


ANYONE = Tenant("anyone", shares_cache=True, read_metrics=True)
"""Whoever sends a request to a server without API keys."""


class Allowance(NamedTuple):
    """What is left of one quota: of `per_minute`, and in how many seconds all of it is there again if nobody asks. A
    request may have taken more than there was."""

    per_minute: int
    left: float
    full_in_s: float


class Allowances(NamedTuple):
    """What is left of a tenant's quotas; None where it has none."""

    requests: Allowance | None = None
    tokens: Allowance | None = None
