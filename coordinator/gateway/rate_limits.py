"""What is left of a tenant's quotas, as headers with OpenAI's names and formats."""

from __future__ import annotations

import math

from twinpool.coordinator.tenants import Allowance, Allowances


def rate_limit_headers(allowances: Allowances) -> dict[str, str]:
    """Six headers, three for each quota that the tenant has."""
    headers: dict[str, str] = {}
    for unit, allowance in (("requests", allowances.requests), ("tokens", allowances.tokens)):
        if allowance is not None:
            headers |= _headers(unit, allowance)
    return headers


def _headers(unit: str, allowance: Allowance) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{unit}": str(allowance.per_minute),
        f"x-ratelimit-remaining-{unit}": str(max(0, math.floor(allowance.left))),
        f"x-ratelimit-reset-{unit}": duration(allowance.full_in_s),
    }


def duration(seconds: float) -> str:
    """A time in OpenAI's form, rounded up: milliseconds below a second, else whole seconds, minutes and hours.

    >>> [duration(s) for s in (0, 0.0171, 1, 59.2, 360, 3601)]
    ['0s', '18ms', '1s', '1m0s', '6m0s', '1h0m1s']
    """
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if milliseconds <= 0:
        return "0s"
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, left_s = divmod(math.ceil(milliseconds / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{left_s}s"
    return f"{minutes}m{left_s}s" if minutes else f"{left_s}s"
