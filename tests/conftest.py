"""Settings of all tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import engine
from xdist.scheduler import LoadFileScheduling

# How long an example takes says more of what else runs on the machine than of the code. Whoever looks for more than the
# suite's minutes allow runs with `--hypothesis-profile default`.
settings.register_profile(
    "suite", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

# A test that is still looking for the simplest example when its time is up is killed, and its process with it: then
# nobody is told any example. There is no setting for this; left alone, Hypothesis takes five minutes.
assert engine.MAX_SHRINKING_SECONDS > 0
engine.MAX_SHRINKING_SECONDS = 20

COMPILING = [
    f"tests/unit/test_{name}.py"
    for name in ("compiled_decoder", "bench_engine_command", "attention_cpu", "linear", "amx", "int8_weights")
]
"""They compile most of what the others load from the cache: where tests share processes, first and in one process, as
two that compile the same at once do it twice."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that compile come first, and have the time for it on a busy machine."""
    places = {file: place for place, file in enumerate(COMPILING)}
    items.sort(key=lambda item: places.get(_file(item), len(places)))
    for item in items:
        if _file(item) in places:
            item.add_marker(pytest.mark.timeout(300))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class OneProcessCompiles(LoadFileScheduling):
    """Each file to one process, and all that compile to the same."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "those that compile" if file in COMPILING else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable[..., Any]) -> OneProcessCompiles:
    """Who runs what, with `-n`; files in their order, as the longest tests are not in those with the most."""
    config.option.loadscopereorder = False
    return OneProcessCompiles(config, log)
