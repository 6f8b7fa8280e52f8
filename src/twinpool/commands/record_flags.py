"""Flags of `serve` for the record of requests."""

from __future__ import annotations

import argparse

from twinpool.config import RECORD_MB, RecordConfig
from twinpool.errors import ConfigError


def add_record_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `record_config`."""
    group = parser.add_argument_group("record of requests")
    group.add_argument(
        "--record", metavar="FILE",
        help="a line of JSON for each request when it has ended, without its text, as a trace that `twinpool bench "
        "--dataset-name jsonl-trace` can replay (default: none); a FILE of before is moved to FILE.1",
    )  # fmt: skip
    group.add_argument(
        "--record-max-mb", type=int, default=RECORD_MB, metavar="MB",
        help=f"size at which FILE is moved to FILE.1 and begun anew (default {RECORD_MB})",
    )  # fmt: skip
    group.add_argument("--record-ids", action="store_true", help="lines have the requests' ids too")


def record_config(args: argparse.Namespace) -> RecordConfig | None:
    """The flags as a checked value; None without a record. Raises ConfigError."""
    if args.record is not None:
        return RecordConfig(args.record, args.record_max_mb, args.record_ids)
    if args.record_ids or args.record_max_mb != RECORD_MB:
        flag = "--record-ids" if args.record_ids else "--record-max-mb"
        raise ConfigError(f"{flag} is for --record FILE; give that too, or leave it out")
    return None
