"""`twinpool metrics`: the metrics of one request, from its events."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.bench.serving.event_csv import RequestEvents
    from twinpool.bench.serving.metrics import RequestMetrics

_EPILOG = """\
a file, of a request whose two tokens came 190 and 215 ms after it was sent:

  event,time_ms,tokens
  sent,0
  first_token,190
  token,215
  end,215
  declared_tpot_ms,25

docs/metrics.md lists the events, what can be declared, and the definitions."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "metrics",
        help="TTFT, ITL, TPOT, E2E and rates of one request, from a CSV of its events",
        description="Computes a request's metrics from its events, and refuses events that cannot have happened, or "
        "that do not give what the file declares.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE.csv", help="of events, or - for standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON object, times in seconds")
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the metrics. Raises ConfigError: the file cannot be read, or is inconsistent."""
    from twinpool.bench.serving.declared import read_request

    try:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8-sig")
    except OSError as exc:
        raise ConfigError(f"FILE.csv is {args.file!r}, which cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"FILE.csv is {args.file!r}, which is not text: {exc.reason}") from exc
    try:
        events, request = read_request(text)
    except ConfigError as exc:
        raise ConfigError(f"{args.file}: {exc}") from exc
    print(
        json.dumps(as_json(events, request), indent=2) if args.json else "\n".join(describe(events, request))
    )
    return 0


def describe(events: RequestEvents, request: RequestMetrics) -> list[str]:
    """The lines that `run` prints; what does not exist has none."""
    from twinpool.bench.serving.distributions import distribution
    from twinpool.bench.serving.event_csv import Event, stages_of

    record = request.record
    is_sent = events.at_s(Event.SENT) is not None
    rows = [
        ("ended", record.ending.value),
        ("output", f"{record.output_tokens:,} tokens in {len(record.chunks):,} chunks"),
    ]
    if request.ttft_s is not None:
        rows.append(("TTFT", f"{_ms(request.ttft_s)} from {Event.SENT if is_sent else Event.RECEIVED}"))
        if events.at_s(Event.INTENDED) is not None:
            rows.append(("", f"{_ms(request.ttft_from_intended_s)} from {Event.INTENDED}"))
        if is_sent and (received_at := events.at_s(Event.RECEIVED)) is not None:
            rows.append(("", f"{_ms(record.chunks[0].at_s - received_at)} from {Event.RECEIVED}"))
        rows += [("", f"{_ms(stage.duration_s)} {stage.name}") for stage in stages_of(events)]
    if (gaps := distribution(request.itls_s)) is not None:
        rows.append(("ITL", f"{_ms(gaps.mean)} mean of {gaps.count:,} gaps"))
        rows += [
            ("", f"{_ms(gap)} {name}")
            for gap, name in ((gaps.p50, "p50"), (gaps.p99, "p99"), (gaps.max, "max"))
        ]
    rows += [
        (label, f"{_ms(seconds)}{added}")
        for label, seconds, added in (
            ("TPOT", request.tpot_s, ""),
            ("E2E", request.e2e_s, ""),
            ("", _decode_s(request), " from first output to last"),
        )
        if seconds is not None
    ]
    rows += [
        (label, f"{rate:12,.2f} tokens/s")
        for label, rate in (
            ("decode rate", request.decode_rate_per_s),
            ("whole-request rate", request.request_rate_per_s),
        )
        if rate is not None
    ]
    width = max(len(label) for label, _ in rows)
    return [f"{label:<{width}}  {value}" for label, value in rows]


def as_json(events: RequestEvents, request: RequestMetrics) -> dict[str, Any]:
    """What `run --json` prints: times in seconds, rates in tokens/s, None for what does not exist."""
    from twinpool.bench.serving.event_csv import stages_of

    record = request.record
    return {
        "ending": record.ending.value,
        "output_tokens": record.output_tokens,
        "num_chunks": len(record.chunks),
        "ttft_s": request.ttft_s,
        "ttft_from_intended_s": request.ttft_from_intended_s,
        "stages_s": {stage.name: stage.duration_s for stage in stages_of(events)},
        "itls_s": request.itls_s.tolist(),
        "itl_p99_s": request.itl_p99_s,
        "chunk_gaps_s": request.chunk_gaps_s.tolist(),
        "tpot_s": request.tpot_s,
        "e2e_s": request.e2e_s,
        "e2e_from_intended_s": request.e2e_from_intended_s,
        "decode_rate_per_s": request.decode_rate_per_s,
        "request_rate_per_s": request.request_rate_per_s,
    }


def _decode_s(request: RequestMetrics) -> float | None:
    from twinpool.bench.serving.metrics import decode_s

    return decode_s(request.record)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:12,.3f} ms"
