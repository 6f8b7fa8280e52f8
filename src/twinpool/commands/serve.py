"""`twinpool serve`: a coordinator, its HTTP endpoint, and the workers of this host."""

from __future__ import annotations

import argparse

from twinpool import collector
from twinpool.commands.autotune_flags import add_autotune_flags, tuner_to_serve_with
from twinpool.commands.cuda_here import check_devices
from twinpool.commands.flags import (
    Flag,
    add_flags,
    add_worker_flags,
    config_from,
    engine_config,
    forwarded,
    scheduler_config,
    transfer_config,
)
from twinpool.commands.foreign_flags import HINTS
from twinpool.commands.gateway_flags import add_gateway_flags, gateway_config
from twinpool.commands.join_token import add_join_token_flag, token_to_serve_with
from twinpool.commands.record_flags import add_record_flags, record_config
from twinpool.commands.scale_flags import add_scale_flags, scaler_to_serve_with
from twinpool.config import CoordinatorConfig, EngineConfig, PoolPlan, is_device, require
from twinpool.coordinator.launch import WorkerSpec, share_cores, usable_cores
from twinpool.errors import ConfigError
from twinpool.planner.autotune.settings import Mode

_ENDPOINT = (
    Flag("--served-model-name", CoordinatorConfig, "served_model_name", "NAME",
         "the one name that clients call the model by (default: its own)"),
    Flag("--host", CoordinatorConfig, "host", "ADDRESS", "address to listen on"),
    Flag("--port", CoordinatorConfig, "port", "PORT", "port to listen on; 0: any free one", int),
    Flag("--max-queue-requests", CoordinatorConfig, "max_queue_requests", "N",
         "requests that may wait; more get 429", int),
    Flag("--max-queue-tokens", CoordinatorConfig, "max_queue_tokens", "N", "prompt tokens that may wait", int),
    Flag("--max-wait", CoordinatorConfig, "max_wait_s", "SECONDS", "longest wait in the queue", float),
    Flag("--max-attempts", CoordinatorConfig, "max_attempts", "N",
         "how often a request is started when workers are lost", int),
    Flag("--retry-budget", CoordinatorConfig, "retry_budget", "N",
         "lost requests that may be started again, all together; every two admitted requests add one", int),
    Flag("--stall", CoordinatorConfig, "stall_s", "SECONDS",
         "/health is bad when nothing has moved for so long although there is work", float),
    Flag("--min-link", CoordinatorConfig, "min_link_gb_per_s", "GB/S",
         "a link between workers that measures less, in 1e9 bytes per second, is reported as an error", float),
    Flag("--drain", CoordinatorConfig, "drain_s", "SECONDS", "on SIGTERM, time for running requests to end", float),
)  # fmt: skip
_EXAMPLES = """\
examples:
  twinpool serve                                        the built-in model, 1 prefill + 1 decode worker
  twinpool serve Qwen/Qwen3-0.6B --prefill 2 --decode 2 --max-model-len 4096
  twinpool serve ./my-model --colocated 1 --api-keys keys.toml --host 0.0.0.0

flags of vLLM and SGLang, and what they are here: docs/from-vllm.md
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serves MODEL behind an OpenAI-compatible endpoint, on prefill and decode workers of this host.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="Hugging Face id, directory or .gguf file (default: the built-in SmolLM2-135M-Instruct)",
    )
    pools = parser.add_argument_group("pools")
    pools.add_argument("--prefill", type=int, metavar="N", help="prefill workers (default 1)")
    pools.add_argument("--decode", type=int, metavar="M", help="decode workers (default 1)")
    pools.add_argument(
        "--colocated", type=int, default=0, metavar="K", help="K workers that do both, instead of two pools"
    )
    pools.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads per worker (default: its share of the cores)"
    )
    pools.add_argument(
        "--devices",
        default="",
        metavar="LIST",
        help="the workers' devices in turn, prefill workers first, like cuda:0,cuda:1 (default: --device for all)",
    )
    pools.add_argument("--no-pin", action="store_true", help="do not keep each worker on cores of its own")
    add_flags(parser.add_argument_group("endpoint"), _ENDPOINT)
    joining = parser.add_argument_group("workers of other hosts")
    joining.add_argument(
        "--control",
        default=CoordinatorConfig().control,
        metavar="ADDRESS",
        help="where they connect, like tcp://10.0.0.1:7000 (default: this host only)",
    )
    add_join_token_flag(joining)
    add_scale_flags(parser)
    add_gateway_flags(parser)
    add_record_flags(parser)
    add_autotune_flags(parser)
    parser.set_defaults(worker_actions=add_worker_flags(parser), hints=HINTS)
    return parser


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C; a second one stops at once."""
    one = 0 if args.colocated else 1
    plan = PoolPlan(
        prefill=one if args.prefill is None else args.prefill,
        decode=one if args.decode is None else args.decode,
        colocated=args.colocated,
    )
    if scheduler_config(args).hybrid and plan.colocated:
        raise ConfigError(
            "--hybrid is for two pools: --colocated workers do both already; leave one of the two out"
        )
    engine = engine_config(args, "", 1 if args.threads is None else args.threads, (), workers_on_host=1)
    devices = assign_devices(args.devices, engine.device, len(plan.roles()))
    check_devices("--devices" if args.devices else "--device", devices, engine.kv_cache_dtype)
    config: CoordinatorConfig = config_from(
        args,
        CoordinatorConfig,
        control=args.control,
        strict=args.strict,
        join_token=token_to_serve_with(args),
        record=record_config(args),
        is_tuned=args.autotune != Mode.OFF,
    )
    gateway = gateway_config(args)
    if engine.max_model_len is not None:
        _check_context(args.model, engine.max_model_len)
    collector.put_off()
    from twinpool.coordinator.site import serve
    from twinpool.kv_transfer.faulty import FaultPlan

    FaultPlan.parse(transfer_config(args, "local").faults)
    tuner = tuner_to_serve_with(args, plan, config, scheduler_config(args))
    return serve(config, gateway, args.model, worker_specs(args, plan), scaler_to_serve_with(args), tuner)


def _check_context(model: str | None, max_model_len: int) -> None:
    """Raises ConfigError if the model was not made for so many tokens, before weights are fetched or workers start."""
    from twinpool.engine.model_config import ModelConfig
    from twinpool.engine.model_files import resolve

    ModelConfig.from_dir(resolve(model, needs_weights=False).path).context(max_model_len)


def worker_specs(args: argparse.Namespace, plan: PoolPlan) -> list[WorkerSpec]:
    """The workers of this host: their cores, and the flags that `serve` hands on to them."""
    roles = plan.roles()
    devices = assign_devices(args.devices, getattr(args, "EngineConfig.device"), len(roles))
    runs = [()] * len(roles) if args.no_pin else share_cores(len(roles), usable_cores())
    share = max(1, len(usable_cores()) // len(roles))
    return [
        WorkerSpec(
            worker_id=worker_id,
            role=role,
            cores=cores,
            threads=args.threads or len(cores) or share,
            arguments=(
                f"--workers-on-host={len(roles)}",
                f"--workers-on-device={devices.count(device)}",
                *([f"--device={device}"] if args.devices else []),
                *forwarded(args, args.worker_actions),
            ),
        )
        for (worker_id, role), cores, device in zip(roles, runs, devices, strict=True)
    ]


def assign_devices(listed: str, device: str, num_workers: int) -> list[str]:
    """The device of each worker: those of the list in turn, or `device` for all.

    Raises:
        ConfigError: both are given, or what is listed is no device.

    >>> assign_devices("cuda:0,cuda:1", "auto", 3)
    ['cuda:0', 'cuda:1', 'cuda:0']
    """
    if not listed:
        return [device] * num_workers
    default = EngineConfig("").device
    require("--device", device, device == default, f"{default} beside --devices {listed}: give one of them")
    names = listed.split(",")
    for name in names:
        require("--devices", listed, is_device(name), "a list of cpu, cuda or cuda:N, like cuda:0,cuda:1")
    return [names[i % len(names)] for i in range(num_workers)]
