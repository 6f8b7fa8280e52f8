"""`twinpool bench serve`: load on any OpenAI-compatible server. Flags and result are those of `vllm bench serve`."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shlex
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.commands.bench_serve_flags import (
    OPENAI_KEY_VARIABLE,
    SECRET_FLAGS,
    add_load_flags,
    add_result_flags,
    add_server_flags,
    pacing_of,
)
from twinpool.commands.chat import API_KEY_VARIABLE
from twinpool.commands.dataset_flags import add_dataset_flags, dataset_settings, load_tokenizer
from twinpool.commands.flags import one_of, parse_cores
from twinpool.commands.results import (
    DEFAULT_NUM_PROMPTS,
    EXIT_INTERRUPTED,
    accelerators,
    check_result_flags,
    pairs,
    tell,
)
from twinpool.config import require
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

    from twinpool.bench.serving.arrivals import Pacing
    from twinpool.bench.serving.datasets import DatasetSettings
    from twinpool.bench.serving.record import Run
    from twinpool.bench.serving.server_facts import ServerFacts
    from twinpool.bench.serving.settings import LoadSettings
    from twinpool.bench.serving.workload import PlannedRequest

_MANY_AT_ONCE = 100
"""So many requests at the same moment are more than a server in use sees; most bound their queue."""
_FLAG_TYPES = (str, int, float, list, dict, Path, type(None))


def add_part(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes this part of `twinpool bench`."""
    parser = parts.add_parser(
        "serve",
        help="load on any OpenAI-compatible server, and what its clients see",
        description="Sends requests to a running server at their times, however slow it is, and prints what their "
        "clients saw. Latencies count from sending and, beside it, from the intended time of each request.",
        epilog="Exit status: 0; 1 this is no result (the load generator was the bottleneck, no request completed, or "
        "the load was over before its warm-up), or it failed; 2 a setting is wrong; 130 Ctrl-C (what was seen until "
        "then is printed and written).",
    )
    add_server_flags(parser)
    add_load_flags(parser)
    add_result_flags(parser)
    add_dataset_flags(parser)
    parser.set_defaults(run=run, parser=parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Loads the server, prints, writes. Returns the exit status.

    Raises:
        ConfigError: a setting is wrong.
        NoServer: nobody answers.
        SenderLost: a sender process failed.
    """
    from twinpool.bench.serving.generator import run_load
    from twinpool.bench.serving.progress import ProgressLine
    from twinpool.bench.serving.slo import parse_goodput
    from twinpool.bench.serving.verdict import generator_faults, load_warnings

    slo = parse_goodput(args.goodput)
    _check_flags(args)
    counts = accelerators(args.accelerators)
    facts = asyncio.run(_facts(args))
    dataset = dataset_settings(args)
    if dataset.max_model_len is None:
        dataset = replace(dataset, max_model_len=facts.max_model_len)
    tokenizer = _tokenizer(args, facts)
    requests, warm_up, pacing = _requests(args, dataset, tokenizer)
    _check_window(args, requests, pacing)
    _check_clients(args, requests, pacing)
    described = _described(args, facts, dataset, len(requests))
    with tempfile.TemporaryDirectory() as folder:
        settings = _load_settings(args, facts, tokenizer, Path(folder))
        if warm_up:
            run_load(warm_up, replace(settings, num_clients=1, max_concurrency=None, num_processes=1))
        if args.disable_tqdm:
            seen = run_load(requests, settings, None, described)
        else:
            with ProgressLine(len(requests)) as line:
                seen = run_load(requests, settings, line.show, described)
    if not seen.requests:
        print("interrupted before a request was sent", file=sys.stderr)
        return EXIT_INTERRUPTED
    faults = generator_faults(seen, is_paced=pacing.is_open and pacing.process != "burst")
    return tell(
        args,
        seen,
        slo,
        counts,
        file=_result_path(args, seen) if args.save_result or args.save_detailed else None,
        about={"generator_faults": list(faults), "warnings": list(load_warnings(seen))},
        faults=faults,
    )


async def _facts(args: argparse.Namespace) -> ServerFacts:
    from twinpool.bench.http1 import Address
    from twinpool.bench.serving.server_facts import ask_server

    base_url = _base_url(args)
    Address.parse("--base-url", base_url)
    return await ask_server(
        base_url,
        _api_key(args),
        args.model,
        ready_s=args.ready_check_timeout_sec,
        verify_tls=not args.insecure,
    )


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
    args: argparse.Namespace, dataset: DatasetSettings, tokenizer: tokenizers.Tokenizer
) -> tuple[list[PlannedRequest], list[PlannedRequest], Pacing]:
    """Those of the load, at their times, those of the warm-up, and how they are paced."""
    from twinpool.bench.serving.arrivals import schedule
    from twinpool.bench.serving.datasets import make_workload, warm_up_requests

    num_prompts = DEFAULT_NUM_PROMPTS if args.num_prompts is None else args.num_prompts
    workload = make_workload(dataset, tokenizer, num_prompts, args.seed, is_bound=args.num_prompts is None)
    for note in workload.notes:
        print(f"dataset: {note}", file=sys.stderr)
    pacing = pacing_of(args, has_times=all(request.at_s is not None for request in workload.requests))
    warm_up: list[PlannedRequest] = []
    if args.num_warmups:
        warm_up = warm_up_requests(
            workload.requests, dataset.prompt_as, tokenizer, args.num_warmups, args.seed
        )
    return schedule(workload.requests, pacing, args.seed), warm_up, pacing


def _load_settings(
    args: argparse.Namespace, facts: ServerFacts, tokenizer: tokenizers.Tokenizer, folder: Path
) -> LoadSettings:
    from twinpool.bench.serving.settings import TAKE_SALTS, Endpoint, LoadSettings, ServerKind

    name = args.backend.removesuffix("-chat")
    is_chat = args.backend.endswith("-chat") or (args.endpoint or "").endswith("/chat/completions")
    kind = facts.kind if name == "openai" else one_of(*ServerKind)(name.replace(".", ""))
    has_salt = kind in TAKE_SALTS and not args.keep_caches
    salted = {"cache_salt": uuid.uuid4().hex} if has_salt else {}
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
        headers=tuple(f"{key}: {value}" for key, value in pairs("--header", args.header).items()),
        max_concurrency=args.max_concurrency,
        num_clients=args.num_clients,
        limit_s=args.timeout,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        extra_body=salted | args.extra_body,
        keep_output=args.save_detailed,
        with_timelines=args.timelines,
        tokenizer_file=tokenizer_file,
        verify_tls=not args.insecure,
        request_id_prefix=args.request_id_prefix,
        num_processes=args.senders,
        cores=_sender_cores(args),
    )


def _sender_cores(args: argparse.Namespace) -> tuple[int, ...]:
    from twinpool.coordinator.launch import usable_cores

    cores, usable = parse_cores(args.sender_cores, "--sender-cores"), usable_cores()
    allowed = "cores among " + ",".join(map(str, usable))
    require("--sender-cores", args.sender_cores, set(cores) <= set(usable), allowed)
    return cores


def _described(
    args: argparse.Namespace, facts: ServerFacts, dataset: DatasetSettings, num_prompts: int
) -> dict[str, Any]:
    """The flags, by their names, and the dataset, as JSON values; nothing secret."""
    hidden = {"part", *(flag.removeprefix("--").replace("-", "_") for flag in SECRET_FLAGS)}
    flags = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        # What the command line keeps for itself is no JSON value; a dataset's flags have names with dots.
        if name not in hidden and "." not in name and isinstance(value, _FLAG_TYPES)
    }
    return flags | {
        "command": command_shown(sys.argv[1:]),
        "model": facts.model,
        "tokenizer": args.tokenizer or facts.root,
        "label": args.label or args.backend,
        "num_prompts": num_prompts,
        "request_rate": math.inf if args.request_rate is None else args.request_rate,
        "dataset_name": dataset.name.value,
        "dataset": asdict(dataset),
    }


def command_shown(arguments: Sequence[str]) -> str:
    """What was typed, with *** for what is secret. A flag may be cut short, as argparse takes it."""
    words: list[str] = []
    is_secret = False
    for word in arguments:
        if not word.startswith("--"):
            words.append("***" if is_secret else word)
            continue
        flag, has_value, _ = word.partition("=")
        is_secret = any(secret.startswith(flag) for secret in SECRET_FLAGS)
        words.append(f"{flag}=***" if is_secret and has_value else word)
    return shlex.join(["twinpool", *words])


def _check_window(args: argparse.Namespace, requests: Sequence[PlannedRequest], pacing: Pacing) -> None:
    """Before the load, where it is known when requests are to arrive: some must come after the warm-up."""
    require("--warm-up", args.warm_up, 0 <= args.warm_up < math.inf, "0 seconds or more")
    if not pacing.is_open:
        return
    last_s = max((request.at_s or 0.0 for request in requests), default=0.0)
    if args.window == "steady_state":
        require("--window", args.window, last_s > 0, "closed_cohort, as all requests arrive at once")
    allowed = f"less than the {last_s:.3g} s after which the last request arrives"
    require("--warm-up", args.warm_up, args.warm_up == 0 or args.warm_up < last_s, allowed)


def _check_clients(args: argparse.Namespace, requests: Sequence[PlannedRequest], pacing: Pacing) -> None:
    """Before the load: whether it is what its flags say. A burst is told of, as a server may refuse most of it."""
    if args.num_clients is not None:
        allowed = f"as many as there are requests at most, {len(requests)}"
        require("--num-clients", args.num_clients, args.num_clients <= len(requests), allowed)
    if pacing.process == "burst" and args.max_concurrency is None and len(requests) > _MANY_AT_ONCE:
        print(
            f"all {len(requests)} requests are sent at once, and a server refuses those beyond its queue (a Twinpool "
            "by --max-queue-requests); --request-rate spreads them, --max-concurrency and --num-clients bound them",
            file=sys.stderr,
        )


def _check_flags(args: argparse.Namespace) -> None:
    """First: what is wrong is told before minutes are spent."""
    require("--num-warmups", args.num_warmups, args.num_warmups >= 0, "0 or more")
    check_result_flags(args)


def _result_path(args: argparse.Namespace, run: Run) -> Path:
    """By default as `vllm bench serve` names it."""
    folder: Path = args.result_dir or Path()
    if args.result_filename is not None:
        return folder / str(args.result_filename)
    rate = math.inf if args.request_rate is None else args.request_rate
    concurrency = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    model = str(run.settings["model"]).split("/")[-1]
    date = datetime.fromisoformat(run.started_at).strftime("%Y%m%d-%H%M%S")
    label = str(args.label or args.backend).replace("/", "-")
    return folder / f"{label}-{rate}qps{concurrency}-{model}-{date}.json"
