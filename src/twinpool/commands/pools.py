"""`twinpool pools`: who is in the pools of a running server, and changes of that."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from twinpool.commands.admin_key import VARIABLE, add_admin_key_flags, given_admin_key
from twinpool.commands.flags import one_of
from twinpool.config import Role, is_name, require
from twinpool.errors import ConfigError, RequestFailed

_TIMEOUT_S = 10.0
MOST_WAIT_S = 3600.0
"""As the server has it."""
_PLAIN_WIDTH = 240
"""Columns where no terminal says how many there are: a worker is a line."""
_HEADINGS = ("worker", "role", "state", "for", "attempts", "sequences", "KV used", "cached", "links")
_EXAMPLES = """\
examples:
  twinpool pools                             every worker: role, state, load, KV, links
  twinpool pools set --prefill 2 --decode 3  roles change where that helps both pools, the rest is started or drained
  twinpool pools role decode-1 prefill       without a restart: model and prefix cache stay
  twinpool pools drain decode-2 --wait 10    it ends, once what runs there has ended, or after 10 s gone elsewhere

docs/pools.md says what happens to running requests.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "pools",
        help="see and change the pools of a running server",
        description="Shows the workers of a running server, or changes the pools. The server must have an admin key.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_common(parser)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")
    wanted = actions.add_parser("set", help="have so many prefill and decode workers")
    wanted.add_argument("--prefill", type=int, metavar="N", help="prefill workers (default: as many as now)")
    wanted.add_argument("--decode", type=int, metavar="M", help="decode workers (default: as many as now)")
    drain = actions.add_parser("drain", help="end a worker")
    drain.add_argument("worker", metavar="WORKER", help="its name, as `twinpool pools` shows it")
    role = actions.add_parser("role", help="give a worker another role, without a restart")
    role.add_argument("worker", metavar="WORKER", help="its name, as `twinpool pools` shows it")
    role.add_argument(
        "role", type=one_of(Role.PREFILL, Role.DECODE), metavar="ROLE", help="prefill or decode"
    )
    for action in (wanted, drain, role):
        action.add_argument(
            "--wait",
            type=float,
            metavar="SECONDS",
            help="what runs on workers that go has so long to end; what is left then goes on elsewhere (default 2)",
        )
        _add_common(action, argparse.SUPPRESS)
    return parser


def _add_common(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Before or after the action; there without a default, which would hide what was given before it."""
    parser.add_argument(
        "--url",
        default=default or "http://127.0.0.1:8000",
        help="the server (default http://127.0.0.1:8000)",
    )
    add_admin_key_flags(parser, "the server's admin key", default)
    parser.add_argument(
        "--json", action="store_true", default=default or False, help="print the server's answer"
    )


def run(args: argparse.Namespace) -> int:
    """Shows the pools, or has them changed and tells what was begun.

    Raises:
        ConfigError: no server answers at --url, or there is no key.
        RequestFailed: the server refuses; its own words.
    """
    if not (key := given_admin_key(args)):
        raise ConfigError(
            f"there is no admin key; give --admin-key-file FILE or {VARIABLE}, the same as to `twinpool serve`"
        )
    answer = _ask(args, key)
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    if args.action is not None:
        print("\n".join([*described(answer["changes"]), *awaited(answer["workers"])]))
    else:
        print_table(answer)
    return 0


def described(changes: Sequence[Mapping[str, str]]) -> list[str]:
    """What was begun, a line for each change."""
    words = {
        "role": "{worker} becomes a {role} worker",
        "drain": "{worker} is drained",
        "start": "a {role} worker starts",
    }
    if not changes:
        return ["nothing to do: the pools are, or will be, as wanted"]
    return [words[change["change"]].format(**change) for change in changes]


def awaited(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is not there yet, a line for each worker that something must end or come for; and where to look."""
    found = []
    absent = [worker for worker in workers if worker["state"] != "serves"]
    for worker in absent:
        name = worker["worker"]
        match worker["state"]:
            case "starts":
                found.append(f"{name} waits for {worker['waits_for']}")
            case "failed":
                found.append(f"{name}: failed: {worker['reason']}")
            case _ if worker["attempts"]:
                found.append(
                    f"{name} goes once what runs there has ended ({worker['attempts']} attempts); in "
                    f"{worker['hands_on_in_s']:g} s what is left is handed on"
                )
    return [*found, "`twinpool pools` shows how far it is"] if absent else []


def print_table(answer: Mapping[str, Any]) -> None:
    """The workers, and below them what is missing."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*_HEADINGS, box=None, pad_edge=False)
    for column in table.columns[:-1]:
        column.no_wrap = True
    for worker in answer["workers"]:
        table.add_row(*cells_of(worker))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    console.print(table)
    absent = [worker for worker in answer["workers"] if "attempts" not in worker]
    lines = [answer["reason"] if answer["ready"] else f"not ready: {answer['reason']}", *awaited(absent)[:-1]]
    console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
    if "autotune" in answer:
        console.print(
            "\n".join(tuning_lines(answer["autotune"])), soft_wrap=True, markup=False, highlight=False
        )


def tuning_lines(tuning: Mapping[str, Any]) -> list[str]:
    """What live tuning says: its latest recommendation, and how far its predictions were from what came."""
    told = tuning.get("latest") or tuning["why_nothing"] or "it is predicting"
    lines = [f"autotune {tuning['mode']}: {told}"]
    if tuning.get("latest") and tuning["why_nothing"]:
        lines.append(f"autotune: {tuning['why_nothing']}")
    if tuning.get("recommendations"):
        counted = f"{tuning['recommendations']} recommendations, {tuning['changes']} changes"
        error = tuning["median_error"]
        known = "none measured yet" if error is None else f"median error {error:.0%} of {tuning['measured']}"
        lines.append(f"autotune: {counted}; {known}")
    return lines


def cells_of(worker: Mapping[str, Any]) -> tuple[str, ...]:
    """A worker's line of the table."""
    state = worker["state"]
    if "becomes" in worker:
        state = f"becomes {worker['becomes']}"
    if "attempts" not in worker:  # it has not joined
        return (worker["worker"], worker.get("role", ""), state, *[""] * 6)
    blocks = worker["kv_blocks"]
    used, cached = (
        f"{blocks[name] / blocks['total']:.0%}" if name in blocks else "" for name in ("owned", "cached")
    )
    return (
        worker["worker"],
        worker["role"],
        state,
        duration(worker["since_s"]),
        str(worker["attempts"]),
        f"{worker['sequences']}/{worker['max_num_seqs']}" if worker["role"] != Role.PREFILL else "",
        used,
        cached,
        links_in_words(worker["links"]),
    )


def links_in_words(links: Sequence[Mapping[str, Any]]) -> str:
    """By transport, how many and how fast: with whom is a matter of both pools.

    >>> links_in_words([{"transport": "shm", "gb_per_s": 4.71}, {"transport": "shm", "gb_per_s": 5.94}])
    '2 × shm, 4.7 to 5.9 GB/s'
    """
    told = []
    for transport in sorted({link["transport"] for link in links}):
        rates = sorted(link["gb_per_s"] for link in links if link["transport"] == transport)
        least, most = f"{rates[0]:.1f}", f"{rates[-1]:.1f}"
        spread = most if least == most else f"{least} to {most}"
        told.append(f"{len(rates)} × {transport}, {spread} GB/s")
    return "; ".join(told)


def duration(seconds: float) -> str:
    """In its largest two units.

    >>> duration(9.4), duration(75), duration(7380), duration(200000)
    ('9s', '1m15s', '2h03m', '2d07h')
    """
    minutes, left_s = divmod(round(seconds), 60)
    hours, left_m = divmod(minutes, 60)
    days, left_h = divmod(hours, 24)
    if days:
        return f"{days}d{left_h:02}h"
    if hours:
        return f"{hours}h{left_m:02}m"
    return f"{minutes}m{left_s:02}s" if minutes else f"{left_s}s"


def _ask(args: argparse.Namespace, key: str) -> dict[str, Any]:
    import httpx

    url = args.url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {key}"}
    try:
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S, headers=headers) as client:
            if args.action is None:
                response = client.get("/admin/pools")
            else:
                path, body = _wish(args)
                response = client.post(
                    path, json={name: value for name, value in body.items() if value is not None}
                )
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL) as exc:
        raise ConfigError(
            f"no server answers at {args.url} ({exc}); start one with `twinpool serve`, or name it with --url"
        ) from exc
    except httpx.HTTPError as exc:
        raise RequestFailed(f"the server at {args.url} did not answer: {exc or type(exc).__name__}") from exc
    try:
        answer = response.json()
        if response.status_code == 200:
            return dict(answer)
        message = answer["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = (
            f"{args.url} answers with {response.status_code} and no word that a Twinpool server would say"
        )
    raise RequestFailed(message)


def _wish(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    is_time = args.wait is None or 0 <= args.wait <= MOST_WAIT_S
    require("--wait", args.wait, is_time, f"0 to {MOST_WAIT_S:.0f} seconds")
    if args.action == "set":
        if args.prefill is None and args.decode is None:
            raise ConfigError("`twinpool pools set` wants --prefill N, --decode M or both")
        return "/admin/pools", {"prefill": args.prefill, "decode": args.decode, "wait_s": args.wait}
    if not is_name(args.worker):
        raise ConfigError(
            f"no worker has the name {args.worker!r}: names have 1 to 64 letters, digits, - and _"
        )
    path = f"/admin/workers/{args.worker}/{args.action}"
    return path, {"role": args.role if args.action == "role" else None, "wait_s": args.wait}
