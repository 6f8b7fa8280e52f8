"""`twinpool serve`: a coordinator, its HTTP endpoint, and the workers of this host."""

from __future__ import annotations

import argparse

from twinpool.commands.flags import (
    add_worker_flags,
    engine_config,
    forwarded,
    scheduler_config,
    transfer_config,
)
from twinpool.commands.gateway_flags import add_gateway_flags, gateway_config
from twinpool.commands.join_token import add_flag, token_to_serve_with
from twinpool.config import CoordinatorConfig, PoolPlan
from twinpool.coordinator.launch import WorkerSpec, share_cores, usable_cores


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serves MODEL behind an OpenAI-compatible endpoint, on prefill and decode workers of this host.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="Hugging Face id, directory or .gguf file (default: the built-in SmolLM2-135M-Instruct)",
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="what clients call the model (default: its own name)"
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
    pools.add_argument("--no-pin", action="store_true", help="do not keep each worker on cores of its own")
    front = parser.add_argument_group("endpoint")
    defaults = CoordinatorConfig()
    front.add_argument(
        "--host",
        default=defaults.host,
        metavar="ADDRESS",
        help=f"address to listen on (default {defaults.host})",
    )
    front.add_argument(
        "--port",
        type=int,
        default=defaults.port,
        metavar="PORT",
        help=f"port (default {defaults.port}; 0: any free one)",
    )
    front.add_argument(
        "--control",
        default=defaults.control,
        metavar="ADDRESS",
        help="where workers of other hosts connect, like tcp://10.0.0.1:7000 (default: this host only)",
    )
    add_flag(front)
    front.add_argument(
        "--max-queue-requests",
        type=int,
        default=defaults.max_queue_requests,
        metavar="N",
        help=f"requests that may wait; more get 429 (default {defaults.max_queue_requests})",
    )
    front.add_argument(
        "--max-queue-tokens",
        type=int,
        default=defaults.max_queue_tokens,
        metavar="N",
        help=f"prompt tokens that may wait (default {defaults.max_queue_tokens})",
    )
    front.add_argument(
        "--max-wait",
        type=float,
        default=defaults.max_wait_s,
        metavar="SECONDS",
        help=f"longest wait in the queue (default {defaults.max_wait_s:.0f})",
    )
    front.add_argument(
        "--max-attempts",
        type=int,
        default=defaults.max_attempts,
        metavar="N",
        help=f"how often a request is started when workers are lost (default {defaults.max_attempts})",
    )
    front.add_argument(
        "--retry-budget",
        type=int,
        default=defaults.retry_budget,
        metavar="N",
        help="lost requests that may be started again, all together; every two admitted ones add one "
        f"(default {defaults.retry_budget})",
    )
    front.add_argument(
        "--stall",
        type=float,
        default=defaults.stall_s,
        metavar="SECONDS",
        help="/health is bad when nothing has moved for so long although there is work "
        f"(default {defaults.stall_s:.0f})",
    )
    front.add_argument(
        "--drain",
        type=float,
        default=defaults.drain_s,
        metavar="SECONDS",
        help=f"on SIGTERM, time for running requests to end (default {defaults.drain_s:.0f})",
    )
    add_gateway_flags(parser)
    parser.set_defaults(worker_actions=add_worker_flags(parser))
    return parser


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C; a second one stops at once."""
    one = 0 if args.colocated else 1
    plan = PoolPlan(
        prefill=one if args.prefill is None else args.prefill,
        decode=one if args.decode is None else args.decode,
        colocated=args.colocated,
    )
    scheduler_config(args)
    engine_config(args, "", 1 if args.threads is None else args.threads, (), workers_on_host=1)
    config = CoordinatorConfig(
        host=args.host,
        port=args.port,
        control=args.control,
        join_token=token_to_serve_with(args),
        served_model_name=args.served_model_name or "",
        max_queue_requests=args.max_queue_requests,
        max_queue_tokens=args.max_queue_tokens,
        max_wait_s=args.max_wait,
        max_attempts=args.max_attempts,
        retry_budget=args.retry_budget,
        stall_s=args.stall,
        drain_s=args.drain,
    )
    gateway = gateway_config(args)
    from twinpool.coordinator.site import serve
    from twinpool.kv_transfer.faulty import FaultPlan

    FaultPlan.parse(transfer_config(args, "local").faults)
    return serve(config, gateway, args.model, worker_specs(args, plan))


def worker_specs(args: argparse.Namespace, plan: PoolPlan) -> list[WorkerSpec]:
    """The workers of this host: their cores, and the flags that `serve` hands on to them."""
    roles = plan.roles()
    runs = [()] * len(roles) if args.no_pin else share_cores(len(roles), usable_cores())
    share = max(1, len(usable_cores()) // len(roles))
    return [
        WorkerSpec(
            worker_id=worker_id,
            role=role,
            cores=cores,
            threads=args.threads or len(cores) or share,
            arguments=(f"--workers-on-host={len(roles)}", *forwarded(args, args.worker_actions)),
        )
        for (worker_id, role), cores in zip(roles, runs, strict=True)
    ]
