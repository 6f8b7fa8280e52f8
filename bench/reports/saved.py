"""Saved results, read again: what `twinpool report` makes a page of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from twinpool.bench.reports.measured import arm_of
from twinpool.bench.reports.model import ArmReport, Fact, Report, decode_report
from twinpool.bench.serving.record import Run, decode_run
from twinpool.bench.serving.slo import Slo
from twinpool.bench.serving.summary import WindowKind, window_of
from twinpool.bench.serving.verdict import generator_faults
from twinpool.errors import ConfigError

_WANTED = "a report's JSON, or a run with its requests (`twinpool bench --save-records`)"


def read_saved(path: Path) -> Report | Run:
    """What the file holds. Raises ConfigError: it cannot be read, or is neither a report nor a run."""
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    try:
        fields = json.loads(data)
    except ValueError as exc:
        raise ConfigError(f"{path} is no JSON: {exc}; wanted: {_WANTED}") from exc
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds a {type(fields).__name__}; wanted: {_WANTED}")
    try:
        if "arms" in fields:
            return decode_report(data)
        if "requests" in fields:
            return decode_run(data)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{path} is no such file of this version: {exc}; wanted: {_WANTED}") from exc
    raise ConfigError(f"{path} has no requests, only what they come to; wanted: {_WANTED}")


def report_of(
    runs: Sequence[tuple[str, Run]], title: str, slo: Slo | None, slo_words: str, created_at: str
) -> Report:
    """A report on runs: those of one name are repetitions of one arm. It compares nothing."""
    named: dict[str, list[Run]] = {}
    for name, run in runs:
        named.setdefault(name, []).append(run)
    arms = tuple(_arm(name, own, slo) for name, own in named.items())
    shared = _shared([run.settings for _, run in runs])
    return Report(
        title=title,
        created_at=created_at,
        arms=arms,
        slo=slo_words,
        settings=tuple(
            Fact(name, value if isinstance(value, str) else json.dumps(value))
            for name, value in shared.items()
        ),
    )


def _arm(name: str, runs: Sequence[Run], slo: Slo | None) -> ArmReport:
    faults, windows = [], []
    for number, run in enumerate(runs, 1):
        # In a burst all are meant for one moment, and how long sending them takes is no lag.
        is_paced = len({record.intended_at_s for record in run.requests}) > 1
        after = f" (repetition {number})" if len(runs) > 1 else ""
        faults += [fault + after for fault in generator_faults(run, is_paced=is_paced)]
        if run.requests:
            window, fault = window_of(run, *_asked_window(run.settings))
            faults += [fault + after] if fault else []
            windows.append(window)
    # As `twinpool bench` told them; a run without requests has no window.
    return arm_of(name, runs, slo, windows if len(windows) == len(runs) else (), not_a_result=faults)


def _asked_window(settings: Mapping[str, Any]) -> tuple[WindowKind, float]:
    is_steady = settings.get("window") == WindowKind.STEADY_STATE
    warm_up_s = settings.get("warm_up")
    kind = WindowKind.STEADY_STATE if is_steady else WindowKind.CLOSED_COHORT
    return kind, float(warm_up_s) if isinstance(warm_up_s, int | float) else 0.0


def _shared(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all runs were set to alike."""
    first, *others = settings
    return {name: value for name, value in first.items() if all(each.get(name) == value for each in others)}
