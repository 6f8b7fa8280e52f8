"""Another load generator on the same server: do its figures agree with ours?

`python -m twinpool.bench.agreement --guidellm PATH` runs `guidellm` (https://github.com/vllm-project/guidellm, `pip
install guidellm` into an environment of its own) and `twinpool bench`'s generator one after the other, with the same
settings, on scripted servers that answer the n-th request with the same delays both times. It prints the percentiles of
both and of what the servers noted themselves, and ends with status 1 if the generators differ by more than 2 %. With
`--url` the server is a running one, whose own noise then is in the differences too, and which notes nothing.

What guidellm calls inter-token latency is the mean gap of a request (our TPOT), each request weighted by its gaps.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from twinpool.bench.scripted_server import MODEL, Sent, running, sent_by
from twinpool.bench.serving.arrivals import Pacing, Process, schedule
from twinpool.bench.serving.datasets import DatasetSettings, RandomLengths, make_requests
from twinpool.bench.serving.distributions import percentile
from twinpool.bench.serving.generator import run_load
from twinpool.bench.serving.metrics import e2e_s, tpot_s, ttft_s
from twinpool.bench.serving.record import Ending, RequestRecord, Run
from twinpool.bench.serving.settings import LoadSettings, ServerKind
from twinpool.config import require
from twinpool.errors import ConfigError, TwinpoolError

EXIT_AGREE, EXIT_DIFFER, EXIT_WRONG = 0, 1, 2
TOLERANCE = 0.02
PERCENTS = (50, 90, 95, 99)
_LIMIT_S = 300.0
_DELAYS = ("--ttft-ms", "200", "--itl-ms", "20", "--jitter", "0.4")
_TTFT, _TPOT, _E2E = "TTFT", "TPOT (guidellm: ITL)", "E2E"


@dataclass(frozen=True, slots=True)
class Settings:
    """What both generators send: `num_requests` at even gaps."""

    num_requests: int
    rate_per_s: float
    input_tokens: int
    output_tokens: int
    tokenizer_dir: Path
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, in milliseconds."""

    metric: str
    percent: int
    ours_ms: float
    theirs_ms: float
    servers_ms: float | None
    """What the server noted in our run."""

    @property
    def difference(self) -> float:
        """Ours over theirs, less 1."""
        return self.ours_ms / self.theirs_ms - 1

    def __str__(self) -> str:
        servers = "" if self.servers_ms is None else f"{self.servers_ms:>12.2f}"
        return (
            f"{self.metric:<22}{f'p{self.percent}':>5}{self.ours_ms:>12.2f}{self.theirs_ms:>12.2f}"
            f"{self.difference:>11.2%}{servers}"
        )


HEADER = f"{'ms':<22}{'':>5}{'twinpool':>12}{'guidellm':>12}{'difference':>11}{'server':>12}"


def compared(run: Run, report: dict[str, Any], log: Sequence[Sent] | None) -> list[Row]:
    """The figures of our run beside those of guidellm's report, and of what the server noted in ours.

    Raises ConfigError if the report has not what is read.
    """
    try:
        metrics = report["benchmarks"][0]["metrics"]
        theirs_ms = {
            _TTFT: _percentiles(metrics["time_to_first_token_ms"], 1.0),
            _TPOT: _percentiles(metrics["inter_token_latency_ms"], 1.0),
            _E2E: _percentiles(metrics["request_latency"], 1e3),
        }
    except (KeyError, IndexError, TypeError) as exc:
        raise ConfigError(f"guidellm's report has no {exc}; this reads the reports of guidellm 0.8") from exc
    ours_s = _client_s([record for record in run.requests if record.ending is Ending.COMPLETED])
    servers_s = None if log is None else _server_s(log)
    return [
        Row(
            metric,
            percent,
            percentile(ours_s[metric], percent) * 1e3,
            theirs_ms[metric][percent],
            None if servers_s is None else percentile(servers_s[metric], percent) * 1e3,
        )
        for metric in theirs_ms
        for percent in PERCENTS
    ]


def _client_s(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    return {
        _TTFT: [found for record in records if (found := ttft_s(record)) is not None],
        _TPOT: [gap for record in records for gap in _mean_gaps_s(record)],
        _E2E: [found for record in records if (found := e2e_s(record)) is not None],
    }


def _server_s(log: Sequence[Sent]) -> dict[str, list[float]]:
    spans = [(sent.pieces_at[0], sent.pieces_at[-1], len(sent.pieces_at) - 1) for sent in log]
    return {
        _TTFT: [first - sent.received_at for sent, (first, _, _) in zip(log, spans, strict=True)],
        _TPOT: [gap for first, last, gaps in spans for gap in [(last - first) / max(gaps, 1)] * gaps],
        _E2E: [last - sent.received_at for sent, (_, last, _) in zip(log, spans, strict=True)],
    }


def _mean_gaps_s(record: RequestRecord) -> list[float]:
    """As often as the request has gaps."""
    gap = tpot_s(record)
    return [] if gap is None else [gap] * (record.output_tokens - 1)


def _percentiles(metric: dict[str, Any], to_ms: float) -> dict[int, float]:
    found = metric["successful"]["percentiles"]
    return {percent: found[f"p{percent}"] * to_ms for percent in PERCENTS}


def run_guidellm(program: str, url: str, model: str, settings: Settings, folder: Path) -> dict[str, Any]:
    """Its report. Raises ConfigError if it fails."""
    report = folder / "guidellm.json"
    lengths = f"prompt_tokens={settings.input_tokens},output_tokens={settings.output_tokens}"
    command = [
        program, "run",
        "--backend", f"kind=openai_http,target={url},model={model},request_format=/v1/completions",
        "--profile", f"kind=constant,rate={settings.rate_per_s:g}",
        "--constraint", f"kind=max_requests,count={settings.num_requests}",
        "--data", f"kind=synthetic_text,{lengths}",
        "--tokenizer", f"kind=hf_auto,model={settings.tokenizer_dir}",
        "--output", f"kind=json,path={report}",
        "--disable-console",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ConfigError(f"guidellm cannot be run: {exc}") from exc
    if done.returncode or not report.is_file():
        raise ConfigError(f"guidellm fails:\n{done.stdout.decode(errors='replace')[-2000:]}")
    decoded: dict[str, Any] = msgspec.json.decode(report.read_bytes())
    return decoded


def run_ours(url: str, model: str, settings: Settings) -> Run:
    """The same load by this project's generator."""
    tokenizer = tokenizers.Tokenizer.from_file(str(settings.tokenizer_dir / "tokenizer.json"))
    lengths = RandomLengths(input_len=settings.input_tokens, output_len=settings.output_tokens)
    made = make_requests(DatasetSettings(random=lengths), tokenizer, settings.num_requests, settings.seed)
    requests = schedule(made, Pacing(Process.CONSTANT, settings.rate_per_s), settings.seed)
    return run_load(requests, LoadSettings(url, model, kind=ServerKind.VLLM, with_timelines=False))


def _server(url: str | None) -> contextlib.AbstractContextManager[str]:
    """The running one, or a scripted one, whose delays begin anew."""
    return running(*_DELAYS) if url is None else contextlib.nullcontext(url)


def _default_tokenizer() -> Path:
    done = subprocess.run([sys.executable, "-m", "twinpool", "fetch"], stdout=subprocess.PIPE, check=False)
    require(
        "--tokenizer",
        "default",
        done.returncode == 0,
        "a model's directory (the default one is not to be had)",
    )
    return Path(done.stdout.decode().strip().splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both, prints, judges. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 all figures agree within 2 %, 1 one does not, 2 something could not be run.",
    )
    parser.add_argument("--guidellm", default=shutil.which("guidellm"), metavar="PATH", help="the program")
    parser.add_argument("--url", help="a running server (default: scripted ones)")
    parser.add_argument("--model", metavar="NAME", help="what --url serves")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="a model's directory (the default model's)"
    )
    parser.add_argument("--num-requests", type=int, default=200, metavar="N", help="200")
    parser.add_argument("--rate", type=float, default=10.0, metavar="R", help="10 per second, at even gaps")
    parser.add_argument("--input-tokens", type=int, default=50, metavar="N", help="50")
    parser.add_argument("--output-tokens", type=int, default=40, metavar="N", help="40")
    args = parser.parse_args(argv)
    try:
        return _compare(args)
    except TwinpoolError as exc:
        print(exc, file=sys.stderr)
        return EXIT_WRONG


def _compare(args: argparse.Namespace) -> int:
    require("--guidellm", args.guidellm, args.guidellm is not None, "the path of an installed guidellm")
    require("--model", args.model, (args.model is None) == (args.url is None), "the model's name, with --url")
    settings = Settings(
        num_requests=args.num_requests,
        rate_per_s=args.rate,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        tokenizer_dir=(args.tokenizer or _default_tokenizer()).expanduser(),
    )
    model = args.model or MODEL
    with tempfile.TemporaryDirectory() as folder:
        print(f"guidellm: {settings.num_requests} requests at {settings.rate_per_s:g}/s", flush=True)
        with _server(args.url) as url:
            report = run_guidellm(args.guidellm, url, model, settings, Path(folder))
    print("twinpool: the same", flush=True)
    with _server(args.url) as url:
        run = run_ours(url, model, settings)
        log = None if args.url is not None else list(sent_by(url).values())
    rows = compared(run, report, log)
    print("\n".join([HEADER, *map(str, rows)]))
    differing = [row for row in rows if abs(row.difference) > TOLERANCE]
    print(f"{len(rows) - len(differing)} of {len(rows)} figures agree within {TOLERANCE:.0%}")
    return EXIT_DIFFER if differing else EXIT_AGREE


if __name__ == "__main__":
    sys.exit(main())
