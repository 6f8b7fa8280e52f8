"""The public load generators that this one is compared with: how each is run, and where its report has what."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from twinpool.bench.agreement.figures import PERCENTS, Figures, Metric, Settings
from twinpool.errors import ConfigError

_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Generator:
    """One of them. `command(program, url, model, settings, folder)` leaves a report at `report` in the folder, and
    `figures` reads it; it raises KeyError, IndexError or TypeError if the report is none of a `known` version. It runs
    without the environment variables `unset`."""

    name: str
    known: str
    report: str
    command: Callable[[str, str, str, Settings, Path], Sequence[str]]
    figures: Callable[[Any], Figures]
    unset: frozenset[str] = frozenset()

    def run(self, program: str, url: str, model: str, settings: Settings, folder: Path) -> Figures:
        """What it says of `settings` sent to `url`. Raises ConfigError if it fails, or its report has not what is
        read."""
        report = folder / self.report
        try:
            done = subprocess.run(
                self.command(str(Path(program).absolute()), url, model, settings, folder),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_LIMIT_S,
                check=False,
                cwd=folder,
                env={name: value for name, value in os.environ.items() if name not in self.unset},
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise ConfigError(f"{self.name} cannot be run: {exc}") from exc
        if done.returncode or not report.is_file():
            raise ConfigError(f"{self.name} fails:\n{done.stdout.decode(errors='replace')[-2000:]}")
        return self.read(msgspec.json.decode(report.read_bytes()))

    def read(self, report: Any) -> Figures:
        """The figures of a report. Raises ConfigError if it lacks one."""
        try:
            return self.figures(report)
        except (KeyError, IndexError, TypeError) as exc:
            raise ConfigError(
                f"{self.name}'s report has no {exc}; this reads the reports of {self.name} {self.known}"
            ) from exc


def _guidellm_command(program: str, url: str, model: str, settings: Settings, folder: Path) -> Sequence[str]:
    lengths = f"prompt_tokens={settings.input_tokens},output_tokens={settings.output_tokens}"
    return [
        program, "run",
        "--backend", f"kind=openai_http,target={url},model={model},request_format=/v1/completions",
        "--profile", f"kind=constant,rate={settings.rate_per_s:g}",
        "--constraint", f"kind=max_requests,count={settings.num_requests}",
        "--data", f"kind=synthetic_text,{lengths}",
        "--tokenizer", f"kind=hf_auto,model={settings.tokenizer_dir}",
        "--output", f"kind=json,path={folder / 'guidellm.json'}",
        "--disable-console",
    ]  # fmt: skip


def _guidellm_figures(report: Any) -> Figures:
    metrics = report["benchmarks"][0]["metrics"]

    def percents(name: str, to_ms: float) -> dict[int, float]:
        found = metrics[name]["successful"]["percentiles"]
        return {percent: found[f"p{percent}"] * to_ms for percent in PERCENTS}

    return {
        Metric.TTFT: percents("time_to_first_token_ms", 1.0),
        Metric.TPOT_BY_GAPS: percents("inter_token_latency_ms", 1.0),
        Metric.E2E: percents("request_latency", 1e3),
    }


def _aiperf_command(program: str, url: str, model: str, settings: Settings, folder: Path) -> Sequence[str]:
    return [
        program, "profile",
        "--model", model, "--url", url, "--endpoint-type", "completions", "--streaming",
        "--tokenizer", str(settings.tokenizer_dir), "--use-server-token-count",
        "--arrival-pattern", "constant", "--request-rate", f"{settings.rate_per_s:g}",
        "--request-count", str(settings.num_requests), "--random-seed", str(settings.seed),
        "--isl", str(settings.input_tokens), "--isl-stddev", "0",
        "--osl", str(settings.output_tokens), "--osl-stddev", "0",
        "--workers-max", "1", "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
        "--artifact-dir", str(folder),
    ]  # fmt: skip


def _aiperf_figures(report: Any) -> Figures:
    def percents(name: str) -> dict[int, float]:
        return {percent: float(report[name][f"p{percent}"]) for percent in PERCENTS}

    return {
        Metric.TTFT: percents("time_to_first_token"),
        Metric.ITL: percents("inter_chunk_latency"),
        Metric.TPOT: percents("inter_token_latency"),
        Metric.E2E: percents("request_latency"),
    }


GUIDELLM = Generator("guidellm", "0.8", "guidellm.json", _guidellm_command, _guidellm_figures)
"""https://github.com/vllm-project/guidellm. Its inter-token latency is a request's mean gap, weighted by its gaps."""
# Offline it would take no tokenizer from a directory, only from the hub's cache.
AIPERF = Generator(
    "aiperf",
    "0.13",
    "profile_export_aiperf.json",
    _aiperf_command,
    _aiperf_figures,
    frozenset({"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}),
)
"""https://github.com/ai-dynamo/aiperf. Its inter-chunk latency is each gap, its inter-token latency a mean."""
GENERATORS = (GUIDELLM, AIPERF)
