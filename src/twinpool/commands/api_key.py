"""`twinpool api-key`: makes API keys for `twinpool serve --api-keys FILE`, and lists whose there are."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

DEFAULT_FILE = "api-keys.toml"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "api-key",
        help="make API keys, list whose there are",
        description="Makes API keys for `twinpool serve --api-keys FILE`. The file has hashes only: who can read it "
        "cannot use the keys.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    new = actions.add_parser("new", help="make a key, print it once, and add its hash to the file")
    new.add_argument("--tenant", required=True, metavar="NAME", help="whose key it is")
    listing = actions.add_parser("list", help="list tenants, and how many keys each has")
    for action in (new, listing):
        action.add_argument(
            "--file", default=DEFAULT_FILE, metavar="FILE", help=f"the key file (default {DEFAULT_FILE})"
        )
    return parser


def run(args: argparse.Namespace) -> int:
    """Makes a key, or lists tenants. Raises ConfigError."""
    from twinpool.coordinator.gateway.key_ring import append_key, new_key, read_keys

    path = Path(args.file)
    if args.action == "new":
        key = new_key()
        append_key(path, args.tenant, key)
        print(f"the key is shown this once; its hash is in {path}", file=sys.stderr)
        print(key)
        return 0
    keys = read_keys(path)
    counts = Counter(known.tenant for known in keys.hashes)
    for tenant in sorted(counts.keys() | keys.tenants.keys()):
        print(f"{tenant}: {counts[tenant]} key{'' if counts[tenant] == 1 else 's'}")
    return 0
