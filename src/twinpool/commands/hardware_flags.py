"""Flags that say what model is planned for, on what hardware, and what its workers hold: of `simulate` and `plan`."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.commands.flags import SCHEDULING, Flag, add_flags, config_from
from twinpool.commands.kv_size import parse_bytes
from twinpool.config import BLOCK_SIZES, CoordinatorConfig, SchedulerConfig, require
from twinpool.errors import ConfigError
from twinpool.layout import Dtype, KVLayout
from twinpool.planner.plan.capacity import (
    USABLE_SHARE,
    DeviceMemory,
    KvCapacity,
    device_block_bytes,
    kv_capacity,
)
from twinpool.planner.times.devices import DEVICES, GIB, Device

if TYPE_CHECKING:
    from twinpool.planner.profile.fitted_times import FittedTimes
    from twinpool.planner.times.model_shapes import ModelShape
    from twinpool.planner.times.registry import Conditions
    from twinpool.planner.times.service_times import ServiceTimes

QUEUE = (
    Flag("--max-queue-requests", CoordinatorConfig, "max_queue_requests", "N",
         "requests that may wait; more get 429", int),
    Flag("--max-queue-tokens", CoordinatorConfig, "max_queue_tokens", "N", "prompt tokens that may wait", int),
    Flag("--max-wait", CoordinatorConfig, "max_wait_s", "SECONDS", "longest wait in the queue", float),
)  # fmt: skip
SHARED_MACHINE = "the profiled machine"
_KV_DTYPES = {"fp8": Dtype.FLOAT8_E4M3FN, "int8": Dtype.INT8}
_LEAST_LINK = 0.001
_MOST_BLOCKS = 1 << 24
"""Of one worker: a pool of them is an array here, too."""
_PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "int8", "fp4", "int4")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What workers are made of, for any number of devices each. `machine` names the one that all workers share, as
    those of a profile do. `doubts` are sentences, why a profile's times may not hold."""

    model: ModelShape
    spec: str
    conditions: Conditions
    layout: KVLayout
    max_model_len: int
    memory: DeviceMemory | None
    kv_bytes: int | None
    machine: str | None
    doubts: tuple[str, ...] = ()

    @property
    def profile(self) -> str | None:
        """The file of the profile that times are read from, if they are."""
        kind, _, what = self.spec.partition(":")
        return what if kind == "profile" else None

    def times(self, tp: int = 1) -> ServiceTimes:
        """Those of a worker on `tp` devices. Raises ConfigError."""
        from twinpool.planner.times.registry import service_times

        return service_times(self.spec, self.model, replace(self.conditions, tp=tp))

    def num_blocks(self, tp: int = 1) -> int:
        """KV blocks of a worker on `tp` devices. Raises ConfigError if not one sequence of the context fits."""
        return self.capacity(tp).num_blocks

    def capacity(self, tp: int = 1) -> KvCapacity:
        """The KV of a worker on `tp` devices. Raises ConfigError if not one sequence of the context fits."""
        if self.kv_bytes is not None:
            num_blocks = self.kv_bytes // self.layout.block_bytes
            least = self.layout.num_blocks(self.max_model_len)
            fits = f"{least * self.layout.block_bytes} bytes or more, for one sequence of {self.max_model_len} tokens"
            require("--kv-memory", self.kv_bytes, num_blocks >= least, f"{fits}; or a lower --max-model-len")
            most = f"at most {_MOST_BLOCKS:,} blocks of {self.layout.block_bytes:,} bytes"
            require("--kv-memory", self.kv_bytes, num_blocks <= _MOST_BLOCKS, most)
            return self._said_capacity(tp, self.kv_bytes, num_blocks)
        if self.memory is None:
            raise ConfigError(
                "how much KV a worker of a profile has, its server decides and logs (KV pool); say --kv-memory SIZE "
                "for each worker"
            )
        weight_bytes = math.ceil(self.model.weight_bytes(self._weight_bytes))
        return kv_capacity(self.layout, weight_bytes, tp, self.memory, self.max_model_len)

    def _said_capacity(self, tp: int, kv_bytes: int, num_blocks: int) -> KvCapacity:
        own, weights = kv_bytes // tp, 0
        if self.memory is not None:
            weights = -(-math.ceil(self.model.weight_bytes(self._weight_bytes)) // tp)
            usable = self.memory.usable_bytes
            if weights + num_blocks * device_block_bytes(self.layout, tp) > usable:
                raise ConfigError(
                    f"--kv-memory is {kv_bytes / GIB:.1f} GiB, which with {weights / GIB:.1f} GiB of weights on each "
                    f"does not fit on {tp} × {usable / GIB:.1f} GiB; say less, or more devices (TPn in a layout, --tp)"
                )
        return KvCapacity(self.layout, tp, weights + own, weights, own, num_blocks)

    @property
    def _weight_bytes(self) -> float:
        from twinpool.planner.times.registry import precision_of

        return precision_of(self.spec, self.conditions).weight_bytes


def add_hardware_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them, for `hardware` to read."""
    group = parser.add_argument_group("model and hardware")
    add = group.add_argument
    add("--model", metavar="NAME",
        help="a well-known model (docs/planning.md lists them), a directory with a config.json or a hub id (default: "
        "the profile's)")  # fmt: skip
    add("--gpu", metavar="NAME",
        help=f"{', '.join(DEVICES)}, or cpu, which is measured first: --times roofline:NAME")  # fmt: skip
    add("--profile", metavar="FILE", help="what `twinpool profile` has measured: --times profile:FILE")
    add("--times", metavar="KIND:WHAT",
        help="service times: roofline:GPU, profile:FILE, splitwise:h100, distserve:MODEL, dynamo:h200, "
        "operators:h100")  # fmt: skip
    add("--precision", choices=_PRECISIONS, metavar="NAME", help=f"of weights: {', '.join(_PRECISIONS)}")
    add("--kv-cache-dtype", choices=("auto", *_KV_DTYPES), default="auto", metavar="NAME",
        help="of KV: auto, fp8 or int8 (auto: 16 bits, with fp32 weights 32)")  # fmt: skip
    add("--block-size", type=int, default=16, metavar="TOKENS", help="of KV (default 16)")
    add(
        "--memory-share",
        type=float,
        default=None,
        metavar="F",
        help=f"of a device, for weights and KV ({USABLE_SHARE})",
    )
    add(
        "--reserve",
        type=parse_bytes,
        default=0,
        metavar="SIZE",
        help="of a device, kept for other things (0)",
    )
    add("--kv-memory", type=parse_bytes, metavar="SIZE", help="KV of each worker, in place of what is left")
    add("--link", type=float, metavar="GB/S",
        help="of one device to other workers, one way, in 1e9 bytes/s (default: its network's)")  # fmt: skip
    add("--public-data", metavar="DIR", help="with others' measurements (default: TWINPOOL_PUBLIC_DATA)")


def add_serving_flags(parser: argparse.ArgumentParser) -> None:
    """Adds those of schedulers and of the queue, for `scheduler` and `queue` to read."""
    group = parser.add_argument_group("scheduling, as `twinpool serve` takes it")
    add_flags(group, SCHEDULING)
    add_flags(group, QUEUE)
    group.add_argument("--hybrid", action="store_true", help="workers of both pools also take whole requests")
    group.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt anew")


def scheduler(args: argparse.Namespace) -> SchedulerConfig:
    """Of all workers. Raises ConfigError."""
    config: SchedulerConfig = config_from(
        args, SchedulerConfig, prefix_cache=not args.no_prefix_cache, hybrid=args.hybrid
    )
    return config


def queue(args: argparse.Namespace) -> CoordinatorConfig:
    """Raises ConfigError."""
    config: CoordinatorConfig = config_from(args, CoordinatorConfig)
    return config


def hardware(args: argparse.Namespace, max_model_len: int | None = None) -> Hardware:
    """What the flags say; the context is `max_model_len` if that is given.

    Raises:
        ConfigError: no times are named, or several, or model and times do not go together.
        ModelError: the model's config.json does not describe a decoder, or one that is not planned for.
    """
    from twinpool.planner.times.devices import Precision
    from twinpool.planner.times.model_shapes import model_shape, named_quantization
    from twinpool.planner.times.public_data import folder
    from twinpool.planner.times.registry import Conditions, device_of

    spec = _spec(args)
    kind, _, what = spec.partition(":")
    profiled = _profile(what) if kind == "profile" else None
    name = args.model or (profiled.profile.model if profiled else None)
    if name is None:
        raise ConfigError("--model is not given; name a model, as --model llama-3.1-8b")
    model = model_shape(name)
    require("--link", args.link, args.link is None or args.link >= _LEAST_LINK, f"{_LEAST_LINK} GB/s or more")
    sizes = ", ".join(map(str, BLOCK_SIZES))
    require("--block-size", args.block_size, args.block_size in BLOCK_SIZES, sizes)
    precision = None if args.precision is None else Precision(args.precision)
    named = named_quantization(name)
    quantization = model.quantization or named
    if precision is None and quantization is not None and profiled is None:
        says = model.source if named is None else repr(name)
        raise ConfigError(
            f"--precision is not given, and {says} says that weights are quantized ({quantization}); say what they are "
            f"held in: {', '.join(_PRECISIONS)}"
        )
    dtype = _KV_DTYPES.get(args.kv_cache_dtype)
    conditions = Conditions(
        precision=precision,
        kv_element_bytes=None if dtype is None else float(dtype.num_bytes),
        link_bytes_per_s=None if args.link is None else args.link * 1e9,
        public_data=folder(args.public_data, os.environ),
    )
    if profiled is not None:
        own = profiled.profile
        layout = model.kv_layout(own.block_size, dtype or Dtype(own.dtype))
        longest = own.max_model_len
    else:
        wide = Dtype.FLOAT32 if precision is Precision.FP32 else Dtype.BFLOAT16
        layout = model.kv_layout(args.block_size, dtype or wide)
        longest = model.max_positions
    require(
        "--max-model-len", max_model_len, max_model_len is None or max_model_len <= longest,
        f"at most {longest}, the context of {model.name}",
    )  # fmt: skip
    return Hardware(
        model=model,
        spec=spec,
        conditions=conditions,
        layout=layout,
        max_model_len=max_model_len or longest,
        memory=_memory(args, device_of(spec)),
        kv_bytes=args.kv_memory,
        machine=SHARED_MACHINE if profiled is not None else None,
        doubts=_doubts(profiled),
    )


def _spec(args: argparse.Namespace) -> str:
    given = {
        "--times": args.times,
        "--gpu": args.gpu and f"roofline:{args.gpu}",
        "--profile": args.profile and f"profile:{args.profile}",
    }
    named = {flag: spec for flag, spec in given.items() if spec}
    if len(named) != 1:
        found = ", ".join(named) or "none of them"
        raise ConfigError(f"--gpu, --profile and --times: given is {found}; give exactly one")
    return str(next(iter(named.values())))


def _memory(args: argparse.Namespace, device: Device | None) -> DeviceMemory | None:
    if device is None:
        return None
    share = USABLE_SHARE if args.memory_share is None else args.memory_share
    return DeviceMemory(device.memory_bytes, share, args.reserve)


def _profile(file: str) -> FittedTimes:
    from twinpool.planner.profile.fitted_times import load_times

    return load_times(Path(file))


def _doubts(profiled: FittedTimes | None) -> tuple[str, ...]:
    if profiled is None:
        return ()
    from twinpool.planner.profile.fitted_times import doubts

    return tuple(doubts(profiled.profile))
