"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes says more of what else runs on the machine than of the code. Whoever looks for more than the
# suite's minutes allow runs with `--hypothesis-profile default`.
settings.register_profile(
    "suite", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
