"""Flags that `serve` and `worker` share: `serve` hands those of its workers on unchanged."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from twinpool.config import EngineConfig, SchedulerConfig, TransferConfig, TransportName
from twinpool.errors import ConfigError


def _default(config: type[Any], name: str) -> Any:
    (field,) = (f for f in fields(config) if f.name == name)
    if field.default is MISSING:
        raise TypeError(f"{config.__name__}.{name} has no default")
    return field.default


def add_worker_flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Adds the flags that shape one worker; returns them, for `forwarded`."""
    engine = parser.add_argument_group("engine")
    schedule = parser.add_argument_group("scheduling")
    transfer = parser.add_argument_group("KV transfer")
    added: list[argparse.Action] = []

    def add(group: argparse._ArgumentGroup, flag: str, config: type[Any], name: str, **options: Any) -> None:
        default = _default(config, name)
        added.append(group.add_argument(flag, dest=name, default=default, **options))

    add(engine, "--dtype", EngineConfig, "dtype",
        help="auto, float32, bfloat16 or float16 (auto: bfloat16 where the processor has it natively, else float32)")  # fmt: skip
    add(engine, "--device", EngineConfig, "device", help="auto, cpu, cuda or cuda:N")
    add(
        engine,
        "--block-size",
        EngineConfig,
        "block_size",
        type=int,
        help="token slots per KV block (default 16)",
    )
    add(engine, "--num-blocks", EngineConfig, "num_blocks", type=int,
        help="KV blocks per worker (default: what --kv-memory-fraction of the free memory holds)")  # fmt: skip
    add(engine, "--kv-memory-fraction", EngineConfig, "kv_memory_fraction", type=float, metavar="F",
        help="share of the free memory that all workers of this host together take for KV (default 0.5)")  # fmt: skip
    add(engine, "--max-model-len", EngineConfig, "max_model_len", type=int, metavar="TOKENS",
        help="longest prompt plus output (default: the model's own context)")  # fmt: skip
    add(schedule, "--token-budget", SchedulerConfig, "token_budget", type=int, metavar="TOKENS",
        help="prompt tokens of one step, over all prompts in it: the chunk size (default 512)")  # fmt: skip
    add(schedule, "--max-num-seqs", SchedulerConfig, "max_num_seqs", type=int, metavar="N",
        help="sequences that one worker decodes together (default 64)")  # fmt: skip
    add(schedule, "--headroom-tokens", SchedulerConfig, "headroom_tokens", type=int, metavar="TOKENS",
        help="room to grow that a sequence must have before decode admits it (default 64)")  # fmt: skip
    add(schedule, "--max-parked-blocks", SchedulerConfig, "max_parked_blocks", type=int, metavar="BLOCKS",
        help="finished prompts may wait on a prefill worker for room on decode in this many blocks (default: half)")  # fmt: skip
    add(schedule, "--transfer-timeout", SchedulerConfig, "transfer_timeout_s", type=float, metavar="SECONDS",
        help="wait for a transfer, beyond what its bytes should take (default 10)")  # fmt: skip
    added.append(schedule.add_argument(
        "--no-prefix-cache", dest="prefix_cache", action="store_false",
        help="compute every prompt anew"))  # fmt: skip
    add(transfer, "--transport", TransferConfig, "transport", type=TransportName,
        choices=[t for t in TransportName if t is not TransportName.LOOPBACK], metavar="NAME",
        help="auto, shm, ucx or tcp (auto: shm on one host, else ucx where both ends have it, else tcp)")  # fmt: skip
    add(transfer, "--kv-host", TransferConfig, "host", metavar="ADDRESS",
        help="address that KV sockets of decode workers listen on (default 127.0.0.1)")  # fmt: skip
    add(transfer, "--faults", TransferConfig, "faults", metavar="SPEC",
        help="for tests: break transfers on purpose, like delay=0.01,corrupt=0.1,seed=3")  # fmt: skip
    added.append(parser.add_argument(
        "--strict", action="store_true",
        help="anything that is not what was configured (decode computing prompt tokens, …) is an error"))  # fmt: skip
    return added


def forwarded(args: argparse.Namespace, actions: Sequence[argparse.Action]) -> tuple[str, ...]:
    """The arguments that give a worker the same values, where they are not the defaults."""
    arguments: list[str] = []
    for action in actions:
        value = getattr(args, action.dest)
        if value != action.default:
            flag = action.option_strings[0]
            arguments += [flag] if action.nargs == 0 else [f"{flag}={value}"]
    return tuple(arguments)


def engine_config(
    args: argparse.Namespace, model_dir: str, threads: int, cores: tuple[int, ...], workers_on_host: int
) -> EngineConfig:
    """The engine flags as a checked value."""
    return EngineConfig(
        model_dir=model_dir,
        dtype=args.dtype,
        device=args.device,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        kv_memory_fraction=args.kv_memory_fraction,
        workers_on_host=workers_on_host,
        max_model_len=args.max_model_len,
        threads=threads,
        cpu_cores=cores,
    )


def scheduler_config(args: argparse.Namespace) -> SchedulerConfig:
    """The scheduling flags as a checked value."""
    return SchedulerConfig(
        token_budget=args.token_budget,
        max_num_seqs=args.max_num_seqs,
        headroom_tokens=args.headroom_tokens,
        max_parked_blocks=args.max_parked_blocks,
        transfer_timeout_s=args.transfer_timeout_s,
        prefix_cache=args.prefix_cache,
    )


def parse_cores(text: str) -> tuple[int, ...]:
    """Core numbers from a list like ``0,2,3``. Raises ConfigError."""
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError as exc:
        raise ConfigError(
            f"--cores is {text!r}; allowed: core numbers separated by commas, like 0,1"
        ) from exc
