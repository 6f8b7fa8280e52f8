"""Flags of `twinpool bench serve` beside its dataset's, named as those of `vllm bench serve` where that has them."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.commands.chat import API_KEY_VARIABLE
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.bench.serving.arrivals import Pacing

OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"
SECRET_FLAGS = ("--api-key", "--header")
"""Whose values are written nowhere."""
BACKENDS = ("openai", "openai-chat", "twinpool", "twinpool-chat", "vllm", "vllm-chat", "sglang", "sglang-chat",
            "llama.cpp", "llama.cpp-chat")  # fmt: skip
_ARRIVALS = ("auto", "poisson", "gamma", "constant", "burst", "replay")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Where the server is, and what it is sent."""
    server = parser.add_argument_group("server")
    server.add_argument(
        "--backend", "--endpoint-type", default="openai", choices=BACKENDS, metavar="NAME",
        help=f"{', '.join(BACKENDS)}: the route, and what it is sent beyond OpenAI's fields; openai finds out whose "
        "server it is (default openai)",
    )  # fmt: skip
    server.add_argument(
        "--base-url", metavar="URL", help="like https://host/prefix (default: by host and port)"
    )
    server.add_argument("--host", default="127.0.0.1", metavar="NAME", help="default 127.0.0.1")
    server.add_argument("--port", type=int, default=8000, metavar="N", help="default 8000")
    server.add_argument("--endpoint", metavar="PATH", help="default: /v1/completions or /v1/chat/completions")
    server.add_argument("--model", metavar="NAME", help="default: the first that is served")
    server.add_argument(
        "--tokenizer", metavar="NAME",
        help="a tokenizer.json, a model's directory or hub id: what prompts are made with (default: the model's)",
    )  # fmt: skip
    server.add_argument(
        "--api-key", metavar="KEY",
        help=f"better in {API_KEY_VARIABLE} or {OPENAI_KEY_VARIABLE}: others see the arguments of a command",
    )  # fmt: skip
    server.add_argument("--header", nargs="+", default=[], metavar="KEY=VALUE", help="further headers")
    server.add_argument("--insecure", action="store_true", help="take any TLS certificate")
    server.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="further fields")
    server.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0: greedy")
    server.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction,
        help="answers are as long as planned (default: where the server is known to take it)",
    )  # fmt: skip
    server.add_argument(
        "--ready-check-timeout-sec", type=float, default=60.0, metavar="S",
        help="longest wait for a Twinpool that is not ready yet (60)",
    )  # fmt: skip
    server.add_argument(
        "--timelines", action=argparse.BooleanOptionalAction, default=True,
        help="of a Twinpool: ask for the stages of each request after the load",
    )  # fmt: skip


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """How many requests, when, and by whom."""
    load = parser.add_argument_group("load")
    add_arrival_flags(load)
    load.add_argument(
        "--num-warmups",
        type=int,
        default=0,
        metavar="N",
        help="other requests, one by one, before the load (0)",
    )
    load.add_argument(
        "--keep-caches", action="store_true",
        help="let a prefix cache find what earlier runs have left (default: Twinpool and vLLM are sent a cache_salt of "
        "this run)",
    )  # fmt: skip
    load.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="longest wait for an answer (600)"
    )
    load.add_argument("--senders", type=int, default=1, metavar="N", help="processes that send (default 1)")
    load.add_argument(
        "--sender-cores", default="", metavar="LIST", help="cores that they run on, like 0,1 (any)"
    )
    load.add_argument("--request-id-prefix", default="", metavar="TEXT", help="default: drawn for each run")
    load.add_argument("--disable-tqdm", action="store_true", help="no progress")


def add_arrival_flags(group: argparse._ArgumentGroup) -> None:
    """How many requests come, and when; `pacing_of` reads most of them."""
    group.add_argument(
        "--num-prompts", type=int, metavar="N",
        help="requests (default 1000); of a dataset with a file so many at most, and 0: all",
    )  # fmt: skip
    group.add_argument(
        "--request-rate", type=float, metavar="R",
        help="per second; inf: all at once (default: the data's times if it has some, else inf)",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="B",
        help="shape of the gamma distribution of gaps: below 1 bursts, above 1 even (default 1: Poisson)",
    )  # fmt: skip
    group.add_argument(
        "--arrivals", choices=_ARRIVALS, default="auto", metavar="NAME",
        help=f"{', '.join(_ARRIVALS)} (auto: by rate and burstiness)",
    )  # fmt: skip
    group.add_argument(
        "--max-concurrency", type=int, metavar="N",
        help="most requests at once; arrivals beyond wait, and their intended times stay",
    )  # fmt: skip
    group.add_argument(
        "--num-clients",
        type=int,
        metavar="N",
        help="a closed loop instead: so many ask again when they have an answer",
    )
    group.add_argument(
        "--ramp-up-strategy", choices=("linear", "exponential"), metavar="NAME", help="linear or exponential"
    )
    group.add_argument("--ramp-up-start-rps", type=float, metavar="R", help="rate of the first request")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="R", help="rate of the last one")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default 0)")


def add_result_flags(parser: argparse.ArgumentParser) -> None:
    """What counts, and where it is written."""
    result = parser.add_argument_group("result")
    result.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="bounds, like ttft:300 tpot:50 e2el:2000 itl:100",
    )
    result.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el",
        metavar="LIST",
        help="default ttft,tpot,itl,e2el",
    )
    result.add_argument("--metric-percentiles", default="99", metavar="LIST", help="default 99")
    result.add_argument(
        "--warm-up",
        type=float,
        default=0.0,
        metavar="S",
        help="requests of the first S seconds do not count (0)",
    )
    result.add_argument(
        "--window", choices=("closed_cohort", "steady_state"), default="closed_cohort", metavar="NAME",
        help="closed_cohort: all requests to their end (default); steady_state: rates up to the last arrival only",
    )  # fmt: skip
    result.add_argument(
        "--accelerators",
        nargs="+",
        default=[],
        metavar="POOL=N",
        help="rates per accelerator, like prefill=1 decode=2",
    )
    result.add_argument("--label", metavar="TEXT", help="names the result (default: the backend)")
    result.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="into the result")
    result.add_argument("--save-result", action="store_true", help="write the result as JSON")
    result.add_argument("--save-detailed", action="store_true", help="with lists of all requests and gaps")
    result.add_argument("--result-dir", type=Path, metavar="DIR", help="default: here")
    result.add_argument("--result-filename", metavar="NAME", help="default: of label, rate, model and date")
    result.add_argument(
        "--save-records",
        type=Path,
        metavar="FILE",
        help="write every chunk of every request, for reports and replays",
    )


def pacing_of(args: argparse.Namespace, *, has_times: bool) -> Pacing:
    """When requests are to be sent, by the flags. Raises ConfigError."""
    from twinpool.bench.serving.arrivals import Pacing, Process, Ramp, RampShape

    rate = args.request_rate
    ramp = None
    if args.ramp_up_strategy is not None:
        start, end = args.ramp_up_start_rps, args.ramp_up_end_rps
        if start is None or end is None:
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
        if rate is not None:
            raise ConfigError("--request-rate and --ramp-up-strategy exclude each other; leave one out")
        ramp = Ramp(RampShape(args.ramp_up_strategy), start, end)
    if args.num_clients is not None:
        if (
            rate is not None
            or ramp is not None
            or args.arrivals != "auto"
            or args.max_concurrency is not None
        ):
            raise ConfigError(
                "--num-clients is a closed loop, without rate, arrivals and --max-concurrency; leave these out"
            )
        return Pacing(Process.CLOSED)
    if args.arrivals != "auto":
        process = Process(args.arrivals)
    elif ramp is None and (rate is None or rate == math.inf):
        process = Process.REPLAY if has_times and rate is None else Process.BURST
    else:
        process = Process.POISSON if args.burstiness == 1.0 else Process.GAMMA
    return Pacing(process, math.inf if rate is None else rate, args.burstiness, ramp)


def _json_object(text: str) -> dict[str, Any]:
    """A flag's type: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r}; allowed: a JSON object like {{"top_p": 0.9}}')
    return value
