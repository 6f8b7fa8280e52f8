"""Flags that fill settings, and those that `serve` and `worker` share: `serve` hands its workers' on unchanged."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, TypeVar

from twinpool.config import Encryption, EngineConfig, SchedulerConfig, TransferConfig, TransportName
from twinpool.errors import ConfigError

E = TypeVar("E", bound=StrEnum)


def one_of(*allowed: E) -> Callable[[str], E]:
    """A flag's type: one of the enum's members, or an error that lists them."""

    def parse(text: str) -> E:
        for member in allowed:
            if text == member.value:
                return member
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: {', '.join(allowed)}")

    return parse


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: the setting it fills (its default too) and how it is shown."""

    name: str
    config: type[Any]
    field: str
    metavar: str
    help: str
    type: Callable[[str], Any] = str

    @property
    def default(self) -> Any:
        """The setting's own default."""
        return next(field.default for field in fields(self.config) if field.name == self.field)


_ENGINE = (
    Flag("--dtype", EngineConfig, "dtype", "NAME",
         "auto, float32, bfloat16 or float16 (auto: bfloat16 where the processor has it natively, else float32; "
         "only float32 gives a request the same tokens every time)"),
    Flag("--kv-cache-dtype", EngineConfig, "kv_cache_dtype", "NAME",
         "auto, fp8 or int8: KV as the model computes (auto) or in 8 bits, on a GPU only; half the memory and traffic, "
         "other tokens now and then"),
    Flag("--weights", EngineConfig, "weights", "NAME",
         "auto or int8: as the model computes (auto), or the layers' matrices in 8 bits, on a CPU only; up to four "
         "streams run faster, larger batches perhaps slower, and tokens are others now and then"),
    Flag("--device", EngineConfig, "device", "NAME", "auto, cpu, cuda or cuda:N"),
    Flag("--block-size", EngineConfig, "block_size", "TOKENS", "token slots per KV block", int),
    Flag("--num-blocks", EngineConfig, "num_blocks", "N",
         "KV blocks per worker (default: what --kv-memory-fraction of the free memory holds)", int),
    Flag("--kv-memory-fraction", EngineConfig, "kv_memory_fraction", "F",
         "share of the free memory that the KV of all workers of this host takes together", float),
    Flag("--max-model-len", EngineConfig, "max_model_len", "TOKENS",
         "longest prompt plus output (default: the model's own context)", int),
    Flag("--step-timeout", EngineConfig, "step_timeout_s", "SECONDS",
         "a model step that runs for so long is stuck: the worker ends, its requests go on elsewhere", float),
)  # fmt: skip
SCHEDULING = (
    Flag("--token-budget", SchedulerConfig, "token_budget", "TOKENS",
         "tokens of one step, over all its prompts: the chunk size (default 512 on prefill, 128 on colocated workers)",
         int),
    Flag("--max-num-seqs", SchedulerConfig, "max_num_seqs", "N", "sequences that one worker decodes together", int),
    Flag("--headroom-tokens", SchedulerConfig, "headroom_tokens", "TOKENS",
         "room to grow that a sequence must have before decode admits it", int),
    Flag("--max-parked-blocks", SchedulerConfig, "max_parked_blocks", "BLOCKS",
         "finished prompts may wait on a prefill worker for room on decode in this many blocks (default: half)", int),
    Flag("--itl-budget", SchedulerConfig, "itl_budget_ms", "MS",
         "with --hybrid: no prompt makes a stream's gap between two tokens longer than this", float),
    Flag("--grant-timeout", SchedulerConfig, "grant_timeout_s", "SECONDS",
         "longest wait of a computed prompt for room on one decode worker; then it is started again elsewhere", float),
    Flag("--transfer-timeout", SchedulerConfig, "transfer_timeout_s", "SECONDS",
         "wait for a transfer, beyond what its bytes should take", float),
)  # fmt: skip
_TRANSFER = (
    Flag("--transport", TransferConfig, "transport", "NAME",
         "auto, shm, ucx or tcp (auto: shm on one host, else ucx where both ends have it, else tcp)",
         one_of(TransportName.AUTO, TransportName.SHM, TransportName.UCX, TransportName.TCP)),
    Flag("--kv-host", TransferConfig, "host", "ADDRESS", "address that a decode worker's KV sockets listen on"),
    Flag("--kv-encryption", TransferConfig, "encryption", "WHEN",
         "auto, on or off: encrypt KV that goes through a socket (auto: between hosts)",
         one_of(Encryption.AUTO, Encryption.ON, Encryption.OFF)),
    Flag("--faults", TransferConfig, "faults", "SPEC",
         "for tests: break transfers on purpose, like delay=0.01,corrupt=0.1,seed=3"),
)  # fmt: skip


def add_flags(group: argparse._ArgumentGroup, flags: Sequence[Flag]) -> list[argparse.Action]:
    """Adds `flags`, for `config_from` to read; returns them, for `forwarded`."""
    added: list[argparse.Action] = []
    for flag in flags:
        shown = "" if flag.default in (None, "") else f" (default {flag.default})"
        action = group.add_argument(
            flag.name, dest=f"{flag.config.__name__}.{flag.field}", default=flag.default, metavar=flag.metavar,
            type=flag.type, help=flag.help + shown,
        )  # fmt: skip
        added.append(action)
    return added


def add_worker_flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Adds the flags that shape one worker; returns them, for `forwarded`."""
    added: list[argparse.Action] = []
    for title, flags in (("engine", _ENGINE), ("scheduling", SCHEDULING), ("KV transfer", _TRANSFER)):
        added += add_flags(parser.add_argument_group(title), flags)
    hybrid = parser.add_argument(
        "--hybrid",
        action="store_true",
        help="decode workers also compute prompts, and prefill workers also generate, where that is predicted to be "
        "sooner and keeps --itl-budget",
    )
    no_cache = parser.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt anew")
    strict = parser.add_argument(
        "--strict",
        action="store_true",
        help="what is not as configured (a slower transport, decode computing prompt tokens, decode steps on a GPU "
        "without a CUDA graph) is an error",
    )
    eager = parser.add_argument(
        "--enforce-eager",
        action="store_true",
        help="on a GPU: launch decode steps kernel by kernel, not as CUDA graphs",
    )
    return [*added, hybrid, no_cache, eager, strict]


def config_from(args: argparse.Namespace, config: type[Any], **others: Any) -> Any:
    """The checked value of `config` from its flags and `others`. Raises ConfigError."""
    prefix = f"{config.__name__}."
    given = {
        name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)
    }
    return config(**given, **others)


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
    args: argparse.Namespace,
    model_dir: str,
    threads: int,
    cores: tuple[int, ...],
    workers_on_host: int,
    workers_on_device: int = 1,
) -> EngineConfig:
    """The engine flags as a checked value. Raises ConfigError."""
    config: EngineConfig = config_from(
        args,
        EngineConfig,
        model_dir=model_dir,
        threads=threads,
        cpu_cores=cores,
        workers_on_host=workers_on_host,
        workers_on_device=workers_on_device,
        enforce_eager=args.enforce_eager,
    )
    return config


def scheduler_config(args: argparse.Namespace) -> SchedulerConfig:
    """The scheduling flags as a checked value. Raises ConfigError."""
    if args.hybrid and args.strict:
        raise ConfigError(
            "--hybrid lets decode workers compute prompt tokens, which --strict forbids; leave one of the two out"
        )
    config: SchedulerConfig = config_from(
        args, SchedulerConfig, prefix_cache=not args.no_prefix_cache, hybrid=args.hybrid
    )
    return config


def transfer_config(args: argparse.Namespace, deployment: str) -> TransferConfig:
    """The transfer flags as a checked value. Raises ConfigError."""
    config: TransferConfig = config_from(args, TransferConfig, deployment=deployment)
    return config


def parse_cores(text: str, flag: str = "--cores") -> tuple[int, ...]:
    """Core numbers from a list like ``0,2,3``. Raises ConfigError, which names `flag`."""
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError as exc:
        raise ConfigError(f"{flag} is {text!r}; allowed: core numbers separated by commas, like 0,1") from exc
