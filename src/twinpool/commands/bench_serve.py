"""`twinpool bench serve`: load on any OpenAI-compatible server. Flags and result are those of `vllm bench serve`."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.commands.chat import API_KEY_VARIABLE
from twinpool.commands.dataset_flags import add_dataset_flags, dataset_settings, load_tokenizer
from twinpool.commands.flags import one_of, parse_cores
from twinpool.config import require
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

    from twinpool.bench.serving.arrivals import Pacing
    from twinpool.bench.serving.record import Run
    from twinpool.bench.serving.server_facts import ServerFacts
    from twinpool.bench.serving.settings import LoadSettings
    from twinpool.bench.serving.summary import Summary, Window
    from twinpool.bench.serving.workload import PlannedRequest

EXIT_GOOD, EXIT_NO_RESULT, EXIT_NOTHING_COMPLETED, EXIT_INTERRUPTED = 0, 1, 4, 130
OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"
BACKENDS = ("openai", "openai-chat", "twinpool", "twinpool-chat", "vllm", "vllm-chat", "sglang", "sglang-chat",
            "llama.cpp", "llama.cpp-chat")  # fmt: skip
_ARRIVALS = ("auto", "poisson", "gamma", "constant", "burst", "replay")
_FLAG_TYPES = (str, int, float, list, dict, Path, type(None))
_CONTEXT = "DatasetSettings.max_model_len"


def add_part(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes this part of `twinpool bench`."""
    parser = parts.add_parser(
        "serve",
        help="load on any OpenAI-compatible server, and what its clients see",
        description="Sends requests to a running server at their times, however slow it is, and prints what their "
        "clients saw. Latencies count from sending and, beside it, from the intended time of each request.",
        epilog="Exit status: 0; 1 the load generator itself was the bottleneck, so this is no result, or it failed; "
        "2 a setting is wrong; 4 no request completed; 130 Ctrl-C (what was seen until then is printed and written).",
    )
    _add_server_flags(parser)
    _add_load_flags(parser)
    _add_result_flags(parser)
    add_dataset_flags(parser)
    parser.set_defaults(run=run)
    return parser


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
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


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--num-prompts", type=int, default=1000, metavar="N", help="default 1000; 0: all of a file"
    )
    load.add_argument(
        "--request-rate", type=float, metavar="R",
        help="per second; inf: all at once (default: the data's times if it has some, else inf)",
    )  # fmt: skip
    load.add_argument(
        "--burstiness", type=float, default=1.0, metavar="B",
        help="shape of the gamma distribution of gaps: below 1 bursts, above 1 even (default 1: Poisson)",
    )  # fmt: skip
    load.add_argument(
        "--arrivals", choices=_ARRIVALS, default="auto", metavar="NAME",
        help=f"{', '.join(_ARRIVALS)} (auto: by rate and burstiness)",
    )  # fmt: skip
    load.add_argument(
        "--max-concurrency", type=int, metavar="N",
        help="most requests at once; arrivals beyond wait, and their intended times stay",
    )  # fmt: skip
    load.add_argument(
        "--num-clients",
        type=int,
        metavar="N",
        help="a closed loop instead: so many ask again when they have an answer",
    )
    load.add_argument(
        "--ramp-up-strategy", choices=("linear", "exponential"), metavar="NAME", help="linear or exponential"
    )
    load.add_argument("--ramp-up-start-rps", type=float, metavar="R", help="rate of the first request")
    load.add_argument("--ramp-up-end-rps", type=float, metavar="R", help="rate of the last one")
    load.add_argument(
        "--num-warmups",
        type=int,
        default=0,
        metavar="N",
        help="other requests, one by one, before the load (0)",
    )
    load.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="longest wait for an answer (600)"
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default 0)")
    load.add_argument("--senders", type=int, default=1, metavar="N", help="processes that send (default 1)")
    load.add_argument(
        "--sender-cores", default="", metavar="LIST", help="cores that they run on, like 0,1 (any)"
    )
    load.add_argument("--request-id-prefix", default="", metavar="TEXT", help="default: drawn for each run")
    load.add_argument("--disable-tqdm", action="store_true", help="no progress")


def _add_result_flags(parser: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> int:
    """Loads the server, prints, writes. Returns the exit status.

    Raises:
        ConfigError: a setting is wrong.
        NoServer: nobody answers.
        SenderLost: a sender process failed.
    """
    from twinpool.bench.serving.generator import run_load
    from twinpool.bench.serving.printed import printed
    from twinpool.bench.serving.progress import ProgressLine
    from twinpool.bench.serving.slo import parse_goodput
    from twinpool.bench.serving.verdict import generator_faults

    slo = parse_goodput(args.goodput)
    _check_files(args)
    metadata, accelerators = _pairs("--metadata", args.metadata), _counts(args.accelerators)
    facts = asyncio.run(_facts(args))
    tokenizer = _tokenizer(args, facts)
    requests, warm_up, pacing = _requests(args, facts, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        settings = _load_settings(args, facts, tokenizer, Path(folder))
        if warm_up:
            run_load(warm_up, replace(settings, num_clients=1, max_concurrency=None, num_processes=1))
        if args.disable_tqdm:
            run = run_load(requests, settings, None, _described(args, facts, len(requests)))
        else:
            with ProgressLine(len(requests)) as line:
                run = run_load(requests, settings, line.show, _described(args, facts, len(requests)))
    if not run.requests:
        print("interrupted before a request was sent", file=sys.stderr)
        return EXIT_INTERRUPTED
    summary = _summary(args, run, slo, accelerators)
    is_paced = pacing.is_open and pacing.process != "burst"
    faults = generator_faults(run, is_paced=is_paced)
    result = _result(args, run, summary, metadata, faults)
    print(printed(result, run, summary, faults))
    _save(args, run, result)
    if run.was_interrupted:
        return EXIT_INTERRUPTED
    if faults:
        return EXIT_NO_RESULT
    return EXIT_GOOD if result["completed"] else EXIT_NOTHING_COMPLETED


async def _facts(args: argparse.Namespace) -> ServerFacts:
    from twinpool.bench.serving.server_facts import ask_server

    base_url = _base_url(args)
    try:
        return await ask_server(
            base_url,
            _api_key(args),
            args.model,
            ready_s=args.ready_check_timeout_sec,
            verify_tls=not args.insecure,
        )
    except ConfigError as exc:
        raise ConfigError(str(exc).replace("--url", "--base-url")) from exc


def _base_url(args: argparse.Namespace) -> str:
    url: str = args.base_url or f"http://{args.host}:{args.port}"
    return url.rstrip("/").removesuffix("/v1")


def _api_key(args: argparse.Namespace) -> str | None:
    return args.api_key or os.environ.get(API_KEY_VARIABLE) or os.environ.get(OPENAI_KEY_VARIABLE)


def _tokenizer(args: argparse.Namespace, facts: ServerFacts) -> tokenizers.Tokenizer:
    from twinpool.engine.default_model import DEFAULT_MODEL

    if args.tokenizer or facts.model == DEFAULT_MODEL:
        return load_tokenizer(args.tokenizer)
    try:
        return load_tokenizer(facts.root)
    except ConfigError as exc:
        raise ConfigError(
            f"the server's model is {facts.model!r}, and there is no tokenizer of that name here; name one with "
            "--tokenizer: a tokenizer.json, a model's directory or a hub id"
        ) from exc


def _requests(
    args: argparse.Namespace, facts: ServerFacts, tokenizer: tokenizers.Tokenizer
) -> tuple[list[PlannedRequest], list[PlannedRequest], Pacing]:
    """Those of the load, at their times, those of the warm-up, and how they are paced."""
    from twinpool.bench.serving.arrivals import schedule
    from twinpool.bench.serving.datasets import make_workload, warm_up_requests

    if getattr(args, _CONTEXT) is None:
        setattr(args, _CONTEXT, facts.max_model_len)
    dataset = dataset_settings(args)
    require("--num-warmups", args.num_warmups, args.num_warmups >= 0, "0 or more")
    workload = make_workload(dataset, tokenizer, args.num_prompts, args.seed)
    for note in workload.notes:
        print(f"dataset: {note}", file=sys.stderr)
    pacing = _pacing(args, has_times=all(request.at_s is not None for request in workload.requests))
    warm_up: list[PlannedRequest] = []
    if args.num_warmups:
        warm_up = warm_up_requests(
            workload.requests, dataset.prompt_as, tokenizer, args.num_warmups, args.seed
        )
    return schedule(workload.requests, pacing, args.seed), warm_up, pacing


def _pacing(args: argparse.Namespace, *, has_times: bool) -> Pacing:
    """What the flags say. Raises ConfigError."""
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


def _load_settings(
    args: argparse.Namespace, facts: ServerFacts, tokenizer: tokenizers.Tokenizer, folder: Path
) -> LoadSettings:
    from twinpool.bench.serving.settings import Endpoint, LoadSettings, ServerKind

    name = args.backend.removesuffix("-chat")
    is_chat = args.backend.endswith("-chat") or (args.endpoint or "").endswith("/chat/completions")
    kind = facts.kind if name == "openai" else one_of(*ServerKind)(name.replace(".", ""))
    tokenizer_file = None
    if kind in (ServerKind.OPENAI, ServerKind.LLAMACPP):  # their chunks do not say how many tokens they have
        tokenizer_file = str(folder / "tokenizer.json")
        tokenizer.save(tokenizer_file)
    return LoadSettings(
        base_url=_base_url(args),
        model=facts.model,
        endpoint=Endpoint.CHAT if is_chat else Endpoint.COMPLETIONS,
        path=args.endpoint or "",
        kind=kind,
        api_key=_api_key(args),
        headers=tuple(f"{key}: {value}" for key, value in _pairs("--header", args.header).items()),
        max_concurrency=args.max_concurrency,
        num_clients=args.num_clients,
        limit_s=args.timeout,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        extra_body=args.extra_body,
        keep_output=args.save_detailed,
        with_timelines=args.timelines,
        tokenizer_file=tokenizer_file,
        verify_tls=not args.insecure,
        request_id_prefix=args.request_id_prefix,
        num_processes=args.senders,
        cores=parse_cores(args.sender_cores),
    )


def _described(args: argparse.Namespace, facts: ServerFacts, num_prompts: int) -> dict[str, Any]:
    """The flags, by their names, and the dataset, as JSON values; nothing secret."""
    hidden = {"part", "api_key", "header"}
    flags = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        # What the command line keeps for itself is no JSON value; a dataset's flags have names with dots.
        if name not in hidden and "." not in name and isinstance(value, _FLAG_TYPES)
    }
    dataset = dataset_settings(args)
    return flags | {
        "command": _command(args.api_key),
        "model": facts.model,
        "tokenizer": args.tokenizer or facts.root,
        "label": args.label or args.backend,
        "num_prompts": num_prompts,
        "request_rate": math.inf if args.request_rate is None else args.request_rate,
        "dataset_name": dataset.name.value,
        "dataset": asdict(dataset),
    }


def _command(api_key: str | None) -> str:
    """What was typed, without the key."""
    words = ["***" if word == api_key else word for word in sys.argv]
    return shlex.join(["twinpool", *words[1:]])


def _summary(args: argparse.Namespace, run: Run, slo: Any, accelerators: Mapping[str, int]) -> Summary:
    from twinpool.bench.serving.summary import closed_cohort, steady_state, summarize

    choose = steady_state if args.window == "steady_state" else closed_cohort
    window: Window = choose(run, args.warm_up)
    return summarize(run, slo, window, accelerators=accelerators)


def _result(
    args: argparse.Namespace, run: Run, summary: Summary, metadata: Mapping[str, str], faults: tuple[str, ...]
) -> dict[str, Any]:
    from twinpool.bench.serving.result import result_json

    result = result_json(
        run,
        summary,
        metadata=metadata,
        percentile_metrics=[name for name in args.percentile_metrics.split(",") if name],
        metric_percentiles=_percentiles(args.metric_percentiles),
        is_detailed=args.save_detailed,
    )
    result["twinpool"] |= {"is_valid": not faults, "generator_faults": list(faults)}
    return result


def _percentiles(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part]
    except ValueError as exc:
        raise ConfigError(f"--metric-percentiles is {text!r}; allowed: numbers like 50,90,99") from exc


def _check_files(args: argparse.Namespace) -> None:
    """First: a folder that is not there is told before minutes are spent."""
    from twinpool.bench.serving.result import PERCENTILE_METRICS

    _percentiles(args.metric_percentiles)
    names = {name for name in args.percentile_metrics.split(",") if name}
    allowed = f"names among {', '.join(PERCENTILE_METRICS)}, separated by commas"
    require("--percentile-metrics", args.percentile_metrics, names <= set(PERCENTILE_METRICS), allowed)
    folder = args.result_dir
    require("--result-dir", str(folder), folder is None or folder.is_dir(), "a folder that exists")
    file = args.save_records
    require(
        "--save-records",
        str(file),
        file is None or file.absolute().parent.is_dir(),
        "a file in a folder that exists",
    )


def _save(args: argparse.Namespace, run: Run, result: dict[str, Any]) -> None:
    from twinpool.bench.serving.record import encode_run

    if args.save_result or args.save_detailed:
        path = (args.result_dir or Path()) / (args.result_filename or _file_name(args, run))
        _write(path, (json.dumps(result) + "\n").encode())
        print(f"result: {path}")
    if args.save_records is not None:
        _write(args.save_records, encode_run(run))
        print(f"records: {args.save_records}")


def _file_name(args: argparse.Namespace, run: Run) -> str:
    """As `vllm bench serve` names it."""
    rate = math.inf if args.request_rate is None else args.request_rate
    concurrency = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    model = str(run.settings["model"]).split("/")[-1]
    date = datetime.fromisoformat(run.started_at).strftime("%Y%m%d-%H%M%S")
    return f"{args.label or args.backend}-{rate}qps{concurrency}-{model}-{date}.json"


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc


def _pairs(flag: str, values: list[str]) -> dict[str, str]:
    """KEY=VALUE pairs. Raises ConfigError."""
    for value in values:
        require(flag, value, "=" in value[1:], "pairs like KEY=VALUE")
    return {key: value for key, _, value in (text.partition("=") for text in values)}


def _counts(values: list[str]) -> dict[str, int]:
    pairs = _pairs("--accelerators", values)
    for pool, count in pairs.items():
        require("--accelerators", f"{pool}={count}", count.isdecimal(), "pairs like decode=2")
    return {pool: int(count) for pool, count in pairs.items()}


def _json_object(text: str) -> dict[str, Any]:
    """A flag's type: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r}; allowed: a JSON object like {{"top_p": 0.9}}')
    return value
